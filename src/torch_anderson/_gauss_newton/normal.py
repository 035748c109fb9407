"""Damped normal equations: S b = J'(J J' + damping)^-1 b, with one Cholesky factor for all b.

On several ranks J has the rows of all of them, one rank's after the other's, divided by the square root of their number.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from .._ranks.ranks import Ranks, all_gather

STRIPS = 4
"""Strips in which a symmetric product is computed, to save nearly half of it."""
FLOOR = 1e-14
"""Least damping, relative to the mean squared length of a row."""
TRIES = 40
"""Dampings, each ten times the last, before a matrix is given up."""


def symmetric_product(rows: Tensor) -> Tensor:
    """The lower triangle of ``rows @ rows.T``; what is above it is not defined.

    >>> symmetric_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tril()
    tensor([[ 5.,  0.],
            [11., 25.]])
    """
    count = len(rows)
    product = rows.new_zeros(count, count)
    width = -(-count // STRIPS) or 1
    for start in range(0, count, width):
        strip = slice(start, start + width)
        torch.mm(rows[start:], rows[strip].T, out=product[start:, strip])
    return product


class Normal:
    """The map S: in the dual form if there are at most as many rows as weights, on all ranks together."""

    def __init__(self, rows: Tensor, damping: float, ranks: Ranks):
        self.ranks = ranks
        self.most = int(ranks.largest(torch.tensor(float(len(rows)))))
        self.dual = self.most * ranks.size <= rows.shape[1]
        self.rows = self._gathered(rows) if self.dual else rows / sqrt(ranks.size) if ranks.size > 1 else rows
        matrix = symmetric_product(self.rows) if self.dual else ranks.sum(symmetric_product(self.rows.T))
        diagonal = matrix.diagonal().clone()
        self.damping = max(damping, FLOOR * float(diagonal.sum()) / (self.most * ranks.size), 1e-300)
        self.factor = self._factor(matrix, diagonal)

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
            found = self.rows.T @ torch.cholesky_solve(self._gathered(right)[:, None], self.factor)[:, 0]
        else:
            scaled = right / sqrt(self.ranks.size) if self.ranks.size > 1 else right
            found = torch.cholesky_solve(self.ranks.sum(self.rows.T @ scaled)[:, None], self.factor)[:, 0]
        # Processors may round differently: all ranks take the numbers of the first.
        return found if self.ranks.size == 1 else self.ranks.sum(found if self.ranks.index == 0 else 0 * found)
