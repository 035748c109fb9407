"""From records to numbers: the error after a given time, over seeds, and the best of several learning rates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean
from typing import Any

from ..methods import SOLVERS as METHODS
from .case import Problem
from .clock import REPORTED
from .problems import PROBLEMS

Record = Mapping[str, Any]
TUNING = 100
"""Seeds from here on are for tuning."""
FAILED = 1e3
"""Counts as the error of a run that diverged: it is far above that of a network that is zero."""
OURS = "gauss-newton-adam"
FIRST_ORDER = ("adam", "soap")
"""Families of methods."""


def error_at(record: Record, seconds: float) -> float:
    """The error at the first step that ended after this time; infinite if the run diverged before.

    >>> error_at({"times": [1.0, 20.1, 60.2], "errors": [1.0, 0.5, None]}, 20.0)
    0.5
    """
    found = zip(record["times"], record["errors"], strict=True)
    return next((error if error is not None else math.inf for at, error in found if at >= seconds), math.inf)


def final(record: Record) -> float:
    """The error at the end of a run."""
    last = record["errors"][-1] if record["errors"] else None
    return math.inf if last is None else float(last)


def mean_error(errors: Iterable[float]) -> float:
    """The geometric mean; a run that diverged counts as a thousand."""
    return geometric_mean(min(error, FAILED) for error in errors)


def best_rates(records: Sequence[Record]) -> dict[tuple[str, str], float | None]:
    """Problem and method -> the rate with the lowest error at the end of its longest runs, mean over seeds."""
    longest: dict[tuple[str, str], float] = {}
    for each in records:
        kind = each["problem"], each["method"]
        longest[kind] = max(longest.get(kind, 0.0), each["seconds"])
    found: dict[tuple[str, str], dict[float | None, list[float]]] = {}
    for each in records:
        kind = each["problem"], each["method"]
        if each["seconds"] == longest[kind]:
            found.setdefault(kind, {}).setdefault(each["rate"], []).append(final(each))
    return {kind: min(rates, key=lambda rate: mean_error(rates[rate])) for kind, rates in found.items()}


@dataclass(frozen=True)
class Score:
    """A method with one learning rate after a given time."""

    method: str
    rate: float | None
    seconds: float
    runs: Mapping[int, Record]
    """By seed; this is a part or the end of each."""

    @cached_property
    def errors(self) -> dict[int, float]:
        """By seed."""
        return {seed: error_at(run, self.seconds) for seed, run in self.runs.items()}

    @property
    def length(self) -> float:
        """Seconds of the shortest run."""
        return min(float(run["seconds"]) for run in self.runs.values())

    @property
    def mean(self) -> float:
        """The geometric mean over seeds."""
        return mean_error(self.errors.values())

    @property
    def spread(self) -> float:
        """Worst over best seed; infinite where one diverged."""
        return max(self.errors.values()) / min(self.errors.values())


class Scores:
    """All runs that are reported, ready for questions."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = [each for each in records if each["seed"] < TUNING and each["problem"] in PROBLEMS]

    @cached_property
    def problems(self) -> list[Problem]:
        """Those with runs, in their order."""
        names = {each["problem"] for each in self.records}
        return [problem for problem in PROBLEMS.values() if problem.name in names]

    @cached_property
    def _by_kind(self) -> dict[tuple[str, str], dict[float | None, list[Record]]]:
        """Runs by problem and method, and by rate; long ones first."""
        found: dict[tuple[str, str], dict[float | None, list[Record]]] = {}
        for each in sorted(self.records, key=lambda record: -record["seconds"]):
            found.setdefault((each["problem"], each["method"]), {}).setdefault(each["rate"], []).append(each)
        return found

    def methods(self, problem: str) -> list[str]:
        """Those with runs on a problem."""
        return [name for name in METHODS if (problem, name) in self._by_kind]

    def times(self, problem: str) -> list[float]:
        """Reported times that some run of the problem reaches; if there is none, the lengths of its runs."""
        lengths = {each["seconds"] for each in self.records if each["problem"] == problem}
        return [each for each in REPORTED if each <= max(lengths)] or sorted(lengths)

    def at(self, problem: str, methods: Iterable[str], seconds: float) -> Score | None:
        """The best of these methods with the best of its rates after a time; None if no run is that long.

        Rates with fewer seeds than others of the same method are tried ones and do not count.
        """
        found = [score for method in methods for score in self._candidates(problem, method, seconds)]
        return min(found, key=lambda score: score.mean, default=None)

    def _candidates(self, problem: str, method: str, seconds: float) -> list[Score]:
        """Each rate with the shortest runs that are long enough; just as long if their rate is scheduled."""
        whole = METHODS[method].scheduled
        scores = []
        for rate, runs in self._by_kind.get((problem, method), {}).items():
            fitting = [run for run in runs if run["seconds"] == seconds or (run["seconds"] > seconds and not whole)]
            scores.append(Score(method, rate, seconds, {run["seed"]: run for run in fitting}))
        most = max((len(score.runs) for score in scores), default=0)
        return [score for score in scores if len(score.runs) == most > 0]

    def family(self, problem: str, *families: str) -> list[str]:
        """The methods of these families that have runs."""
        return [name for name in self.methods(problem) if METHODS[name].family in families]

    def peers(self, problem: str) -> list[str]:
        """All methods with runs but ours."""
        return [name for name in self.methods(problem) if not METHODS[name].ours]

    def ratio(self, problem: str, others: Iterable[str], seconds: float, ours: str = OURS) -> float | None:
        """Our error over that of the best of other methods, on the seeds that both have; None without such runs."""
        mine, theirs = self.at(problem, [ours], seconds), self.at(problem, others, seconds)
        if mine is None or theirs is None:
            return None
        seeds = mine.errors.keys() & theirs.errors.keys()
        if not seeds:
            return None
        upper, lower = (mean_error(score.errors[seed] for seed in seeds) for score in (mine, theirs))
        return upper / lower
