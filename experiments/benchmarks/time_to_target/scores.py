"""From runs to numbers: ratios to the base, cost and time to its best, ranks, and the performance profile."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from experiments import statistics as st
from experiments.results import Run
from experiments.tasks import TASKS

from .field import BASE, metric

COST, TIME = "step", "cpu_seconds"
Runs = Mapping[int, Run]
"""Seed -> run, of one method."""


@dataclass(frozen=True)
class Reached:
    """When the runs of a method got to the base's best metric, seed by seed as a share of what the base needed."""

    shares: tuple[float, ...]
    """Infinite where it was not reached."""

    @property
    def count(self) -> int:
        """Seeds on which it was."""
        return sum(map(math.isfinite, self.shares))

    @property
    def median(self) -> float:
        """Over all seeds: infinite if it was reached on less than half of them."""
        return float(np.median(self.shares)) if self.shares else math.nan


@dataclass(frozen=True)
class Score:
    """How one method did on one task, over the seeds that it shares with the base."""

    method: str
    final: st.Paired
    """The task's metric at the end, against the base's."""
    best: st.Paired
    """The lowest it ever was."""
    others: Mapping[str, st.Paired]
    """Further quantities at the end, by name."""
    time: st.Interval
    """Processor time of whole runs over the base's: 1, if the budgets are right."""
    end: float
    """Geometric mean of the metric itself at the end."""
    cost: float
    """Mean cost of a run."""
    reached: Mapping[str, Reached]
    """By COST and TIME."""
    rank: int = 0
    level: bool = False
    """Whether it cannot be distinguished from the first."""


def scores(task: str, methods: Mapping[str, Runs]) -> list[Score]:
    """All methods of a task, the first first."""
    base = methods[BASE]
    unranked = [score(task, name, runs, base) for name, runs in methods.items() if runs.keys() & base.keys()]
    ordered = sorted(unranked, key=lambda each: (each.final.diverged, each.final.estimate.mean))
    first = methods[ordered[0].method]
    return [
        Score(**{**vars(each), "rank": rank, "level": is_level(methods[each.method], first, metric(task))})
        for rank, each in enumerate(ordered, 1)
    ]


def score(task: str, method: str, runs: Runs, base: Runs) -> Score:
    """One method against the base."""
    ranked_by = metric(task)
    seeds = sorted(runs.keys() & base.keys())
    pairs = [(runs[seed], base[seed]) for seed in seeds]
    extra = ("training_loss", "validation_mse") if TASKS[task].pinn else ()
    return Score(
        method,
        final=paired(pairs, ranked_by),
        best=paired(pairs, ranked_by, "best"),
        others={name: paired(pairs, name) for name in extra},
        time=st.geometric_interval([ours.summary[TIME] / theirs.summary[TIME] for ours, theirs in pairs]),
        end=st.geometric_interval([value(ours, ranked_by) for ours, _ in pairs]).mean,
        cost=float(np.mean([ours.summary["steps"] for ours, _ in pairs])),
        reached={unit: Reached(tuple(share(*pair, ranked_by, unit) for pair in pairs)) for unit in (COST, TIME)},
    )


def paired(pairs: Iterable[tuple[Run, Run]], name: str, part: str = "final") -> st.Paired:
    """The paired statistics of a quantity."""
    ours, theirs = zip(*[[value(run, name, part) for run in pair] for pair in pairs], strict=True)
    return st.paired(ours, theirs)


def value(run: Run, name: str, part: str = "final") -> float:
    """A quantity at the end of a run, or the least it ever was; NaN at the end of a diverged run."""
    if part == "best":
        return float(run.evaluations[name].min())
    if run.diverged:
        return math.nan
    found = run.summary["final"][name] if name in run.summary["final"] else run.summary[name]
    return math.nan if found is None else float(found)


def share(run: Run, base: Run, metric: str, unit: str) -> float:
    """Cost or time until a run reached the base's best, relative to that of the base."""
    target = value(base, metric, "best")
    return reach(run, metric, target, unit) / reach(base, metric, target, unit)


def reach(run: Run, metric: str, target: float, unit: str) -> float:
    """Cost or time at the first evaluation that was not above the target; infinite if there was none."""
    there = run.evaluations[run.evaluations[metric] <= target]
    return float(there[unit].iloc[0]) if len(there) else math.inf


def is_level(runs: Runs, first: Runs, metric: str) -> bool:
    """Whether the interval of the ratio to the first includes 1. With one seed, nothing can be distinguished."""
    seeds = sorted(runs.keys() & first.keys())
    found = paired([(runs[seed], first[seed]) for seed in seeds], metric)
    return found.diverged <= found.others_diverged and not found.estimate.low > 1


Problem = tuple[str, int]
"""A task and a seed."""


def profile(shares: Mapping[str, Mapping[Problem, float]]) -> dict[str, tuple[list[float], list[float]]]:
    """Dolan and Moré's performance profile of each method: factors, and the share of problems solved within each.

    ``shares`` has the cost or time of each method on each problem, infinite where it did not solve it.

    >>> profile({"a": {("t", 0): 1.0, ("t", 1): 6.0}, "b": {("t", 0): 4.0, ("t", 1): 3.0}})["a"]
    ([1.0, 2.0], [0.5, 1.0])
    """
    problems = {problem for costs in shares.values() for problem in costs}
    lowest = {problem: min(costs.get(problem, math.inf) for costs in shares.values()) for problem in problems}
    return {
        method: staircase([cost / lowest[problem] for problem, cost in costs.items()])
        for method, costs in shares.items()
    }


def staircase(factors: list[float]) -> tuple[list[float], list[float]]:
    """The steps of the share of finite values at or below a number: where it grows, and its value from there on."""
    finite = sorted(factor for factor in factors if math.isfinite(factor))
    return finite, [(index + 1) / len(factors) for index in range(len(finite))]
