"""Find the learning rates of the base and its peers: same rates, same seeds and same length for each."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from .methods import METHODS
from .results import write_json
from .runner import Spec, versions
from .sweep import Outcome, sweep
from .tuning import TABLE, table

FACTORS = (0.1, 0.3, 1.0, 3.0)
"""Rates to try, in units of the task's own."""
SEEDS = range(100, 105)
"""Not among the seeds that are reported."""
SHORTER = 4
"""Tuning runs have this fraction of the length, schedule included."""


def tuned_methods(task: str) -> list[str]:
    """The methods whose learning rate is tuned."""
    settings = Spec(task, "base", 0).resolve()
    return [name for name, method in METHODS.items() if method.tuned and method.applies(settings)]


def tuning_specs(task: str, methods: Sequence[str]) -> list[Spec]:
    """All runs that it takes."""
    settings = Spec(task, "base", 0).resolve()
    shorter = {"steps": settings.steps // SHORTER}
    if settings.decay_every:
        shorter["decay_every"] = settings.decay_every // SHORTER
    rates = [float(f"{settings.learning_rate * factor:.3g}") for factor in FACTORS]
    return [
        Spec(task, method, seed, overrides={"learning_rate": rate, **shorter})
        for seed in SEEDS
        for method in methods
        for rate in rates
    ]


def best_rates(outcomes: Sequence[Outcome], metric: str) -> dict[str, dict[str, float]]:
    """Of each method, the mean of the metric over the seeds at each rate; infinite if a run diverged or failed."""
    scores: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        final = outcome.final.get(metric) if outcome.status == "finished" else None
        by_rate = scores.setdefault(outcome.spec.method, {})
        by_rate.setdefault(str(outcome.spec.overrides["learning_rate"]), []).append(
            math.inf if final is None else final
        )
    return {method: {rate: fmean(values) for rate, values in rates.items()} for method, rates in scores.items()}


def tune(task: str, results: Path, jobs: int = 1, methods: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Make the runs and choose; returns the task's entry for the table of tuned rates."""
    specs = tuning_specs(task, methods or tuned_methods(task))
    settings = specs[0].resolve()
    tried = best_rates(sweep(specs, results, jobs, **options), settings.metric)
    return {
        "metric": settings.metric,
        "seeds": list(SEEDS),
        "steps": settings.steps,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "rates": {method: float(min(scores, key=scores.__getitem__)) for method, scores in tried.items()},
        "tried": {
            method: {rate: finite_or_none(score) for rate, score in scores.items()} for method, scores in tried.items()
        },
    }


def finite_or_none(score: float) -> float | None:
    """JSON has no infinity."""
    return score if math.isfinite(score) else None


def save(task: str, entry: Mapping[str, Any], path: Path = TABLE) -> None:
    """Put a task's entry into the table of tuned rates."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, kept | {task: entry})
    table.cache_clear()
