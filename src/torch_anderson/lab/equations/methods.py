"""The optimizers that are compared. A method runs on a ``Clock``, which ends the run when its time is used up."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim import Adam, Optimizer

from torch_anderson import GaussNewton, Objective

from .clock import Clock
from .problems import Case, Problem

RATES = {"adam": (1e-3, 3e-3, 1e-2), "soap": (1e-3, 3e-3, 1e-2)}
"""Learning rates that the peers are tried with."""
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
    return f'{name} is left out: no module {", ".join(absent)} (pip install "torch-anderson[surrogates]").'


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


def first_order(base: str, clock: Clock, rate: float, *, cosine: bool = False, retain: bool = False) -> None:
    """The base alone, with points drawn at every step."""
    objective = Objective(clock.case.model, **(retaining(clock.case) if retain else clock.case.terms))
    optimizer = base_optimizer(base, clock.case, rate)
    while True:
        if cosine:
            set_rate(optimizer, rate * (1 + math.cos(math.pi * clock.share)) / 2)
        clock.tick(optimizer.step(objective))


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def retaining(case: Case) -> dict[str, Any]:
    """The terms with samples that stay where residuals are large."""
    return {name: term if term.fixed else replace(term, retain=True) for name, term in case.terms.items()}


def ours() -> list[Method]:
    """``GaussNewton`` on two bases, whose rates were not tuned."""
    rates = {"adam": 1e-3, "soap": 3e-3}
    return [
        Method(f"gauss-newton-{base}", f"GaussNewton({LABELS[base]})", partial(gauss_newton, base), (rate,), ours=True)
        for base, rate in rates.items()
    ]


def first_order_methods() -> list[Method]:
    """Adam and SOAP at several rates: constant, with a cosine schedule, and that with retained points."""
    found = []
    for base, label in LABELS.items():
        rates, run = RATES[base], partial(first_order, base)
        cosine = partial(run, cosine=True)
        found += [
            Method(base, label, run, rates, family=base),
            Method(f"{base}-cosine", f"{label}, cosine schedule", cosine, rates, family=base, scheduled=True),
            Method(f"{base}-retain", f"{label}, cosine schedule, retained points", partial(cosine, retain=True), rates,
                   family=base, scheduled=True, suits=lambda problem: problem.drawn),
        ]  # fmt: skip
    return found


METHODS = {method.name: method for method in (*ours(), *first_order_methods())}


def warm_up() -> None:
    """Use what is loaded at its first use: these seconds belong to the process, not to a method."""
    import pytorch_optimizer  # noqa: F401

    from torch_anderson import Term

    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    points = torch.ones(2, 1, dtype=torch.float64)
    objective = Objective(model, fit=Term(lambda u, x: torch.func.grad(u)(x).sum() + u(x), points))
    GaussNewton(Adam(model.parameters())).step(objective)
    Adam(model.parameters()).step(objective)
