"""One jump: measure residuals and rows, fit a curve of weights, and the loss along it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._ranks.ranks import Ranks
from .._tensors.evaluate import Unusable, agreeing
from .batch import Batch, weighted
from .normal import Normal
from .residuals import Residuals, Values
from .rows import Memory, Rows
from .search import Path, Trial

MOMENTUM = 0.5
"""mu."""
PROBE = 0.2
"""h, as a part of the length of the last jump."""
MOST_BEND = 0.75
"""The bend is shortened such that it changes the jump by at most this part of its length."""


@dataclass
class Model:
    """The outputs of a batch to first order around the present weights, and the loss to second order."""

    residuals: Residuals
    batch: Batch
    ranks: Ranks
    weights: Tensor
    values: Values
    """Outputs of all samples."""
    rows: Rows
    """J: rows of the fitted samples."""
    right: Tensor
    """r, such that the loss of the fitted samples is |r + J dw|^2 nearby, up to a constant."""
    sums: Values
    """Weights of outputs in r."""
    loss: float
    """The loss over all samples."""
    fitted: float
    """The loss over fitted samples."""
    unseen: float
    """The loss over the other samples; 0 if there are none."""
    square: float
    """|r|^2 over all ranks."""


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
    residuals: Residuals, batch: Batch, ranks: Ranks, weights: Tensor, known: dict[str, Tensor | None], rows: Rows
) -> Model:
    """Evaluate outputs where they are not known, and rows of fitted samples."""
    with agreeing(ranks):
        values = _completed(residuals, batch, weights, known)
        right, sums = batch.expand(batch.seen(values))
        if not all(x.isfinite().all() for x in (right, *values.values())):
            raise Unusable("nonfinite_outputs", "residuals are not finite")
        residuals.rows(weights, batch.first(), sums, rows)
        losses = batch.losses(values)
    found = ranks.mean(torch.cat([losses, (right @ right).double().cpu()[None]])).tolist()
    return Model(residuals, batch, ranks, weights, values, rows, right, sums, *found)


def _completed(residuals: Residuals, batch: Batch, weights: Tensor, known: dict[str, Tensor | None]) -> Values:
    """The outputs of all samples: those that are known, and others, which are evaluated."""
    values, missing = {}, {}
    for name, samples in batch.samples.items():
        found, shape = known[name], (len(samples[0]), residuals.terms[name].size)
        values[name] = weights.new_full(shape, torch.nan) if found is None else found
        missing[name] = values[name].isnan().any(1).nonzero()[:, 0]
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
    with agreeing(model.ranks):
        there = model.residuals.values(model.weights - h * jump, model.batch.first())
    seen = model.batch.seen(model.values)
    change = weighted(model.sums, {name: there[name] - seen[name] for name in seen})
    bend = normal.solve(2 / h**2 * (change + h * slope))
    size, most = float(bend.norm()) * length / 2, MOST_BEND * float(jump.norm())
    if not size <= most:
        bend = bend * (most / size) if size < torch.inf else torch.zeros_like(bend)
    left = model.right - slope
    promised = model.fitted - model.square + float(model.ranks.mean(left @ left))
    return Move(jump, bend, normal.damping, promised)


def path(model: Model, move: Move) -> Path:
    """The loss of all samples along the move."""

    def evaluate(length: float) -> Values:
        with agreeing(model.ranks):
            return model.residuals.values(move.end(model.weights, length), model.batch.samples)

    def loss(values: Values) -> float:
        return float(model.ranks.mean(model.batch.losses(values)[:1]))

    def along(start: Values, slope: Values, bend: Values, lengths: Tensor) -> Tensor:
        return model.ranks.mean(model.batch.along(start, slope, bend, lengths))

    return Path(evaluate, loss, along, Trial(0.0, model.loss, model.values))
