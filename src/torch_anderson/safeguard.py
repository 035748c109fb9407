"""Acceptance tests: a candidate is used only if it passes all of them."""

from math import isfinite
from typing import NamedTuple

MAX_GAIN = 0.98


class Jump(NamedTuple):
    """A candidate in numbers."""

    length: float
    """|candidate - w|"""
    descent: float
    """Inner product of candidate - w with the residual r."""
    path: float
    """Length of the path through the stored iterates."""


class Decision(NamedTuple):
    """Accepted, or the cause why not."""

    accepted: bool
    cause: str = ""


def geometric_test(jump: Jump, *, max_jump: float, descent: bool) -> Decision:
    """Finite, not longer than the stored path allows, and along the residual if ``descent`` asks for it.

    >>> geometric_test(Jump(length=3.0, descent=1.0, path=1.0), max_jump=2.0, descent=True)
    Decision(accepted=False, cause='too_long')
    """
    if not isfinite(jump.length):
        return Decision(False, "nonfinite")
    if jump.length > max_jump * jump.path:
        return Decision(False, "too_long")
    if descent and not jump.descent > 0:
        return Decision(False, "descent")
    return Decision(True)


def loss_test(plain: float, candidate: float) -> Decision:
    """The loss must be lower at the candidate than where training would go on without it."""
    return Decision(True) if candidate < plain else Decision(False, "loss")


def residual_test(before: float, after: float) -> Decision:
    """The residual's norm must fall. The two come from two batches: a noisy test."""
    return Decision(True) if after < before else Decision(False, "residual")
