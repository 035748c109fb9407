"""The optimizers that are compared, each counted in gradients.

A method runs on a ``Meter``, which computes losses and gradients, records the loss at every gradient, and ends the run
when the allowed number is spent. Methods therefore need no counting code, and no method can exceed its allowance.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import torch_anderson

from .problems import BASES, Case

LBFGS_HISTORIES = (10, 100)
Wrapper = Callable[[Optimizer], Any]


class Spent(Exception):
    """The allowed number of gradients is used up, or the loss is not finite."""


class Meter:
    """Computes the losses and gradients of a case for a method, and keeps count."""

    def __init__(self, case: Case, allowed: int) -> None:
        self.case, self.allowed = case, allowed
        self.losses: list[float] = []
        """At the weights of each gradient."""
        self.seconds: list[float] = []
        """Processor time from the start until the loss of each gradient was known."""
        self.forward = 0
        """Losses that were computed without a gradient."""
        self.optimizer: Any = None
        """The method's optimizer, for its counters; set by the method."""
        self.started = time.process_time()

    def gradient(self) -> Tensor:
        """Compute the loss and leave its gradient in the parameters; raises ``Spent``."""
        if len(self.losses) == self.allowed:
            raise Spent
        for parameter in self.case.parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss = self.case.loss(None)
            loss.backward()
        self.losses.append(loss.item())
        self.seconds.append(time.process_time() - self.started)
        if not math.isfinite(self.losses[-1]):
            raise Spent
        return loss.detach()

    def closure(self) -> Tensor:
        """As optimizers call it: with a gradient, unless gradients are disabled."""
        if torch.is_grad_enabled():
            return self.gradient()
        self.forward += 1
        return self.case.loss(None)


@dataclass(frozen=True)
class Method:
    """An optimizer to compare."""

    name: str
    label: str
    run: Callable[[Meter, float], None]
    """Train until ``Spent`` is raised or nothing is left to do; the second argument is the learning rate."""
    base: str | None = None
    """The base whose rates apply; None for methods without a learning rate."""
    ours: bool = False
    needs: str | None = None
    """A module that must be importable."""

    @property
    def missing(self) -> str:
        """Why the method cannot run here; empty if it can."""
        if self.needs is None or find_spec(self.needs):
            return ""
        return f"{self.label} is left out: no module {self.needs} (put ORNL's AADL on PYTHONPATH)."


def base_optimizer(base: str, parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """SGD, Nesterov with momentum .9, or Adam."""
    if base == "adam":
        return Adam(parameters, lr=rate)
    if base == "nesterov":
        return SGD(parameters, lr=rate, momentum=0.9, nesterov=True)
    return SGD(parameters, lr=rate)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The base alone."""
    return optimizer


def stepwise(base: str, wrap: Wrapper, meter: Meter, rate: float) -> None:
    """Gradient, step, gradient, step: the loop that every user writes."""
    optimizer = meter.optimizer = wrap(base_optimizer(base, meter.case.parameters, rate))
    while True:
        meter.gradient()
        optimizer.step()


def with_closure(base: str, wrap: Wrapper, meter: Meter, rate: float) -> None:
    """Steps that are given a closure, and so see the loss."""
    optimizer = meter.optimizer = wrap(base_optimizer(base, meter.case.parameters, rate))
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
        optimizer.step(meter.closure)


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
    import AADL

    def accelerated(optimizer: Optimizer) -> Optimizer:
        AADL.accelerate(optimizer, acceleration_type="anderson")
        return optimizer

    with default_dtype(meter.case.parameters[0].dtype):
        with_closure(base, accelerated, meter, rate)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context with another default: AADL creates tensors of the default type and mixes them with the weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


LABELS = {"sgd": "SGD", "nesterov": "Nesterov", "adam": "Adam"}


def all_methods(wrapper: Wrapper = torch_anderson.Anderson, closure: bool = False) -> dict[str, Method]:
    """Every method by name; ``wrapper`` takes the place of ``Anderson``, which sees losses if ``closure``."""
    loop = with_closure if closure else stepwise
    found = [Method(base, LABELS[base], partial(stepwise, base, unwrapped), base) for base in BASES]
    for base, label in LABELS.items():
        run = partial(loop, base, wrapper)
        found.append(Method(f"anderson-{base}", f"Anderson({label})", run, base, ours=True))
    for history in LBFGS_HISTORIES:
        found.append(Method(f"lbfgs-{history}", f"L-BFGS, history {history}", partial(lbfgs, history)))
    found.append(Method("cg", "nonlinear CG", conjugate_gradients))
    for base, label in LABELS.items():
        found.append(Method(f"aadl-{base}", f"AADL({label})", partial(reference, base), base, needs="AADL"))
    return {method.name: method for method in found}


METHODS = all_methods()
