"""Acceptance tests: a candidate is used only if it passes all of them.

``safeguard="descent"`` asks three questions that cost nothing, because all numbers are there already. Each prevents a
way in which a jump was seen to make training worse:

- Is the fit more than what as many columns give by chance? With as many columns as parameters any residual is fitted,
  and the candidate is arbitrary (``adjusted_gain``).
- Do the residuals change smoothly from step to step, as those of a map worth extrapolating do? Under noise,
  consecutive changes point in opposite or unrelated directions (``is_noise``). Pairs of several steps are exempt: they
  stand out of the noise better, and the rest is handled by their regularization.
- Does the jump go at least as far along the residual as training does without it? Under noise, least squares averages
  the points, which lowers the loss now but takes training back by half a window each time (``judge``).
"""

from dataclasses import dataclass
from math import inf, isfinite, sqrt

from .gram import Jump, Problem

MAX_GAIN = 0.98
"""Above this, acceleration has stagnated: the candidate adds no new direction, the plain step does (the breakdown
that Anderson acceleration has where GMRES stagnates)."""

TRUSTED_GAIN = 0.9
"""Above this, ``descent`` does not take the adjusted gain for real."""

SMOOTH = 0.9
"""Below this, ``descent`` takes the residuals for noise. At 0.7, 11 of 14 jumps of Adam in the first 300 steps on a
small table raised the loss; at 0.95, noise-free problems lose most of what they gain."""


@dataclass(frozen=True)
class Safeguard:
    """The tests that need no evaluation, chosen by the options."""

    descent: bool
    max_jump: float
    single_steps: bool

    def reason_to_skip(self, problem: Problem, pairs_since_jump: int, n: int) -> str:
        """Why not to form a candidate; empty if there is no reason."""
        if problem.residual_norm == 0:
            return "converged"
        wary = self.descent and self.single_steps
        gain = adjusted_gain(problem.gain, problem.solution.rank, n) if self.descent else problem.gain
        if wary and is_noise(problem, pairs_since_jump - 1):
            return "noisy"
        return "no_gain" if gain > (TRUSTED_GAIN if wary else MAX_GAIN) else ""

    def judge(self, problem: Problem, jump: Jump) -> str:
        """Why to reject a candidate: not finite, too long, or not far enough along the residual; empty if it passes."""
        if not isfinite(jump.length):
            return "nonfinite"
        if jump.length > self.max_jump * problem.path:
            return "too_long"
        if self.descent and not jump.descent > problem.residual_norm**2:
            return "descent"
        return ""


def adjusted_gain(gain: float, rank: int, n: int) -> float:
    """The gain, corrected for what ``rank`` columns explain of any ``n`` numbers.

    With fewer than two numbers a column there is nothing to judge by.

    >>> adjusted_gain(0.0, rank=6, n=10), adjusted_gain(0.5, rank=36, n=100)
    (inf, 0.625)
    """
    return gain * sqrt(n / (n - rank)) if n >= 2 * rank else inf


def is_noise(problem: Problem, rows: int) -> bool:
    """Whether ``descent`` takes the newest residuals for noise: the ``rows`` that have come since the last jump.

    Fewer than two of several tell nothing, and jumps upon jumps made momentum diverge.
    """
    return rows < 2 <= len(problem.gram) or problem.smoothness(rows) < SMOOTH
