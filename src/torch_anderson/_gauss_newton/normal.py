"""Damped normal equations: S b = J'(J J' + damping)^-1 b, with one Cholesky factor for all b.

On several ranks J has the rows of all of them, divided by the square root of the number of ranks.
"""

from __future__ import annotations

from math import inf, sqrt

import torch
from torch import Tensor

from .._ranks.ranks import Ranks, all_gather
from .._tensors.evaluate import Unusable
from .rows import Memory, Rows, symmetric_product

FLOOR = 1e-14
"""Least damping, relative to the mean squared length of a row."""
TRIES = 40
"""Dampings, each ten times the last, before a matrix is given up."""


class Normal:
    """The map S: in the dual form if there are at most as many rows as weights, on all ranks together."""

    def __init__(self, rows: Rows, damping: float, ranks: Ranks, memory: Memory):
        self.ranks = ranks
        self.most = int(ranks.largest(torch.tensor(float(len(rows)))))
        self.dual = self.most * ranks.size <= rows.shape[1]
        self.rows = rows if ranks.size == 1 else Rows.of(self._shared(rows.dense))
        side = len(self.rows) if self.dual else rows.shape[1]
        matrix = memory.matrix("products", side, side, rows.dense.device)
        if self.dual:
            self.rows.products(matrix)
        else:
            symmetric_product(self.rows.dense.T, matrix)
            matrix = ranks.sum(matrix.tril_() if ranks.size > 1 else matrix)
        diagonal = matrix.diagonal().clone()
        mean = float(diagonal.sum()) / (self.most * ranks.size)
        if not mean < inf:
            raise Unusable("nonfinite_outputs", "derivatives of the residuals by the weights are not finite")
        self.damping = max(damping, FLOOR * mean, 1e-300)
        self.factor = self._factor(matrix, diagonal)

    def _shared(self, rows: Tensor) -> Tensor:
        """The rows of all ranks in the dual form, and this rank's part in the other."""
        return self._gathered(rows) if self.dual else rows / sqrt(self.ranks.size)

    def _gathered(self, right: Tensor) -> Tensor:
        """Rows, or numbers that belong to them, of all ranks; filled up with zeros where a rank has fewer."""
        if self.ranks.size == 1:
            return right
        padded = right.new_zeros(self.most, *right.shape[1:])
        padded[: len(right)] = right
        found = all_gather(padded.reshape(-1), self.ranks.size, self.ranks.group)
        return found.reshape(-1, *right.shape[1:]) / sqrt(self.ranks.size)

    def _factor(self, matrix: Tensor, diagonal: Tensor) -> Tensor:
        """The Cholesky factor; with ten times the damping while rounding makes the matrix singular."""
        for _ in range(TRIES):
            matrix.diagonal().copy_(diagonal + self.damping)
            factor, failed = torch.linalg.cholesky_ex(matrix)
            if not failed:
                break
            self.damping *= 10
        return factor

    def solve(self, right: Tensor) -> Tensor:
        """S b, bit for bit the same on all ranks, for the b of this rank's rows."""
        if self.dual:
            found = self.rows.transposed_times(self._inverse(self._gathered(right)))
        else:
            scaled = right / sqrt(self.ranks.size) if self.ranks.size > 1 else right
            found = self._inverse(self.ranks.sum(self.rows.transposed_times(scaled)))
        # Processors may round differently: all ranks take the numbers of the first.
        return found if self.ranks.size == 1 else self.ranks.sum(found if self.ranks.index == 0 else 0 * found)

    def _inverse(self, right: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self.factor, right[:, None], upper=False)  # faster than cholesky_solve
        return torch.linalg.solve_triangular(self.factor.mT, half, upper=True)[:, 0]
