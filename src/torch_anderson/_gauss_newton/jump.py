"""One jump: measure residuals and rows, fit a curve of weights, and the loss along it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._ranks.ranks import Ranks
from .batch import Batch
from .normal import Memory, Normal
from .outputs import Unusable, agreeing
from .residuals import Residuals, Values
from .search import Path, Trial

MOMENTUM = 0.5
"""mu."""
PROBE = 0.2
"""h, as a part of the length of the last jump."""
MOST_BEND = 0.75
"""The bend is shortened such that it changes the jump by at most this part of its length."""


@dataclass
class Model:
    """The residuals of a batch to first order around the present weights."""

    residuals: Residuals
    batch: Batch
    ranks: Ranks
    weights: Tensor
    values: Values
    """Residuals of all samples."""
    rows: Tensor
    """J: rows of the fitted samples."""
    right: Tensor
    """r: their residuals, scaled as the rows are."""
    loss: float
    """Of all samples."""
    losses: Tensor
    """Of fitted samples, and of the others."""


@dataclass
class Move:
    """The curve of weights along which to jump."""

    jump: Tensor
    bend: Tensor
    damping: float
    promised: float
    """The loss of fitted samples that the linear model promises at length 1."""

    def end(self, weights: Tensor, length: float) -> Tensor:
        """The weights at one length."""
        return weights - length * self.jump - length**2 / 2 * self.bend


def measure(
    residuals: Residuals, batch: Batch, ranks: Ranks, weights: Tensor, known: dict[str, Tensor | None], rows: Tensor
) -> Model:
    """Evaluate rows of fitted samples, and residuals where they are not known."""
    with agreeing(ranks):
        found = residuals.rows(weights, batch.first(), batch.weigh(), rows)
        values = _completed(residuals, batch, weights, known, found)
        vector, right = batch.vector(values), batch.vector(found)
        if not vector.isfinite().all():
            raise Unusable("nonfinite_outputs", "residuals are not finite")
    loss, *losses = ranks.mean(torch.cat([(vector @ vector).double().cpu()[None], batch.losses(values)]))
    return Model(residuals, batch, ranks, weights, values, rows, right, float(loss), torch.stack(losses))


def _completed(
    residuals: Residuals, batch: Batch, weights: Tensor, known: dict[str, Tensor | None], found: Values
) -> Values:
    """The residuals of all samples: of fitted ones, those that are known, and others, which are evaluated."""
    values = {}
    for name, samples in batch.samples.items():
        shape = len(samples[0]), found[name].shape[1]
        before = known[name]
        values[name] = found[name].new_full(shape, torch.nan) if before is None else before
        values[name][: len(found[name])] = found[name]
    missing = {name: value.isnan().any(1).nonzero()[:, 0] for name, value in values.items()}
    fresh = {name: tuple(x[i] for x in batch.samples[name]) for name, i in missing.items()}
    for name, value in residuals.values(weights, fresh).items():
        values[name][missing[name]] = value
    return values


def fit(model: Model, before: Tensor, damping: float, length: float, memory: Memory) -> Move:
    """The jump with momentum, and its bend from one more evaluation of the fitted samples."""
    normal = Normal(model.rows, damping, model.ranks, memory)
    jump = MOMENTUM * before + normal.solve(model.right - MOMENTUM * (model.rows @ before))
    slope = model.rows @ jump
    h = PROBE * length
    there = model.batch.vector(model.residuals.values(model.weights - h * jump, model.batch.first()))
    bend = normal.solve(2 / h**2 * (there - model.right + h * slope))
    size, most = float(bend.norm()) * length / 2, MOST_BEND * float(jump.norm())
    if not size <= most:
        bend = bend * (most / size) if size < torch.inf else torch.zeros_like(bend)
    left = model.right - slope
    return Move(jump, bend, normal.damping, float(model.ranks.mean(left @ left)))


def path(model: Model, move: Move) -> Path:
    """The loss of all samples along the move."""

    def evaluate(length: float) -> Values:
        with agreeing(model.ranks):
            return model.residuals.values(move.end(model.weights, length), model.batch.samples)

    start = Trial(0.0, model.loss, model.values, model.batch.vector(model.values))
    return Path(evaluate, model.batch.vector, model.ranks.mean, start)
