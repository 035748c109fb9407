"""Tests that a candidate has to pass before it is tried, from numbers of the Gram matrix alone."""

from math import isfinite

from .gram import Jump, Problem

MAX_GAIN = 0.98
"""Above this, acceleration has stagnated: the candidate adds no new direction, the plain step does (the breakdown
that Anderson acceleration has where GMRES stagnates)."""


def reason_to_skip(problem: Problem) -> str:
    """Why not to form a candidate; empty if there is no reason."""
    if problem.residual_norm == 0:
        return "converged"
    return "no_gain" if problem.gain > MAX_GAIN else ""


def judge(problem: Problem, jump: Jump, max_jump: float) -> str:
    """Why to reject a candidate: not finite, or too long; empty if it passes."""
    if not isfinite(jump.length):
        return "nonfinite"
    return "too_long" if jump.length > max_jump * problem.path else ""
