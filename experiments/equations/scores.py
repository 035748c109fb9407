"""From records to numbers: the error after a given time, over seeds, and the best of several learning rates."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..methods import SOLVERS as METHODS
from ..scores import Rate, Record, Records
from ..statistics import geometric_mean
from .case import Problem
from .clock import REPORTED
from .problems import PROBLEMS

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


def mean_error(errors: Iterable[float]) -> float:
    """The geometric mean; a run that diverged counts as a thousand."""
    return geometric_mean([min(error, FAILED) for error in errors])


def best_rates(records: Iterable[Record]) -> dict[tuple[str, str], Rate]:
    """Problem and method -> the rate with the lowest error at the end of its longest runs, mean over seeds."""
    best = {}
    for kind, rates in Records(records, PROBLEMS, METHODS).by_kind.items():
        longest = max(run["seconds"] for runs in rates.values() for run in runs)
        ends: dict[Rate, list[float]] = {}
        for run in (run for runs in rates.values() for run in runs if run["seconds"] == longest):
            last = run["errors"][-1] if run["errors"] else None
            ends.setdefault(run["rate"], []).append(math.inf if last is None else last)
        best[kind] = min(ends, key=lambda rate: mean_error(ends[rate]))
    return best


@dataclass(frozen=True)
class Score:
    """A method with one learning rate after a given time."""

    method: str
    rate: Rate
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


class Scores(Records[Problem]):
    """All runs that are reported, ready for questions."""

    def __init__(self, records: Iterable[Record]) -> None:
        reported = [each for each in records if each["seed"] < TUNING]
        # Long runs first, so that of two with the same seed the shorter one counts.
        super().__init__(sorted(reported, key=lambda record: -record["seconds"]), PROBLEMS, METHODS)

    def times(self, problem: str) -> list[float]:
        """Reported times that some run of the problem reaches; if there is none, the lengths of its runs."""
        lengths = {each["seconds"] for each in self.records if each["problem"] == problem}
        return [each for each in REPORTED if each <= max(lengths)] or sorted(lengths)

    def at(self, problem: str, methods: Iterable[str], seconds: float) -> Score | None:
        """The best of these methods with the best of its rates after a time; None if no run is that long.

        Of a run with a scheduled rate only the end counts. Rates with fewer seeds than others of the same method are
        tried ones and do not count.
        """
        found: list[Score] = []
        for method in methods:
            whole, scores = METHODS[method].scheduled, []
            for rate, runs in self.by_kind.get((problem, method), {}).items():
                fitting = [run for run in runs if run["seconds"] == seconds or (run["seconds"] > seconds and not whole)]
                scores.append(Score(method, rate, seconds, {run["seed"]: run for run in fitting}))
            most = max((len(score.runs) for score in scores), default=0)
            found += [score for score in scores if len(score.runs) == most > 0]
        return min(found, key=lambda score: score.mean, default=None)

    def family(self, problem: str, *families: str) -> list[str]:
        """The methods of these families that have runs."""
        return [name for name in self.methods(problem) if METHODS[name].family in families]

    def peers(self, problem: str) -> list[str]:
        """All methods with runs but ours."""
        return [name for name in self.methods(problem) if not METHODS[name].ours]

    def ratio(self, problem: str, others: Iterable[str], seconds: float, ours: str = OURS) -> float | None:
        """Our error over that of the best of other methods, on the seeds that both have; None without such runs."""
        mine, theirs = self.at(problem, [ours], seconds), self.at(problem, others, seconds)
        seeds = mine.errors.keys() & theirs.errors.keys() if mine and theirs else set()
        if not mine or not theirs or not seeds:
            return None
        upper, lower = (mean_error(score.errors[seed] for seed in seeds) for score in (mine, theirs))
        return upper / lower
