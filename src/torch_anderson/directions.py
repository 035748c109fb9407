"""The memory of the discrepancy driver: directions to try, one row each, and averages of the weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .history import full_precision
from .options import POWERS
from .parameters import Views


class DirectionBlock(Views):
    """Rows of ``directions``: differences of stored iterates, accepted jumps, the present step and the gradient."""

    def __init__(self, *place: Any, rows: int, averages: int):
        super().__init__(*place)
        self.directions = self._rows(rows)
        self.stored = self._rows(min(rows, 1))  # the iterate from which the next difference is taken, in a row
        self.averages = self._rows(averages)
        self.lengths_sq = torch.zeros(len(self.directions), device=self.device, dtype=torch.float64)

    def _rows(self, count: int) -> Tensor:
        return torch.zeros(count, self.n, device=self.device, dtype=self.dtype)

    def vectors(self) -> dict[str, Tensor]:
        """Directions, and the points that they are measured from."""
        kept = {"directions": self.directions, "stored": self.stored, "averages": self.averages}
        return {name: rows for name, rows in kept.items() if len(rows)} | super().vectors()

    def reset(self) -> None:
        """Forget all directions; the next average starts anew by itself."""
        self.directions.zero_()
        self.lengths_sq.zero_()

    def take_progress(self, other: Any) -> None:
        """Rows of zeros need nothing."""

    def keep_stored(self) -> None:
        """Measure the next difference from the present weights."""
        self.copy_to(self.stored[0])

    def store_difference(self, row: int) -> None:
        """Put present - stored weights into a row."""
        self._difference(row, self.stored[0])
        self.keep_stored()

    def store_step(self, row: int) -> None:
        """Put the displacement since ``keep_iterate`` into a row, and keep the present weights instead."""
        self._difference(row, self.iterate)
        self.keep_iterate()

    def store_gradient(self, row: int) -> None:
        """Put the gradient into a row; parameters without one count as 0."""
        targets = self.directions[row].split(self.sizes)
        for target, param, part in zip(targets, self.params, self.parts, strict=True):
            if param.grad is None:
                target.zero_()
            else:
                target.copy_(_in_memory_order(part.local(param.grad), part.local(param)))
        self._measure(row)

    def store_row(self, row: int, vector: Tensor) -> None:
        """Put a vector into a row."""
        self.directions[row].copy_(vector)
        self._measure(row)

    def combine(self, coefficients: dict[int, float]) -> Tensor:
        """The sum of rows times their coefficients."""
        total = torch.zeros_like(self.iterate)
        for row, coefficient in coefficients.items():
            total.add_(self.directions[row], alpha=coefficient)
        return total

    def average(self, count: int) -> None:
        """Take the present weights into the averages, as the ``count``-th that they take in."""
        present = self.read(0, self.n)
        for row, power in zip(self.averages, POWERS, strict=True):
            row.lerp_(present, min(1.0, (power + 1) / (count + power)))

    def mixture(self, shares: Sequence[float]) -> Tensor:
        """The present weights and the averages, in these shares."""
        present = self.read(0, self.n)
        rest = torch.tensor(shares[1:], device=self.device, dtype=self.dtype)
        with full_precision(self.device):
            return torch.addmv(present, self.averages.t(), rest, beta=shares[0])

    def _difference(self, row: int, before: Tensor) -> None:
        self.copy_to(self.directions[row])
        self.directions[row].sub_(before)
        self._measure(row)

    def after_adoption(self) -> None:
        """Measure the rows."""
        for row in range(len(self.directions)):
            self._measure(row)

    def _measure(self, row: int) -> None:
        self.lengths_sq[row] = torch.linalg.vector_norm(self.directions[row], dtype=torch.float64).square()


def _in_memory_order(gradient: Tensor, param: Tensor) -> Tensor:
    """The gradient's numbers in the order in which the parameter's lie in memory."""
    gradient = gradient.resolve_conj()
    if gradient.stride() != param.stride():
        gradient = torch.empty_like(param).copy_(gradient)
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.as_strided((real.numel(),), (1,))
