"""Jumps from pairs of weights and gradients, worked out from the inner products of all rows.

    S, Y     differences of stored points and of their gradients: secants of the Hessian, Y = (Hessian) S
    g        the last gradient
    c        argmin |g - Y c|, Anderson's least squares
    H        limited-memory BFGS approximation of the inverse Hessian that the pairs define
    jump     -H g, or -(S c + H (g - Y c)) where the least squares explains nearly all of g

Least squares alone does not use the symmetry of the Hessian. H does, and comes close to the minimum of a network in
fewer gradients; but where the pairs span the gradient, as in small problems, least squares is exact and H is not.

Vectors never appear here: everything is a combination of rows, whose inner products the Gram matrix holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import hypot, inf, isfinite, sqrt
from operator import mul

from .least_squares import Coefficients, solve

EXPLAINED = 0.1
"""Below this |g - Y c| / |g|, the least squares takes part in the jump."""
CURVED = 1e-8
"""A pair defines H if the cosine of s and y is above this: BFGS needs positive curvature."""
RIDGE, ROUNDED_RIDGE = 1e-10, 1e-5
"""Regularization of the least squares, for products in float64, and for those that are good to 1e-6."""

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Proposal:
    """A jump in numbers."""

    weights: list[float]
    """The jump is the sum of the rows with these weights."""
    length: float
    descent: float
    """-g'jump: how fast the loss falls at the beginning of the jump."""
    coefficients: Coefficients
    """c, newest first."""
    gain: float
    """|g - Y c| / |g|"""


class Secants:
    """Inner products of the rows: Y in 0 to size - 1, g in row ``size``, S behind it."""

    def __init__(self, matrix: Matrix, slots: list[int], ridge: float = RIDGE):
        self.matrix = matrix
        self.slots = slots
        """Where pairs are stored, newest first."""
        self.ridge = ridge
        self.g = len(matrix) // 2
        """The row of the last gradient."""
        self.gradient_norm = sqrt(matrix[self.g][self.g])
        """|g|"""
        newest = self.s(slots[0])
        self.slope = matrix[self.g][newest]
        """Inner product of g with the newest difference of points, and ..."""
        self.slope_before = self.slope + matrix[newest][slots[0]]
        """... of the gradient before g."""
        self.newest_length = sqrt(matrix[newest][newest])
        """Length of that difference, and ..."""
        self.older_path = sum([sqrt(matrix[self.s(i)][self.s(i)]) for i in slots[1:]])
        """... of the path through the points before it."""
        rows = [self.g, *slots, *map(self.s, slots)]
        self.finite = isfinite(sum([matrix[i][i] for i in rows]))
        """Whether all products are finite; the diagonal bounds the rest."""

    def s(self, slot: int) -> int:
        """The row of a difference of points."""
        return self.g + 1 + slot

    # ------------------------------------------------------------------------------------------------------- noise

    def asymmetry(self, pairs: int) -> float:
        """Relative difference of s_i'y_j and s_j'y_i for the newest pairs: 0 for a quadratic, about 0.7 for noise.

        For a smooth loss both are nearly s_i'(Hessian) s_j. Under noise one of them is nearly 0: a step depends on the
        noise of earlier gradients, but not on that of later ones.
        """
        recent = self.slots[:pairs]
        lengths = {i: sqrt(self.matrix[self.s(i)][self.s(i)]) or 1.0 for i in recent}
        scaled = [
            (
                self.matrix[self.s(i)][j] / (lengths[i] * lengths[j]),
                self.matrix[self.s(j)][i] / (lengths[i] * lengths[j]),
            )
            for i, j in combinations(recent, 2)
        ]
        total = hypot(*chain.from_iterable(scaled))
        return hypot(*(one - other for one, other in scaled)) / (sqrt(2) * total) if total else 0.0

    def stretch(self, slots: Sequence[int]) -> float:
        """|y| / |s| from before the oldest of these pairs to after the newest, if no pair is left out."""
        y, s = (sum(self.matrix[i][j] for i in rows for j in rows) for rows in (slots, [*map(self.s, slots)]))
        return sqrt(max(y, 0.0) / s) if s > 0 else 0.0

    def novelty(self) -> float:
        """The part of the newest y that the older ones do not span, from 0 to 1; near 1 if gradients are noise."""
        newest, *older = self.slots
        own = self.matrix[newest][newest]
        if not older or not own:
            return 0.0
        known = solve(self._gram(older), [self.matrix[i][newest] for i in older], self.ridge)
        return sqrt(max(1 - known.fitted_sq / own, 0.0))

    # ------------------------------------------------------------------------------------------------------- jumps

    def propose(self, radius: float = inf) -> Proposal | None:
        """The jump, no longer than ``radius``; None if it is not finite or does not descend."""
        c = self.least_squares()
        gain = c.gain(self.gradient_norm)
        weights = self.jump(c, explained=gain < EXPLAINED)
        if weights is None:
            return None
        square = sum(w * self._dot(i, weights) for i, w in enumerate(weights) if w)
        length, descent = sqrt(max(square, 0.0)), -self._dot(self.g, weights)
        if not isfinite(length) or descent <= 0:
            return None
        if length > radius:
            part = radius / length
            weights, length, descent = [part * weight for weight in weights], radius, part * descent
        return Proposal(weights, length, descent, c, gain)

    def least_squares(self) -> Coefficients:
        """c, newest first."""
        return solve(self._gram(self.slots), [self.matrix[i][self.g] for i in self.slots], self.ridge)

    def jump(self, c: Coefficients, explained: bool) -> list[float] | None:
        """Weights of the rows whose sum is the jump; None without a pair that defines H.

        ``explained``: whether the least squares takes part.
        """
        pairs = [i for i in self.slots if self._curved(i)]
        if not pairs:
            return None
        rest, known = [0.0] * len(self.matrix), [0.0] * len(self.matrix)  # g - Y c, -S c
        rest[self.g] = 1.0
        if explained:
            for i, value in zip(self.slots, c.values, strict=True):
                rest[i], known[self.s(i)] = -value, -value
            if self._dot(self.g, known) > 0:  # towards a saddle or a maximum
                return self.jump(c, explained=False)
        return [a - b for a, b in zip(known, self._inverse_times(rest, pairs), strict=True)]

    def _inverse_times(self, vector: list[float], pairs: list[int]) -> list[float]:
        """H times a combination of rows: the two loops of limited-memory BFGS, in coefficients."""
        q, along = list(vector), []
        for i in pairs:
            along.append(self._dot(self.s(i), q) / self._curvature(i))
            q[i] -= along[-1]
        newest = pairs[0]
        q = [x * self._curvature(newest) / self.matrix[newest][newest] for x in q]
        for i, a in zip(reversed(pairs), reversed(along), strict=True):
            q[self.s(i)] += a - self._dot(i, q) / self._curvature(i)
        return q

    def _curvature(self, slot: int) -> float:
        return self.matrix[self.s(slot)][slot]

    def _curved(self, slot: int) -> bool:
        squares = self.matrix[slot][slot] * self.matrix[self.s(slot)][self.s(slot)]
        return self._curvature(slot) > CURVED * sqrt(squares) > 0

    def _dot(self, row: int, weights: Sequence[float]) -> float:
        return sum(map(mul, self.matrix[row], weights))

    def _gram(self, slots: Sequence[int]) -> list[list[float]]:
        return [[self.matrix[i][j] for j in slots[: a + 1]] for a, i in enumerate(slots)]
