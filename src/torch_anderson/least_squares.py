"""Coefficients g = argmin |r - R g|, from the Gram matrix of R (fast) or from its columns (QR, the paper's way).

Regularization and rank are relative to the lengths of the columns: residuals
of deep networks are 1e-3 to 1e-6, where an absolute regularization would silently turn the method off. Columns come
newest first: one that depends on newer ones is dropped, never the newest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import sqrt
from operator import mul

import torch
from torch import Tensor

RANK_TOLERANCE = 1e-14
"""A column of unit length whose squared distance from the span of the newer ones is below this depends on them."""

QR_TOLERANCE = 1e-13
"""The same for its distance, which QR resolves to rounding error."""


class System:
    """The small system G = R'R, b = R'r of the held columns, newest first, of G the lower triangle.

    A new column brings its products with all columns: the Gram matrix is never rebuilt. The right-hand side follows
    from r = r_before + sum of the new columns, without another pass over the old ones.
    """

    def __init__(self, columns: int = 0, exact: bool = False):
        self.gram = [[0.0] * (i + 1) for i in range(columns)]
        self.rhs = [0.0] * columns
        self.exact = exact  # whether products are formed in float64, and those with the residual each time anew

    def numbers(self, size: int) -> list[float]:
        """For a checkpoint, in as many numbers as a system of ``size`` columns."""
        numbers = [float(self.exact), float(len(self.rhs)), *self.rhs, *chain.from_iterable(self.gram)]
        return numbers + [0.0] * (2 + size + size * (size + 1) // 2 - len(numbers))

    @classmethod
    def sum(cls, systems: Sequence["System"]) -> "System":
        """One system of the columns of all."""
        total = systems[0].empty()
        total.rhs = [sum(entries) for entries in zip(*(system.rhs for system in systems), strict=True)]
        grams = zip(*(system.gram for system in systems), strict=True)
        total.gram = [[sum(entries) for entries in zip(*rows, strict=True)] for rows in grams]
        return total

    def empty(self) -> "System":
        """A system of as many columns that are zero."""
        return System(len(self.rhs), self.exact)

    @classmethod
    def from_numbers(cls, rest: Iterator[float]) -> "System":
        """The inverse of ``numbers``; what pads them is left."""
        exact, columns = bool(next(rest)), int(next(rest))
        system = cls(0, exact)
        system.rhs = list(islice(rest, columns))
        system.gram = [list(islice(rest, i + 1)) for i in range(columns)]
        return system

    def update(self, newest_first: Sequence[int], products: Sequence[Sequence[float]]) -> None:
        """Take over ``History.products`` of the newest columns; ``newest_first`` are the slots of all held ones.

        >>> system = System()  # R = [1 2], and r = 5 at first
        >>> system.update([0], [[1.0], [0.0], [5.0]])
        >>> system.update([1, 0], [[2.0], [4.0], [14.0]])  # r = 5 + 2
        >>> system.gram, system.rhs
        ([[4.0], [2.0, 1.0]], [14.0, 7.0])
        """
        rows, with_residual = [products[slot] for slot in newest_first], products[-1]
        fresh = len(with_residual) - self.exact
        if self.exact:  # the last column is the residual's: adding up would lose digits
            self.rhs = [row[-1] for row in rows]
        else:
            older = zip(self.rhs, rows[fresh:], strict=False)  # what was the oldest may be gone
            self.rhs = [*with_residual, *(before + sum(row) for before, row in older)]
        for new in reversed(range(fresh)):
            column = [row[new] for row in rows[new:]]
            self.gram = [column[:1], *([x, *row] for x, row in zip(column[1:], self.gram, strict=False))]


@dataclass(frozen=True)
class Coefficients:
    """The solution of one small problem."""

    values: list[float]
    """g, one number per column (0 for a dropped one), newest first."""
    fitted_sq: float
    """|r|^2 - |r - R g|^2, what a linear map would take away."""
    rank: int
    """Columns in use."""
    least_distance_sq: float = 1.0
    """The smallest squared distance of a column of unit length from the span of the newer ones."""


def solve_gram(gram: Sequence[Sequence[float]], rhs: Sequence[float], regularization: float) -> Coefficients:
    """Solve from the lower triangle of G = R'R, and b = R'r, by Cholesky factorization.

    In plain Python: at the usual ten columns it takes less time than a handful of tensor operations. Scaling the
    columns to unit length would change nothing but rounding: tolerance and regularization are relative to them.

    >>> solve_gram([[4.0], [0.0, 1.0]], [8.0, 3.0], regularization=0.0)
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
    for i, value in zip(kept, _back_substitute(factor, z), strict=True):
        values[i] = value
    penalty = sum(g * g * column[i] for i, (g, column) in enumerate(zip(values, gram, strict=True)))
    return Coefficients(values, sum(map(mul, values, rhs)) + regularization * penalty, len(kept), least)


