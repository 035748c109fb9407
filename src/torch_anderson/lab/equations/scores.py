"""From records to numbers: the error after a given time, over seeds, and the best of several learning rates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

Record = Mapping[str, Any]
FAILED = 1e3
"""Counts as the error of a run that diverged: it is far above that of a network that is zero."""


def error_at(record: Record, seconds: float) -> float:
    """The error at the first step that ended after this time; infinite if the run diverged before."""
    found = zip(record["times"], record["errors"], strict=True)
    return next((error if error is not None else math.inf for at, error in found if at >= seconds), math.inf)


def final(record: Record) -> float:
    """The error at the end of a run."""
    last = record["errors"][-1] if record["errors"] else None
    return math.inf if last is None else float(last)


def mean_error(errors: Iterable[float]) -> float:
    """The geometric mean."""
    return geometric_mean(min(error, FAILED) for error in errors)


def best_rates(records: Sequence[Record]) -> dict[tuple[str, str], float | None]:
    """Problem and method -> the rate with the lowest error at the end of its longest runs, mean over seeds."""
    found: dict[tuple[str, str], dict[float | None, list[float]]] = {}
    longest: dict[tuple[str, str], float] = {}
    for each in records:
        kind = each["problem"], each["method"]
        longest[kind] = max(longest.get(kind, 0.0), each["seconds"])
    for each in records:
        kind = each["problem"], each["method"]
        if each["seconds"] == longest[kind]:
            found.setdefault(kind, {}).setdefault(each["rate"], []).append(final(each))
    return {kind: min(rates, key=lambda rate: mean_error(rates[rate])) for kind, rates in found.items()}
