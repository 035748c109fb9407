"""Training loops: steps on a clock, as equations are solved, and on a meter, which counts gradients."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_anderson import GaussNewton, Objective

from ..optimizers import accelerate, build
from . import Case, Clock
from .meter import Meter
from .quasi_newton import Points, retaining

Closures = Callable[[Case], Iterator[Any]]
"""A closure for every step."""
Wrapper = Callable[[Optimizer], Any]


# On a clock


def gauss_newton(base: str, clock: Clock, rate: float) -> None:
    """Ours with its defaults: the program of a user."""
    objective = Objective(clock.case.model, **clock.case.terms)
    optimizer = clock.optimizer = GaussNewton(build(base, clock.case.model.parameters(), rate))
    while True:
        clock.tick(optimizer.step(objective))


def first_order(base: str, closures: Closures, clock: Clock, rate: float, *, cosine: bool = False) -> None:
    """The base alone."""
    optimizer = build(base, clock.case.model.parameters(), rate)
    for closure in closures(clock.case):
        if cosine:
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 + math.cos(math.pi * clock.share)) / 2
        clock.tick(optimizer.step(closure))


def objective_closures(case: Case, *, retain: bool = False) -> Iterator[Any]:
    """The objective, which draws points at every step; points with large residuals may stay."""
    return repeat(Objective(case.model, **retaining(case.terms) if retain else case.terms))


def traced_closures(case: Case) -> Iterator[Any]:
    """As the objective, traced once."""
    points = Points(case, case.terms)
    return (points.draw(keep=False) for _ in count())


def data_closures(case: Case, batch: int | None = None) -> Iterator[Any]:
    """All rows of a regression, or random ones; one ordinary forward pass."""
    inputs, targets = case.terms["fit"].samples  # type: ignore[misc]

    def closure(rows: Tensor | slice) -> Tensor:
        case.model.zero_grad()
        loss = (case.model(inputs[rows]) - targets[rows]).square().sum(1).mean()
        loss.backward()
        return loss.detach()

    while True:
        yield partial(closure, torch.randint(len(inputs), (batch,)) if batch else slice(None))


def usual_closures(case: Case) -> Iterator[Any]:
    """What users write: an ordinary forward pass for regressions, the objective for equations."""
    return data_closures(case) if case.centred else objective_closures(case)


# On a meter


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The base alone."""
    return optimizer


def stepwise(base: str, wrap: Wrapper, meter: Meter, rate: float) -> None:
    """Gradient, step, gradient, step: the loop that every user writes."""
    optimizer = meter.optimizer = wrap(build(base, meter.case.parameters, rate))
    while True:
        meter.gradient()
        optimizer.step()


def with_closure(base: str, wrap: Wrapper, meter: Meter, rate: float) -> None:
    """Steps that are given a closure, and so see the loss."""
    optimizer = meter.optimizer = wrap(build(base, meter.case.parameters, rate))
    while True:
        optimizer.step(meter.closure)


def lbfgs(history: int, meter: Meter, rate: float) -> None:
    """torch's L-BFGS with its strong Wolfe line search, stopped by nothing but the number of gradients."""
    many = 10 * meter.allowed
    optimizer = meter.optimizer = torch.optim.LBFGS(
        meter.case.parameters, lr=1.0, max_iter=many, max_eval=many, history_size=history,
        tolerance_grad=0.0, tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip
    before = -2
    # It returns early where its step has become 0; a call that computes one gradient alone has nothing left to do.
    while len(meter.losses) > before + 1:
        before = len(meter.losses)
        optimizer.step(meter.closure)  # type: ignore[arg-type]


def conjugate_gradients(meter: Meter, rate: float) -> None:
    """SciPy's nonlinear conjugate gradients (Polak-Ribière with a Wolfe line search) on the weights as one vector."""
    from scipy.optimize import minimize

    parameters = meter.case.parameters
    dtype = parameters[0].dtype

    def value_and_gradient(point: Any) -> tuple[float, Any]:
        nn.utils.vector_to_parameters(torch.tensor(point, dtype=dtype), parameters)
        value = meter.gradient().item()
        gradients = [p.grad for p in parameters if p.grad is not None]
        return value, nn.utils.parameters_to_vector(gradients).double().numpy()

    start = nn.utils.parameters_to_vector(parameters).detach().double().numpy()
    minimize(value_and_gradient, start, jac=True, method="CG", options={"gtol": 0.0, "maxiter": 10 * meter.allowed})


def reference(base: str, meter: Meter, rate: float) -> None:
    """ORNL's implementation with its own defaults: an acceleration every step, judged by two losses."""
    with default_dtype(meter.case.parameters[0].dtype):
        with_closure(base, accelerate, meter, rate)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context with another default: AADL creates tensors of the default type and mixes them with the weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
