"""One run: a problem, a method, a learning rate, a seed and a time, and the record that it leaves."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch.optim import Adam

from torch_anderson import GaussNewton, Objective

from ..jobs import ARRAYS
from ..lines import Record
from ..methods import SOLVERS, Method
from ..runner import one_thread
from ..solvers.loops import traced_closures
from .case import Problem
from .clock import Clock, Spent
from .problems import PROBLEMS, burgers

SLOWER = 1.1
"""Time of a run over that which is counted."""


@dataclass(frozen=True)
class Entry:
    """What to run."""

    problem: str
    method: str
    rate: float | None
    """None for methods without a learning rate."""
    seed: int
    seconds: float
    """Processor time of the method."""

    def make(self) -> Record:
        """Make the run."""
        return run(self)

    def estimate(self) -> float:
        """Seconds that the run takes, about."""
        return SLOWER * self.seconds


def entries(
    problems: Iterable[Problem], methods: Sequence[Method], seeds: Iterable[int], seconds: float
) -> list[Entry]:
    """All runs, seeds outermost, so that an unfinished study has all methods on its first seeds."""
    chosen = list(problems)
    return [
        Entry(problem.name, method.name, rate, seed, seconds)
        for seed in seeds
        for problem in chosen
        for method in methods
        if method.applies(problem)
        for rate in method.rates
    ]


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
    with one_thread(), torch.random.fork_rng(devices=[]):
        warm_up()
        for name in method.needs:
            import_module(name)
        torch.manual_seed(entry.seed)
        case = problem.build()
        clock = Clock(case, entry.seconds, pictures=problem.picture is not None)
        with suppress(Spent):
            method.solve(clock, entry.rate or 0.0)
        packages = {name: version(distribution(name)) for name in (*problem.needs, *method.needs)}
        return asdict(entry) | measured(clock) | {"packages": packages, ARRAYS: clock.pictures}


def distribution(module: str) -> str:
    """The name under which a package is installed."""
    return module.replace("_", "-")


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


def counters(optimizer: Any) -> dict[str, float]:
    """The counts of ``GaussNewton``; empty for other optimizers."""
    if not hasattr(optimizer, "stats"):
        return {}
    return {name: float(value) for name, value in optimizer.stats.as_dict().items() if value}
