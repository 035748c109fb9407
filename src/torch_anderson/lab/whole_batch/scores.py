"""From records to numbers: targets, and the gradients or the processor time needed to reach them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from .problems import PROBLEMS

Record = Mapping[str, Any]
Place = tuple[str, int]
"""Problem and seed: what methods are compared on."""
WITHIN = 1.1
"""A target, where the problem names no other: this many times the lowest loss that any method found."""


def place(record: Record) -> Place:
    """Where a run belongs."""
    return record["problem"], record["seed"]


def lowest(records: Iterable[Record]) -> dict[Place, float]:
    """The lowest loss that any method found, by problem and seed."""
    found: dict[Place, float] = {}
    for each in records:
        best = min(finite_losses(each), default=math.inf)
        found[place(each)] = min(found.get(place(each), math.inf), best)
    return found


def finite_losses(record: Record) -> list[float]:
    """The losses of a run, without the last one if the run diverged."""
    return [loss for loss in record["losses"] if loss is not None and math.isfinite(loss)]


def targets(records: Sequence[Record]) -> dict[Place, float]:
    """The loss to reach, by problem and seed."""
    optima = {place(each): each["optimum"] for each in records}
    return {where: target(where[0], best, optima[where]) for where, best in lowest(records).items()}


def target(problem: str, best: float, optimum: float | None) -> float:
    """The loss to reach, from the lowest one found and the optimum where it is known."""
    excess = PROBLEMS[problem].excess
    return WITHIN * best if excess is None or optimum is None else optimum + excess


def gradients_to(record: Record, loss: float) -> float:
    """How many gradients were computed up to the first with a loss this low; infinite if there is none."""
    return next(
        (count for count, each in enumerate(record["losses"], 1) if each is not None and each <= loss), math.inf
    )


def median_gradients(records: Iterable[Record], goals: Mapping[Place, float]) -> float:
    """The median over seeds; infinite where half of the runs or more do not arrive."""
    counts = sorted(gradients_to(each, goals[place(each)]) for each in records)
    middle = counts[(len(counts) - 1) // 2 : len(counts) // 2 + 1]
    return math.inf if math.inf in middle else median(middle)


def shown(count: float) -> str:
    """A number of gradients in a table.

    >>> shown(16.0), shown(16.5), shown(math.inf)
    ('16', '16.5', '-')
    """
    return f"{count:g}" if math.isfinite(count) else "-"
