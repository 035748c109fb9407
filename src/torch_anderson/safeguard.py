"""Acceptance tests: a candidate is used only if it passes all of them.

``safeguard="descent"`` asks three questions that cost nothing, because all numbers are there already. Each answers
to a way in which a jump was seen to make training worse:

- Is the fit more than what as many columns give by chance? With as many columns as parameters any residual is
  fitted, and the candidate is arbitrary (``adjusted_gain``).
- Do the residuals change smoothly from step to step, as a map's do that is worth extrapolating? Under noise,
  consecutive changes point in opposite or unrelated directions (``is_noise``). Not asked of cycles, which stand out
  of the noise better: what they have of it is met by their regularization.
- Does the jump go at least as far along the residual as training does without it? Under noise, least squares averages
  the iterates, which lowers the loss now but takes training back by half a window each time (``geometric_test``).
"""

from collections.abc import Sequence
from math import inf, isfinite, sqrt
from typing import NamedTuple

from .noise import smoothness

MAX_GAIN = 0.98
"""Above this, acceleration has stagnated: the candidate adds no new direction, the plain step does (the breakdown
that Anderson acceleration has where GMRES stagnates)."""

TRUSTED_GAIN = 0.9
"""Above this, ``descent`` does not take the adjusted gain for real."""

SMOOTH = 0.9
"""Below this, ``descent`` takes the residuals for noise. At 0.7, 11 of 14 jumps of Adam in the first 300 steps on a
small table raised the loss; at 0.95, noise-free problems lose most of what they gain."""


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


def adjusted_gain(gain: float, rank: int, n: int) -> float:
    """The gain, corrected for what ``rank`` columns explain of any ``n`` numbers; with fewer than two numbers a
    column there is nothing to judge by.

    >>> adjusted_gain(0.0, rank=6, n=10), adjusted_gain(0.5, rank=36, n=100)
    (inf, 0.625)
    """
    return gain * sqrt(n / (n - rank)) if n >= 2 * rank else inf


def is_noise(gram: Sequence[Sequence[float]], rows: int) -> bool:
    """Whether ``descent`` takes the newest residuals for noise: the ``rows`` that have come since the last jump. Fewer
    than two of several tell nothing, and jumps upon jumps made momentum diverge.

    >>> smooth = [[1.0], [1.0, 1.0]]
    >>> is_noise(smooth, rows=2), is_noise(smooth, rows=1)
    (False, True)
    """
    return rows < 2 <= len(gram) or smoothness(gram, rows) < SMOOTH


def geometric_test(jump: Jump, *, max_jump: float, least_descent: float) -> Decision:
    """Finite, not longer than the stored path allows, and far enough along the residual.

    >>> geometric_test(Jump(length=3.0, descent=1.0, path=1.0), max_jump=2.0, least_descent=0.0)
    Decision(accepted=False, cause='too_long')
    """
    if not isfinite(jump.length):
        return Decision(False, "nonfinite")
    if jump.length > max_jump * jump.path:
        return Decision(False, "too_long")
    if not jump.descent > least_descent:
        return Decision(False, "descent")
    return Decision(True)


def loss_test(plain: float, candidate: float) -> Decision:
    """The loss must be lower at the candidate than where training would go on without it."""
    return Decision(True) if candidate < plain else Decision(False, "loss")


def residual_test(before: float, after: float) -> Decision:
    """The residual's norm must fall. The two come from two batches: a noisy test."""
    return Decision(True) if after < before else Decision(False, "residual")
