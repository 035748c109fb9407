"""The mixing formula: how the coefficients move the weights.

Everything is written as a correction ``e`` to the plain point ``u = w + r``: the candidate is ``u - e`` and the
jump from ``w`` is ``r - e``. With ``M = map_diffs`` and ``R`` the residual differences,

    paper     w + beta (r - M'g)              e = (1 - beta) r + beta M'g
    anderson  w - W'g + beta (r - R'g)        e = M'g + (1 - beta) (r - R'g)

Both are plain Anderson acceleration at beta = 1.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """e = map_diffs' @ map_rows + residual_diffs' @ residual_rows + residual * last_residual.

    Residual rows and the last residual are divided by the learning rate that made them.
    """

    map_rows: Tensor
    residual_rows: Tensor | None
    residual: float


def mixing_weights(
    coefficients: Tensor,
    *,
    newest_first: Sequence[int],
    learning_rates: Sequence[float],
    mixing: str,
    relaxation: float,
) -> Weights:
    """Weights of the correction, in the order of the coefficients.

    ``newest_first`` lists the rows in use, ``learning_rates`` (oldest first) are those of the pairs that they span.
    """
    rate = learning_rates[-1]
    residual_rows, residual = None, 0.0
    if learning_rates.count(rate) < len(learning_rates):
        residual_rows, residual = _rate_change(coefficients, newest_first[::-1], learning_rates)
    if relaxation == 1.0:
        return Weights(coefficients, residual_rows, residual)
    if mixing == "paper":
        scaled = None if residual_rows is None else relaxation * residual_rows
        return Weights(relaxation * coefficients, scaled, relaxation * residual + (1 - relaxation) * rate)
    undone = (relaxation - 1) * rate * coefficients
    rows = undone if residual_rows is None else residual_rows + undone
    return Weights(coefficients, rows, residual + (1 - relaxation) * rate)


def _rate_change(coefficients: Tensor, order: Sequence[int], learning_rates: Sequence[float]) -> tuple[Tensor, float]:
    """What rows of map_diffs measured at other learning rates lack: u_i at the present rate is
    u_i + (lr_now - lr_i) r_i / lr_i, and each r_i / lr_i is the last one less the differences after it."""
    g = [0.0, *coefficients[order].tolist(), 0.0]
    lacking = [(learning_rates[-1] - rate) * (g[i] - g[i + 1]) for i, rate in enumerate(learning_rates)]
    totals = list(accumulate(lacking))
    rows = torch.zeros_like(coefficients)
    rows[order] = -rows.new_tensor(totals[:-1])
    return rows, totals[-1]


def correction(weights: Weights, map_diffs: Tensor, residual_diffs: Tensor, last_residual: Tensor) -> Tensor:
    """The vector e for one range of columns; rows and weights in the same order, or batches of them.

    >>> weights = Weights(torch.tensor([2.0]), None, 0.5)
    >>> correction(weights, torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2), torch.tensor([4.0, 0.0])).tolist()
    [4.0, 6.0]
    """
    e = _combine(map_diffs, weights.map_rows)
    if weights.residual_rows is not None:
        e = e.add_(_combine(residual_diffs, weights.residual_rows))
    return e.add_(last_residual, alpha=weights.residual) if weights.residual else e


def _combine(rows: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(rows)
    if rows.dim() == 2:
        return torch.mv(rows.t(), weights)
    return (weights.unsqueeze(-2) @ rows).squeeze(-2)
