"""The optimizers that are compared. A method runs on a ``Clock``, which ends the run when its time is used up."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from torch_anderson import GaussNewton, Objective

from .case import Case, Problem
from .clock import Clock
from .levenberg_marquardt import PACKAGE, levenberg_marquardt
from .problems import burgers
from .quasi_newton import Points, lbfgs, ssbroyden

RATES = {"adam": (1e-3, 3e-3, 1e-2, 3e-2), "soap": (1e-3, 3e-3, 1e-2, 3e-2)}
"""Learning rates that the peers are tried with."""
PERIOD = 100
"""Iterations of quasi-Newton methods for which points stay."""
BATCH = 128
Closures = Callable[[Case], Iterator[Any]]
LABELS = {"adam": "Adam", "soap": "SOAP"}


@dataclass(frozen=True)
class Method:
    """An optimizer to compare."""

    name: str
    label: str
    run: Callable[[Clock, float], None]
    """Train until ``Spent`` is raised; the second argument is the learning rate."""
    rates: tuple[float | None, ...] = (None,)
    family: str = ""
    """Methods of one family are variants, of which the best is reported as the tuned one."""
    ours: bool = False
    scheduled: bool = False
    """Whether the first part of a long run differs from a short run."""
    suits: Callable[[Problem], bool] = lambda problem: True
    """Whether the method makes sense on a problem."""
    needs: tuple[str, ...] = ()


def missing(name: str, needs: tuple[str, ...]) -> str:
    """Why a problem or method cannot run here; empty if it can."""
    absent = [package for package in needs if find_spec(package) is None]
    if not absent:
        return ""
    return f'{name} is left out: no module {", ".join(absent)} (pip install -e ".[surrogates]").'


def base_optimizer(base: str, case: Case, rate: float) -> Optimizer:
    """Adam, or SOAP without weight decay."""
    if base == "adam":
        return Adam(case.model.parameters(), lr=rate)
    from pytorch_optimizer import SOAP

    return SOAP(case.model.parameters(), lr=rate, weight_decay=0.0)  # type: ignore[no-any-return]


def gauss_newton(base: str, clock: Clock, rate: float) -> None:
    """Ours with its defaults: the program of a user."""
    objective = Objective(clock.case.model, **clock.case.terms)
    optimizer = clock.optimizer = GaussNewton(base_optimizer(base, clock.case, rate))
    while True:
        clock.tick(optimizer.step(objective))


def first_order(base: str, closures: Closures, clock: Clock, rate: float, *, cosine: bool = False) -> None:
    """The base alone."""
    optimizer = base_optimizer(base, clock.case, rate)
    for closure in closures(clock.case):
        if cosine:
            set_rate(optimizer, rate * (1 + math.cos(math.pi * clock.share)) / 2)
        clock.tick(optimizer.step(closure))


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


# Losses for first-order methods, each as a closure for every step


def objective_closures(case: Case) -> Iterator[Any]:
    """The objective, which draws points at every step."""
    return repeat(Objective(case.model, **case.terms))


def retaining_closures(case: Case) -> Iterator[Any]:
    """Points with large residuals stay."""
    terms = {name: term if term.fixed else replace(term, retain=True) for name, term in case.terms.items()}
    return repeat(Objective(case.model, **terms))


def traced_closures(case: Case) -> Iterator[Any]:
    """As the objective, traced once."""
    points = Points(case, retain=False)
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


# The tables


def ours() -> list[Method]:
    """``GaussNewton`` on two bases, whose rates were not tuned."""
    rates = {"adam": 1e-3, "soap": 3e-3}
    return [
        Method(f"gauss-newton-{base}", f"GaussNewton({LABELS[base]})", partial(gauss_newton, base), (rate,), ours=True)
        for base, rate in rates.items()
    ]


def variants(base: str, label: str) -> Iterator[Method]:
    """Adam or SOAP at several rates: constant, and with a cosine schedule, on several kinds of losses."""
    yield Method(base, label, partial(first_order, base, usual_closures), RATES[base], family=base)
    kinds: list[tuple[str, str, Closures, Callable[[Problem], bool]]] = [
        ("cosine", "cosine", usual_closures, lambda problem: True),
        ("retain", "cosine, retained points", retaining_closures, lambda problem: problem.drawn),
        ("traced", "cosine, traced residuals", traced_closures, lambda problem: problem.traceable),
        ("batches", f"cosine, batches of {BATCH}", partial(data_closures, batch=BATCH), lambda problem: problem.data),
    ]
    for name, words, closures, suits in kinds:
        run = partial(first_order, base, closures, cosine=True)
        yield Method(
            f"{base}-{name}", f"{label}, {words}", run, RATES[base], family=base, scheduled=True, suits=suits
        )  # fmt: skip


def second_order() -> list[Method]:
    """Peers that use curvature. Those with traced losses are left out where tracing the loss crashes torch."""
    quasi_newton = {
        "adam-lbfgs": ("Adam, then L-BFGS", lbfgs),
        "ssbroyden": ("Adam, then self-scaled Broyden", ssbroyden),
    }
    return [
        *(
            Method(name, label, partial(run, PERIOD), suits=lambda problem: not problem.crashes)
            for name, (label, run) in quasi_newton.items()
        ),
        Method("levenberg-marquardt", "torch-levenberg-marquardt", levenberg_marquardt, needs=(PACKAGE,)),
    ]


ALL = (*ours(), *(each for item in LABELS.items() for each in variants(*item)), *second_order())
METHODS = {method.name: method for method in ALL}


def warm_up() -> None:
    """Use what is loaded at its first use: these seconds belong to the process, not to a method."""
    import pytorch_optimizer  # noqa: F401

    case = burgers()
    objective = Objective(case.model, **case.terms)
    GaussNewton(Adam(case.model.parameters())).step(objective)
    Adam(case.model.parameters()).step(next(traced_closures(case)))
