"""Which numbers a setting may have, by its name: the same in every task that has such a setting."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """A range of allowed numbers, and its description."""

    holds: Callable[[float], bool]
    words: str


def at_least(least: int) -> Range:
    """This number and all above; neither NaN nor infinity.

    >>> [at_least(1).holds(number) for number in (1, 0, math.nan, math.inf)]
    [True, False, False, False]
    """
    return Range(lambda number: least <= number < math.inf, f"{least} and more")


ABOVE_ZERO = Range(lambda number: 0 < number < math.inf, "above 0")
SHARE = Range(lambda number: 0 < number < 1, "between 0 and 1")
ALLOWED = {
    **dict.fromkeys(("steps", "evaluate_every", "width", "depth", "batch_size", "epochs"), at_least(1)),
    **dict.fromkeys(("training_images", "validation_images", "shrink"), at_least(1)),
    **dict.fromkeys(("decay_factor", "decay_every", "forward_cost", "hold"), at_least(0)),
    **dict.fromkeys(("learning_rate", "viscosity"), ABOVE_ZERO),
    "tol": Range(lambda number: number >= 0, "0 and more"),
    "training_share": SHARE,
}
"""Options of the optimizers are not here: those check their own."""


def check_ranges(settings: Any) -> None:
    """Raise ``ValueError`` for a setting of this object that is out of its range."""
    for name, allowed in ALLOWED.items():
        check(name, getattr(settings, name, None), allowed)


def check(name: str, value: float | None, allowed: Range) -> None:
    """Raise ``ValueError`` for a value out of range; None is always allowed."""
    if value is not None and not allowed.holds(value):
        raise ValueError(f"Invalid {name}: {value}. Allowed: {allowed.words}.")
