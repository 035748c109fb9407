"""The best combination of a few directions, by a damped model of the loss in their coefficients."""

from collections.abc import Callable
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from .discrepancy import Convex, Model, Squares

RIDGE = 1e-13
"""Keeps the scaled matrix invertible where directions depend on each other."""
NEWTON_STEPS = 5
SETTLED = 1e-3
"""A Newton step that promises less than this part of the decrease so far is not made."""
GOOD, POOR = 0.75, 0.25
"""Shares of the promised decrease from which damping falls, and below which it grows."""
LEAST_DAMPING, MOST_DAMPING = 1e-12, 1e8

Reduce = Callable[[Tensor], Tensor]
"""Means over ranks, in one process the identity."""


class Step(NamedTuple):
    """Coefficients, and the loss that the linear model of the outputs promises for them."""

    coefficients: Tensor
    loss: float


def total(model: Model) -> Model:
    """All parts together."""
    return Model(*(part.sum(0) for part in model))


def damped(gradient: Tensor, hessian: Tensor, damping: float) -> Tensor:
    """The minimiser of gradient'a + a'(hessian + damping * its diagonal)a / 2.

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


def promise(model: Model, coefficients: Tensor) -> Tensor:
    """The loss that a quadratic model promises."""
    return model.loss + coefficients @ (model.gradient + model.hessian @ coefficients / 2)


def reduced(model: Model, reduce: Reduce) -> Model:
    """The same on every rank, in one reduction."""
    sizes = [part.numel() for part in model]
    flat = reduce(torch.cat([part.reshape(-1) for part in model]))
    return Model(*(part.view_as(old) for part, old in zip(flat.split(sizes), model, strict=True)))


def minimize(
    misfit: Squares | Convex, values: Tensor, columns: Tensor, model: Model, damping: float, reduce: Reduce
) -> Step:
    """Damped Newton steps in the coefficients; one is enough for squares, whose model is exact."""
    start = total(model)
    penalty = damping * start.hessian.diagonal()
    coefficients = damped(start.gradient, start.hessian, damping)
    best, lowest = Step(coefficients, float(promise(start, coefficients))), inf
    for _ in range(NEWTON_STEPS if isinstance(misfit, Convex) else 0):
        here = total(reduced(misfit.model(values + columns.double().T @ coefficients, columns), reduce))
        objective = float(here.loss + penalty @ coefficients.square() / 2)
        if not objective < lowest:  # a Newton step may overshoot
            break
        best, lowest = Step(coefficients, float(here.loss)), objective
        slope = here.gradient + penalty * coefficients
        move = damped(slope, here.hessian + torch.diag(penalty), 0.0)
        if -float(move @ slope) < SETTLED * (float(start.loss) - objective):
            break
        coefficients = coefficients + move
    return best


def held_out_gain(model: Model, damping: float) -> float:
    """log(loss / promised loss) where each half of the batch is judged by coefficients that fit the other; the smaller.

    What fits the noise of one half alone makes the other worse. With one part only there is nothing to hold out, and
    no bound on the gain.
    """
    if len(model.loss) < 2:
        return inf
    parts = [Model(*part) for part in zip(*model, strict=True)]
    return min(_gain(judge, damped(fit.gradient, fit.hessian, damping)) for fit, judge in (parts, parts[::-1]))


def _gain(judge: Model, coefficients: Tensor) -> float:
    before, after = float(judge.loss), float(promise(judge, coefficients))
    return log(before / max(after, before * 1e-12)) if before > 0 and after == after else 0.0


def chosen(model: Model, directions: list[int]) -> Model:
    """The model in some of the directions."""
    index = torch.tensor(directions, dtype=torch.long)
    return Model(model.loss, model.gradient[:, index], model.hessian[:, index][:, :, index])


def promised_fall(model: Model, damping: float) -> float:
    """How far the loss falls by the quadratic model."""
    whole = total(model)
    return float(whole.loss - promise(whole, damped(whole.gradient, whole.hessian, damping)))


def next_damping(damping: float, promised: float, fall: float) -> float:
    """Less damping after a fall of the loss as promised, more after a poorer one, much more after none."""
    if not fall > 0:
        return min(damping * 10, MOST_DAMPING)
    ratio = fall / promised if promised > 0 else 0.0
    if ratio > GOOD:
        return max(damping / 5, LEAST_DAMPING)
    return min(damping * 3, MOST_DAMPING) if ratio < POOR else damping
