"""One run: a problem, a method, a learning rate, a seed and a time, and the record that it leaves."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torch.optim import Adam

from torch_anderson import GaussNewton, Objective

from ..arguments import available, chosen
from ..jobs import ARRAYS, Race, counters
from ..methods import SOLVERS, Method
from ..optimizers import missing
from ..results import Record
from ..runner import isolated
from ..screen import BadInput
from ..solvers.loops import traced_closures
from .case import Problem
from .clock import Clock, Spent
from .problems import PROBLEMS, burgers

SLOWER = 1.1
"""Time of a run over that which is counted."""


@dataclass(frozen=True)
class Entry(Race):
    """A method on a problem for a given time."""

    holds: ClassVar[dict[str, Any]] = {"seconds": float, "times": list, "errors": list}

    rate: float | None
    """None for methods without a learning rate."""
    seed: int
    seconds: float
    """Processor time of the method."""

    def measure(self) -> Record:
        """Make the run and return its numbers."""
        return run(self)

    def estimate(self, budget: float) -> float:
        """Estimated seconds."""
        return SLOWER * self.seconds

    def covered(self, done: Collection[tuple[Any, ...]]) -> bool:
        """A longer run contains a shorter one unless its rate is scheduled."""
        if SOLVERS[self.method].scheduled:
            return super().covered(done)
        *same, seconds = self.identity.values()
        return any(others == same and length >= seconds for *others, length in done)


def entries(
    problems: Iterable[Problem], methods: Sequence[Method], seeds: Iterable[int], seconds: float
) -> list[Entry]:
    """All runs, seeds outermost, so that an unfinished study has all methods on its first seeds."""
    problems = list(problems)
    return [
        Entry(problem.name, method.name, rate, seed, seconds)
        for seed in seeds
        for problem in problems
        for method in methods
        if method.applies(problem)
        for rate in method.rates
    ]


def plan(
    problems: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    seconds: float,
    *,
    rates: Collection[float] = (),
    best: dict[tuple[str, str], float | None] | None = None,
) -> list[Entry]:
    """The runs of these problems and methods, or of all.

    Methods that have a choice of learning rates run at these rates, or at the best one where it is known.
    """
    here, able = chosen("problem", problems, PROBLEMS), chosen("method", methods, SOLVERS)
    here = available(here, lambda problem: missing(problem.title, problem.needs))
    able = available(able, lambda method: method.missing)
    asked = [
        entry
        for entry in entries(here, able, seeds, seconds)
        if not rates or len(SOLVERS[entry.method].rates) == 1 or entry.rate in rates
        if (best or {}).get((entry.problem, entry.method), entry.rate) == entry.rate
    ]
    if not asked:
        raise BadInput("No run is left: none of these methods has one of these rates.")
    return asked


@cache
def warm_up() -> None:
    """Use what is loaded at its first use: these seconds belong to the process, not to a method."""
    import pytorch_optimizer  # noqa: F401

    case = burgers()
    objective = Objective(case.model, **case.terms)
    GaussNewton(Adam(case.model.parameters())).step(objective)
    Adam(case.model.parameters()).step(next(traced_closures(case)))


def run(entry: Entry) -> Record:
    """Make a run on one thread, with separate random numbers."""
    problem, method = PROBLEMS[entry.problem], SOLVERS[entry.method]
    with isolated():
        warm_up()
        for name in method.needs:
            import_module(name)
        torch.manual_seed(entry.seed)
        case = problem.build()
        clock = Clock(case, entry.seconds, pictures=problem.picture is not None)
        with suppress(Spent):
            method.solve(clock, entry.rate or 0.0)
        packages = {name: version(name.replace("_", "-")) for name in (*problem.needs, *method.needs)}
        return entry.identity | measured(clock) | {"packages": packages, ARRAYS: clock.pictures}


def measured(clock: Clock) -> Record:
    """What is kept of a run beside its name."""
    return {
        "times": clock.times,
        "errors": clock.errors,
        "losses": clock.losses,
        "steps": clock.steps,
        "cpu_seconds": clock.elapsed,
        "weights": sum(parameter.numel() for parameter in clock.case.model.parameters()),
        "stats": counters(clock.optimizer),
    }
