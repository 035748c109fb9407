"""The least-squares problem c = argmin |r - R c| from the Gram matrix of R's columns, in plain Python.

Regularization and rank are relative to the lengths of the columns: residuals of deep networks are 1e-3 to 1e-6, where
an absolute regularization would silently turn the method off. Columns come newest first: one that depends on newer ones
is dropped, never the newest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from operator import mul

RANK_TOLERANCE = 1e-14
"""A column of unit length whose squared distance from the span of the newer ones is below this depends on them."""


@dataclass(frozen=True)
class Coefficients:
    """The solution of one small problem."""

    values: list[float]
    """c, one number for each column (0 for a dropped one), newest first."""
    fitted_sq: float
    """|r|^2 - |r - R c|^2, what a linear map would remove."""
    rank: int
    """Columns in use."""
    least_distance_sq: float = 1.0
    """The smallest squared distance of a column of unit length from the span of the newer ones."""

    def gain(self, residual_norm: float) -> float:
        """|r - R c| / |r|; 0 if r is 0."""
        return sqrt(max(1 - self.fitted_sq / residual_norm**2, 0.0)) if residual_norm else 0.0


def solve(gram: Sequence[Sequence[float]], rhs: Sequence[float], regularization: float) -> Coefficients:
    """Solve from the lower triangle of G = R'R, and b = R'r, by Cholesky factorization.

    At the usual ten columns this takes less time than a handful of tensor operations. Scaling the columns to unit
    length would change nothing but rounding: tolerance and regularization are relative to them.

    >>> solve([[4.0], [0.0, 1.0]], [8.0, 3.0], regularization=0.0)
    Coefficients(values=[2.0, 3.0], fitted_sq=25.0, rank=2, least_distance_sq=1.0)
    """
    kept: list[int] = []
    factor: list[list[float]] = []
    z: list[float] = []
    least = 1.0
    for i, column in enumerate(gram):
        row: list[float] = []
        for j, other in zip(kept, factor, strict=True):
            row.append((column[j] - sum(map(mul, row, other))) / other[-1])
        length_sq = column[i]
        distance_sq = length_sq - sum(map(mul, row, row))
        least = min(least, distance_sq / length_sq) if length_sq else 0.0
        if distance_sq > RANK_TOLERANCE * length_sq:
            pivot = sqrt(distance_sq + regularization * length_sq)
            z.append((rhs[i] - sum(map(mul, row, z))) / pivot)
            kept.append(i)
            factor.append([*row, pivot])
    values = [0.0] * len(gram)
    for a in reversed(range(len(kept))):  # back substitution
        values[kept[a]] = value = z[a] / factor[a][a]
        for b in range(a):
            z[b] -= value * factor[a][b]
    penalty = sum(c * c * column[i] for i, (c, column) in enumerate(zip(values, gram, strict=True)))
    return Coefficients(values, sum(map(mul, values, rhs)) + regularization * penalty, len(kept), least)
