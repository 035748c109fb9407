"""Evaluation of the tuning runs: the best rate of each method, and the time of its steps. Only the runs are stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.results import Run, load_run
from experiments.runner import Spec
from experiments.screen import UserError
from experiments.statistics import geometric_mean, median
from experiments.tune import means

from .field import BASE, metric, scaled, tuning_specs

MOST = 20.0
"""Largest time of a step, in steps of the base; slower methods cannot be run in the time of the base."""


class NotTuned(UserError):
    """There are no tuning runs to take a rate from."""


@dataclass(frozen=True)
class Tuned:
    """The tuned settings of a method."""

    rate: float
    tried: Mapping[float, float]
    """Rate -> geometric mean of the metric at the end; infinite where a run diverged."""
    slowness: float
    """Processor time of a unit of cost, in those of the base."""

    @property
    def at_edge(self) -> bool:
        """Whether a rate that was not tried may be better still."""
        return self.rate in (min(self.tried), max(self.tried))


def tuned(task: str, method: str, settings: Mapping[str, Any], results: Path) -> Tuned:
    """The rate with the lowest geometric mean over the seeds, all of which must have ended well; raises ``NotTuned``.

    The time of a step is the median over pairs of runs of the method and the base at the same rate and seed.
    """
    specs, base = (tuning_specs(task, [name], settings) for name in (method, BASE))
    if not all(spec.is_done(results) for spec in (*specs, *base)):
        raise NotTuned(f"{method} is not tuned for {task} in {results}: give the same command without --only first.")
    tried = means(specs, results, metric(task), geometric_mean)[method]
    pairs = [[load_run(spec.folder(results)) for spec in pair] for pair in zip(specs, base, strict=True)]
    paces = [pace(run) / pace(other) for run, other in pairs if not run.diverged and not other.diverged]
    return Tuned(min(tried, key=tried.__getitem__), tried, min(MOST, median(paces or [1.0])))


def pace(run: Run) -> float:
    """Processor seconds of a unit of cost."""
    return float(run.summary["cpu_seconds"] / run.summary["steps"])


def race_spec(task: str, method: str, seed: int, settings: Mapping[str, Any], found: Tuned) -> Spec:
    """A run at the tuned rate, as long as it may be to take the base's time."""
    return Spec(task, method, seed, overrides=scaled(settings, 1 / found.slowness) | {"learning_rate": found.rate})
