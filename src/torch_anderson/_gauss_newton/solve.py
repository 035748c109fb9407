"""The damped fit: coefficients of the directions for which a linear model of the outputs has the least loss.

For squares this is the Levenberg-Marquardt step in the span of the directions,

    min |r + A c|^2 + damping c' M c,    M the diagonal of A'A;

for other convex losses a few Newton steps on the same objective, with the loss in place of the squares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from .._ranks.ranks import Ranks
from .._tensors.evaluate import Outputs, Unusable, agreeing

RIDGE = 1e-13
"""Keeps the scaled matrix invertible where directions depend on each other."""
DAMPINGS = 6
"""Dampings, each ten times the last, that are tried while modelled outputs leave the domain of the loss."""
OUTSIDE = "outputs that a linear model expects are outside the domain of the loss, even close to the present ones"
NEWTON_STEPS = 5
SETTLED = 1e-3
"""A Newton step that promises less than this part of the decrease so far is not made."""


class Quadratic(NamedTuple):
    """The loss to second order in the coefficients of columns."""

    loss: Tensor
    gradient: Tensor
    hessian: Tensor


@dataclass(frozen=True)
class Move:
    """Coefficients, and the loss that the linear model of the outputs promises for them."""

    coefficients: Tensor
    promised: float
    damping: float
    """The damping that they were found with."""


@dataclass(frozen=True)
class LinearModel:
    """Outputs that are linear in the coefficients of the directions, and the loss of them over all ranks."""

    convex: Callable[[Tensor], Tensor] | None
    """The loss of outputs; None for the sum of squares."""
    values: Tensor
    """The outputs at the start, in float64."""
    columns: Tensor
    """How they change along each direction, one row each."""
    here: Quadratic
    """The loss around the start, over all ranks."""
    loss: float
    """The loss at the start."""
    mean: Callable[[Tensor], Tensor]
    """Means over ranks."""
    ages: Sequence[int] = ()
    """Columns of directions that are differences of stored points, from the newest on."""

    def around(self, coefficients: Tensor) -> Quadratic:
        """The loss around modelled outputs; NaN outside the domain of the loss, on all ranks if on one.

        A loss of probabilities, for example, raises an error for outputs that are not probabilities.
        """
        try:
            local = quadratic(self.convex, self.values + self.columns.T @ coefficients, self.columns)
        except Exception:
            local = Quadratic(*(torch.full_like(part, torch.nan) for part in self.here))
        return Quadratic(*map(self.mean, local))

    def promised_fall(self, damping: float, chosen: Sequence[int] | None = None) -> float:
        """How far the loss falls by the quadratic model, in some of the directions or in all."""
        here = self.here
        if chosen is not None:
            i = torch.tensor(chosen, dtype=torch.long, device=here.gradient.device)
            here = Quadratic(here.loss, here.gradient[i], here.hessian[i][:, i])
        return float(here.loss - _promise(here, damped(here.gradient, here.hessian, damping)))


def linearize(first: Outputs, columns: Tensor, ranks: Ranks, ages: Sequence[int]) -> LinearModel:
    """The linear model of outputs that change along columns; raises ``Unusable``, or ``TypeError`` for no residuals."""
    values = first.values.double()
    with agreeing(ranks):
        _refuse_targets(first, columns)
        here = quadratic(first.convex, values, columns)
        if not all(part.isfinite().all() for part in here):
            raise Unusable("nonfinite_outputs", "the loss of the outputs has no finite value and derivatives")
    if ranks.size > 1:
        here = Quadratic(*map(ranks.mean, here))
    if not here.hessian.any() and not here.gradient.any():
        present, change = ranks.largest(torch.tensor([columns.numel() > 0, columns.any()], dtype=torch.float64))
        if not present:
            raise Unusable("no_outputs", "outputs returned empty tensors")
        if not change:
            raise Unusable("constant_outputs", "outputs returned numbers that do not depend on the weights")
    if not here.gradient.any():
        raise Unusable("converged", "the loss is at a minimum along all directions")
    return LinearModel(first.convex, values, columns, here, float(here.loss), ranks.mean, ages)


def _refuse_targets(first: Outputs, columns: Tensor) -> None:
    """Raise for predictions and targets, given as two residuals: the targets do not depend on the weights."""
    n = first.shapes[0].numel()
    if len(first.shapes) != 2 or first.shapes[0] != first.shapes[1] or columns.shape[1] != 2 * n:
        return
    if columns[:, :n].any() and not columns[:, n:].any() and first.values[n:].any():
        raise TypeError(
            "outputs returned two tensors for loss='residual', and the second does not depend on the weights. "
            "Return predictions - targets, or build GaussNewton(..., loss='mse')."
        )


def quadratic(convex: Callable[[Tensor], Tensor] | None, values: Tensor, columns: Tensor) -> Quadratic:
    """The loss around outputs, which the coefficients change along the rows of ``columns``."""
    if convex is None:
        return Quadratic(values @ values, 2 * (columns @ values), 2 * (columns @ columns.T))
    slopes, bend = torch.func.vjp(torch.func.grad(convex), values)  # type: ignore[misc]
    hessian = torch.func.vmap(bend)(columns)[0] @ columns.T  # twice backward: several losses cannot go forward
    return Quadratic(convex(values), columns @ slopes, hessian)


def damped(gradient: Tensor, hessian: Tensor, damping: float) -> Tensor:
    """The minimiser of gradient'c + c'(hessian + damping * its diagonal)c / 2.

    >>> damped(torch.tensor([2.0]), torch.tensor([[4.0]]), 1.0)
    tensor([-0.2500])
    """
    scale = hessian.diagonal().sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    matrix = hessian / torch.outer(scale, scale)
    matrix.diagonal().add_(damping + RIDGE)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        return torch.zeros_like(gradient)
    return -torch.cholesky_solve((gradient / scale)[:, None], factor)[:, 0] / scale


def solve_damped(model: LinearModel, damping: float) -> Move:
    """Minimise the damped loss of the linear model; with more damping while its outputs leave the loss's domain."""
    for power in range(DAMPINGS):
        if move := _newton(model, damping * 10**power):
            return move
    raise Unusable("loss_domain", OUTSIDE)


def _newton(model: LinearModel, damping: float) -> Move | None:
    """Newton steps in the coefficients: one for squares. None if modelled outputs are outside the loss's domain."""
    here = model.here
    coefficients = damped(here.gradient, here.hessian, damping)
    if model.convex is None:
        return Move(coefficients, float(_promise(here, coefficients)), damping)
    penalty = damping * here.hessian.diagonal()
    best, lowest = None, inf
    for _ in range(NEWTON_STEPS):
        there = model.around(coefficients)
        objective = float(there.loss + penalty @ coefficients.square() / 2)
        if not isfinite(objective) or objective >= lowest:  # a Newton step may overshoot
            break
        best, lowest = Move(coefficients, float(there.loss), damping), objective
        slope = there.gradient + penalty * coefficients
        step = damped(slope, there.hessian + torch.diag(penalty), 0.0)
        if not -float(step @ slope) >= SETTLED * (model.loss - objective):
            break
        coefficients = coefficients + step
    return best


def _promise(here: Quadratic, coefficients: Tensor) -> Tensor:
    """The loss that a quadratic promises."""
    return here.loss + coefficients @ (here.gradient + here.hessian @ coefficients / 2)
