"""One run of the family: a problem, a method, a learning rate and a seed, and the record that it leaves."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from ..jobs import Race, counters
from ..methods import DESCENTS, Method
from ..optimizers import build
from ..results import Record
from ..runner import isolated
from ..solvers.meter import Meter, Spent
from .problems import BASES, PROBLEMS, Case, Problem

SLOWER = 1.15
"""Time of a run over that of its gradients alone, on the average."""


@dataclass(frozen=True)
class Entry(Race):
    """A method on a problem of the family."""

    study: ClassVar[str] = "family"
    holds: ClassVar[dict[str, Any]] = {"losses": list, "seconds": list}

    rate: float | None
    """None for methods without a learning rate."""
    seed: int

    def measure(self) -> Record:
        """Make the run and return its numbers."""
        return run(self)

    def estimate(self, budget: float) -> float:
        """Estimated seconds."""
        return SLOWER * PROBLEMS[self.problem].gradients * gradient_seconds(self.problem)


def entries(problems: Iterable[Problem], methods: Iterable[Method], seeds: Iterable[int]) -> list[Entry]:
    """All runs, seeds outermost, so that an unfinished study has all methods on its first seeds."""
    chosen, methods = list(problems), list(methods)
    return [
        Entry(problem.name, method.name, rate, seed)
        for seed in seeds
        for problem in chosen
        for method in methods
        for rate in ((None,) if method.base is None else problem.rates[method.base])
    ]


def run(entry: Entry, methods: Mapping[str, Method] = DESCENTS) -> Record:
    """Make a run on one thread; raises ``MissingData`` where the problem's data are not on this machine."""
    problem, method = PROBLEMS[entry.problem], methods[entry.method]
    with prepared(problem, entry.seed) as case:
        meter = Meter(case, problem.gradients)
        with suppress(Spent):
            method.descend(meter, entry.rate or math.nan)
        return entry.identity | measured(meter)


@contextmanager
def prepared(problem: Problem, seed: int) -> Iterator[Case]:
    """A context with one thread and separate random numbers, in which a problem is built."""
    with isolated():
        warm_up()
        torch.manual_seed(seed)
        yield problem.build(seed)


@cache
def warm_up() -> None:
    """Use every optimizer once: the first use in a process takes seconds, which would count as the method's time."""
    weight = torch.nn.Parameter(torch.ones(()))
    weight.grad = torch.ones(())
    for base in BASES:
        build(base, [weight], 0.1).step()


def measured(meter: Meter) -> Record:
    """The entries of a run's record, apart from those that identify the run."""
    seconds = time.process_time() - meter.started
    with torch.no_grad():
        final = float(meter.case.loss(None))
    return {
        "losses": meter.losses,
        "seconds": [float(f"{value:.4g}") for value in meter.seconds],
        "cpu_seconds": seconds,
        "final": final,
        "forward": meter.forward,
        "optimum": meter.case.optimum,
        "stats": counters(meter.optimizer),
    }


@cache
def gradient_seconds(problem: str) -> float:
    """Time of one gradient, the lowest of three."""
    times = []
    with prepared(PROBLEMS[problem], 0) as case:
        for _ in range(3):
            started = time.perf_counter()
            case.loss(None).backward()
            times.append(time.perf_counter() - started)
    return min(times)
