"""From runs to numbers: ratios to the base, cost and time to its best, and ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan

import numpy as np

from experiments import statistics as st
from experiments.methods import METHODS
from experiments.results import Run
from experiments.tasks import TASKS

from .field import BASE, metric

COST, TIME = "step", "cpu_seconds"
Runs = Mapping[int, Run]
"""Seed -> run, of one method."""
Races = Mapping[str, Mapping[str, Runs]]
"""Task -> method -> seed -> run."""
Problem = tuple[str, int]
"""A task and a seed."""
Costs = Mapping[str, Mapping[Problem, float]]
"""Method -> problem -> cost or time to the base's best; infinite where it was not reached."""


@dataclass(frozen=True)
class Reached:
    """When the runs of a method got to the base's best metric, seed by seed as a share of what the base needed."""

    shares: tuple[float, ...]
    """Infinite where it was not reached."""

    @property
    def count(self) -> int:
        """Seeds on which it was."""
        return sum(map(isfinite, self.shares))

    @property
    def median(self) -> float:
        """Over all seeds: infinite if it was reached on less than half of them."""
        return st.median(self.shares)


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
    """Whether the interval of the ratio to the first includes 1. With one seed, nothing can be distinguished."""


def scores(task: str, methods: Mapping[str, Runs]) -> list[Score]:
    """All methods of a task, the first first."""
    base = methods[BASE]
    unranked = [score(task, name, runs, base) for name, runs in methods.items() if runs.keys() & base.keys()]
    ordered = sorted(unranked, key=lambda each: (each.final.diverged, each.final.estimate.mean))
    ranked = []
    for rank, each in enumerate(ordered, 1):
        to_first = paired(pairs(methods[each.method], methods[ordered[0].method]), metric(task))
        level = to_first.diverged <= to_first.others_diverged and not to_first.estimate.low > 1
        ranked.append(replace(each, rank=rank, level=level))
    return ranked


def score(task: str, method: str, runs: Runs, base: Runs) -> Score:
    """One method against the base."""
    ranked_by, both = metric(task), pairs(runs, base)
    extra = ("training_loss", "validation_mse") if TASKS[task].pinn else ()
    reached = {}
    for unit in (COST, TIME):
        targets = [value(theirs, ranked_by, "best") for _, theirs in both]
        shares = [reach(ours, ranked_by, target, unit) / reach(theirs, ranked_by, target, unit)
                  for (ours, theirs), target in zip(both, targets, strict=True)]  # fmt: skip
        reached[unit] = Reached(tuple(shares))
    return Score(
        method,
        final=paired(both, ranked_by),
        best=paired(both, ranked_by, "best"),
        others={name: paired(both, name) for name in extra},
        time=st.geometric_interval([ours.summary[TIME] / theirs.summary[TIME] for ours, theirs in both]),
        end=st.geometric_interval([value(ours, ranked_by) for ours, _ in both]).mean,
        cost=float(np.mean([ours.summary["steps"] for ours, _ in both])),
        reached=reached,
    )


def pairs(runs: Runs, others: Runs) -> list[tuple[Run, Run]]:
    """Runs with the same seed."""
    return [(runs[seed], others[seed]) for seed in sorted(runs.keys() & others.keys())]


def paired(both: Iterable[tuple[Run, Run]], name: str, part: str = "final") -> st.Paired:
    """The paired statistics of a quantity."""
    ours, theirs = zip(*[[value(run, name, part) for run in pair] for pair in both], strict=True)
    return st.paired(ours, theirs)


def value(run: Run, name: str, part: str = "final") -> float:
    """A quantity at the end of a run, or the least it ever was; NaN at the end of a diverged run."""
    if part == "best":
        return float(run.evaluations[name].min())
    if run.diverged:
        return nan
    found = run.summary["final"][name] if name in run.summary["final"] else run.summary[name]
    return nan if found is None else float(found)


def reach(run: Run, metric: str, target: float, unit: str) -> float:
    """Cost or time at the first evaluation that was not above the target; infinite if there was none."""
    return st.reached_at(run.evaluations[unit], run.evaluations[metric], target)


def to_target(races: Races, unit: str) -> Costs:
    """Method -> problem -> cost or time to the base's best; in the order in which methods are shown."""
    found: dict[str, dict[Problem, float]] = {}
    for task, methods in races.items():
        ranked_by = metric(task)
        for method, runs in methods.items():
            for ours, theirs in pairs(runs, methods[BASE]):
                cost = reach(ours, ranked_by, value(theirs, ranked_by, "best"), unit)
                found.setdefault(method, {})[task, ours.seed] = cost
    return {method: found[method] for method in METHODS if method in found}


def wins(costs: Costs, tasks: Sequence[str]) -> dict[str, list[int]]:
    """Method -> for each task, the number of seeds on which no other method reached the target at a lower cost.

    >>> costs = {
    ...     "soap": {("digits", 0): 1.0, ("digits", 1): inf},
    ...     "muon": {("digits", 0): 1.0, ("digits", 1): 3.0},
    ... }
    >>> wins(costs, ["digits"])
    {'soap': [1], 'muon': [2]}
    """
    least: dict[Problem, float] = {}
    for solved in costs.values():
        for problem, cost in solved.items():
            least[problem] = min(cost, least.get(problem, inf))
    return {
        method: [sum(cost == least[p] < inf for p, cost in solved.items() if p[0] == task) for task in tasks]
        for method, solved in costs.items()
    }
