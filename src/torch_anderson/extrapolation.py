"""The mixing formula: how the coefficients move the weights.

Everything is written as a correction ``e`` to the plain point ``u = w + r``: the candidate is ``u - e`` and the
jump from ``w`` is ``r - e``. With ``M = map_diffs`` and ``R`` the residual differences,

    paper     w + beta (r - M'g)              e = (1 - beta) r + beta M'g
    anderson  w - W'g + beta (r - R'g)        e = M'g + (1 - beta) (r - R'g)

Both are plain Anderson acceleration at beta = 1.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Row = TypeVar("Row")


class Weights(NamedTuple, Generic[Row]):
    """e = map_diffs' @ map_rows + residual_diffs' @ residual_rows + residual * last_residual.

    Residual rows and the last residual are divided by the learning rate that made them.
    """

    map_rows: Row
    residual_rows: Row | None
    residual: float


def mixing_factors(mixing: str, relaxation: float, rate: float) -> tuple[float, float, float]:
    """(a, b, c) of e = a M'g + b R'g + c r, where R and r are divided by the learning rate.

    >>> mixing_factors("paper", 0.25, 2.0), mixing_factors("anderson", 0.25, 2.0)
    ((0.25, 0.0, 1.5), (1.0, -1.5, 1.5))
    """
    undone = (1 - relaxation) * rate
    return (relaxation, 0.0, undone) if mixing == "paper" else (1.0, -undone, undone)


def mixing_weights(
    coefficients: Sequence[float], learning_rates: Sequence[float], mixing: str, relaxation: float
) -> Weights[list[float]]:
    """Weights of the correction, in the order of the coefficients: newest first. ``learning_rates``, oldest first, are
    those of the pairs that the rows span."""
    rate = learning_rates[-1]
    a, b, residual = mixing_factors(mixing, relaxation, rate)
    residual_rows = [b * g for g in coefficients] if b else None
    if learning_rates.count(rate) < len(learning_rates):
        lacking, last = _rate_change(coefficients, learning_rates)
        residual_rows = [a * x + b * g for x, g in zip(lacking, coefficients, strict=True)]
        residual += a * last
    return Weights([a * g for g in coefficients], residual_rows, residual)


def _rate_change(coefficients: Sequence[float], learning_rates: Sequence[float]) -> tuple[list[float], float]:
    """What rows of map_diffs measured at other learning rates lack: u_i at the present rate is
    u_i + (lr_now - lr_i) r_i / lr_i, and each r_i / lr_i is the last one less the differences after it."""
    g = [0.0, *reversed(coefficients), 0.0]
    lacking = [(learning_rates[-1] - rate) * (g[i] - g[i + 1]) for i, rate in enumerate(learning_rates)]
    *totals, last = accumulate(lacking)
    return [-total for total in reversed(totals)], last


def correction(weights: Weights[Tensor], map_diffs: Tensor, residual_diffs: Tensor, last_residual: Tensor) -> Tensor:
    """The vector e for one range of columns; rows and weights in the same order, or batches of them. Rows may lie on
    another device than the residual, where e is wanted.

    >>> weights = Weights(torch.tensor([2.0]), None, 0.5)
    >>> correction(weights, torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2), torch.tensor([4.0, 0.0])).tolist()
    [4.0, 6.0]
    """
    e = _combine(map_diffs, weights.map_rows)
    if weights.residual_rows is not None:
        e = e.add_(_combine(residual_diffs, weights.residual_rows))
    e = e.to(last_residual.device)
    return e.add_(last_residual, alpha=weights.residual) if weights.residual else e


def _combine(rows: Tensor, weights: Tensor) -> Tensor:
    if rows.dtype == torch.bfloat16:  # only kept in it
        rows = rows.to(weights.dtype)
    weights = weights.to(rows)
    if rows.dim() == 2:
        return torch.mv(rows.t(), weights)
    return (weights.unsqueeze(-2) @ rows).squeeze(-2)
