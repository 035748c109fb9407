"""Tuning of learning rates: the same rates, seeds and length for each method."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from .methods import METHODS
from .results import finite, load_run, versions, write_json
from .runner import Spec
from .tuning import TABLE, table

FACTORS = (0.1, 0.3, 1.0, 3.0)
"""Rates to try, in units of the task's own."""
SEEDS = range(100, 105)
"""Not among the seeds that are reported."""
SHORTER = 4
"""Tuning runs are shorter by this factor, including the schedule."""


def specs(task: str) -> list[Spec]:
    """All runs that it takes."""
    settings = Spec(task, "base", 0).resolve()
    shorter = {"steps": settings.steps // SHORTER}
    if settings.decay_every:
        shorter["decay_every"] = settings.decay_every // SHORTER
    methods = [name for name, method in METHODS.items() if method.tuned and method.applies(settings)]
    return [
        Spec(task, method, seed, overrides={"learning_rate": rate, **shorter})
        for seed in SEEDS
        for method in methods
        for rate in rates(settings.learning_rate)
    ]


def rates(centre: float) -> list[float]:
    """The rates to try.

    >>> rates(0.001)
    [0.0001, 0.0003, 0.001, 0.003]
    """
    return [float(f"{centre * factor:.3g}") for factor in FACTORS]


def means(
    specs: Iterable[Spec], results: Path, metric: str, mean: Callable[[list[float]], float]
) -> dict[str, dict[float, float]]:
    """Method -> rate -> mean over seeds of the metric at the end; infinite if a run diverged."""
    ends: dict[str, dict[float, list[float]]] = {}
    for spec in specs:
        run = load_run(spec.folder(results))
        end = math.inf if run.diverged else float(run.summary["final"][metric])
        ends.setdefault(spec.method, {}).setdefault(spec.overrides["learning_rate"], []).append(end)
    return {method: {rate: mean(values) for rate, values in tried.items()} for method, tried in ends.items()}


def best_rates(task: str, results: Path) -> dict[str, Any]:
    """The task's entry in the table of tuned rates, from the runs of ``specs``: for each method the rate with the
    lowest mean over seeds. Rates at which a run diverged are excluded."""
    settings = specs(task)[0].resolve()
    scores = means(specs(task), results, settings.metric, fmean)
    return {
        "metric": settings.metric,
        "seeds": list(SEEDS),
        "steps": settings.steps,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "rates": {method: min(tried, key=tried.__getitem__) for method, tried in scores.items()},
        "tried": finite(
            {method: {str(rate): mean for rate, mean in tried.items()} for method, tried in scores.items()}
        ),
    }


def save(task: str, entry: Mapping[str, Any], path: Path = TABLE) -> None:
    """Write a task's entry to the table of tuned rates."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, kept | {task: entry})
    table.cache_clear()
