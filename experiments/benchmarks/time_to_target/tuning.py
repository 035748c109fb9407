"""Evaluation of the tuning runs: the best rate of each method, and the time of its steps. Only the runs are stored."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.results import Run, load_run
from experiments.runner import Spec
from experiments.screen import UserError
from experiments.statistics import geometric_mean, median

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
    """The rate with the lowest geometric mean over the seeds, all of which must have ended well."""
    runs, base = (tuning_runs(task, name, settings, results) for name in (method, BASE))
    scores: dict[float, list[float]] = {}
    for (rate, _), run in runs.items():
        scores.setdefault(rate, []).append(final(run))
    tried = {rate: geometric_mean(finals) for rate, finals in scores.items()}
    return Tuned(min(tried, key=tried.__getitem__), tried, slowness(runs, base))


def tuning_runs(task: str, method: str, settings: Mapping[str, Any], results: Path) -> dict[tuple[float, int], Run]:
    """(rate, seed) -> run; raises ``NotTuned``."""
    specs = tuning_specs(task, [method], settings)
    if not all(spec.is_done(results) for spec in specs):
        raise NotTuned(f"{method} is not tuned for {task} in {results}: give the same command without --only first.")
    return {(spec.overrides["learning_rate"], spec.seed): load_run(spec.folder(results)) for spec in specs}


def final(run: Run) -> float:
    """What methods are ranked by, at the end; infinite if the run diverged."""
    value = run.summary["final"][metric(run.task)]
    return math.inf if run.diverged or value is None else float(value)


def slowness(runs: Mapping[Any, Run], base: Mapping[Any, Run]) -> float:
    """Median over pairs of runs at the same rate and seed without divergence; 1 if there is none."""
    pairs = [(run, base[key]) for key, run in runs.items() if not run.diverged and not base[key].diverged]
    return min(MOST, median([pace(run) / pace(other) for run, other in pairs] or [1.0]))


def pace(run: Run) -> float:
    """Processor seconds of a unit of cost."""
    return float(run.summary["cpu_seconds"] / run.summary["steps"])


def race_spec(task: str, method: str, seed: int, settings: Mapping[str, Any], found: Tuned) -> Spec:
    """A run at the tuned rate, as long as it may be to take the base's time."""
    return Spec(task, method, seed, overrides=scaled(settings, 1 / found.slowness) | {"learning_rate": found.rate})