def _back_substitute(factor: list[list[float]], z: list[float]) -> list[float]:
    y = list(z)
    for i in reversed(range(len(y))):
        row = factor[i]
        value = y[i] = y[i] / row[i]
        for j in range(i):
            y[j] -= value * row[j]
    return y


def solve_gram_batch(gram: Tensor, rhs: Tensor, regularization: float) -> tuple[Tensor, Tensor]:
    """The same for a batch of whole matrices, leaving out directions instead of columns; returns g and fitted_sq.

    >>> values, fitted_sq = solve_gram_batch(
    ...     torch.diag(torch.tensor([4.0, 1.0]))[None], torch.tensor([[8.0, 3.0]]), 0.0
    ... )
    >>> values.tolist(), fitted_sq.tolist()
    ([[2.0, 3.0]], [25.0])
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal.rsqrt(), 0.0)
    eigenvalues, vectors = torch.linalg.eigh(gram * scale.unsqueeze(-1) * scale.unsqueeze(-2))
    inverse = torch.where(eigenvalues > RANK_TOLERANCE, 1 / (eigenvalues + regularization), 0.0)
    target = (vectors.mT @ (scale * rhs).unsqueeze(-1)).squeeze(-1)
    y = inverse * target
    values = scale * (vectors @ y.unsqueeze(-1)).squeeze(-1)
    return values, (y * (target + regularization * y)).sum(-1)


def condition_number(gram: Sequence[Sequence[float]]) -> float:
    """Of R's columns scaled to unit length, from the lower triangle of R'R; infinite if they are dependent.

    >>> round(condition_number([[4.0], [1.2, 1.0]]), 6)
    2.0
    """
    matrix = torch.zeros(len(gram), len(gram), dtype=torch.float64)
    for i, row in enumerate(gram):
        matrix[i, : i + 1] = torch.tensor(row[: i + 1], dtype=torch.float64)
    scale = matrix.diagonal().rsqrt()
    scaled = matrix * scale.unsqueeze(-1) * scale
    if not scaled.isfinite().all():
        return float("inf")
    eigenvalues = torch.linalg.eigvalsh(scaled)
    return float((eigenvalues[-1] / eigenvalues[0].clamp_min(0.0)).sqrt())


def solve_qr(columns: Tensor, residual: Tensor, regularization: float) -> Coefficients:
    """Solve with the QR factorization of R (n x columns), in float64.

    >>> R = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    >>> solve_qr(R, torch.tensor([4.0, 3.0, 5.0], dtype=torch.float64), regularization=0.0).values
    [2.0, 3.0]
    """
    columns, residual = columns.double(), residual.double()
    count = columns.shape[-1]
    norms = torch.linalg.vector_norm(columns, dim=0)
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    damping = torch.eye(count, dtype=columns.dtype, device=columns.device) * regularization**0.5
    matrix = torch.cat([columns * scale, damping])
    target = torch.cat([residual, residual.new_zeros(count)])
    keep = list(range(count))
    while True:
        q, r = torch.linalg.qr(matrix[:, keep])
        dependent = (r.diagonal().abs() <= QR_TOLERANCE).nonzero()
        if not len(dependent):
            break
        del keep[int(dependent[0])]
    values = columns.new_zeros(count)
    if keep:
        values[keep] = torch.linalg.solve_triangular(r, (q.T @ target).unsqueeze(-1), upper=True).squeeze(-1)
    values = values * scale
    fitted_sq = residual.square().sum() - (residual - columns @ values).square().sum()
    return Coefficients(values.tolist(), float(fitted_sq), len(keep))
