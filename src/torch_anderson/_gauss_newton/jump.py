"""One jump: measure residuals and rows, fit a curve of weights, and search along it.

How far to jump is judged by all samples, fitted or not. Outputs at two lengths and at the start give a parabola for
each output, and with it the loss as a function of the length, a quartic for squares. Its minimum is tried too if it is
far from both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isnan, nan

import torch
from torch import Tensor

from .._ranks.ranks import Ranks
from .batch import Batch, Values, weighted_change
from .residuals import Residuals
from .rows import Memory, Normal, Rows
from .term import Samples
from .unusable import Unusable, agreeing

MOMENTUM = 0.5
"""mu."""
PROBE = 0.2
"""h, as a part of the length of the last jump."""
MOST_BEND, MOST_TWIST = 0.75, 0.5
"""Bend and twist are shortened such that each changes the jump by at most this part of its length."""
SHORTEST, LONGEST = 1 / 256, 1.0
"""Lengths of jumps; at 1 the linear model is at its minimum."""
NEAR = 1.6
"""The expected minimum is not tried within this factor of a length that was."""
MOST = 6
"""Lengths that are tried while the loss does not fall."""
GRID = 2.0 ** torch.linspace(-3, 2, 101, dtype=torch.float64, device="cpu")


@dataclass
class Model:
    """The outputs of a batch to first order around the present weights, and the loss to second order."""

    residuals: Residuals
    batch: Batch
    ranks: Ranks
    weights: Tensor
    values: Values
    """Outputs of all samples."""
    seen: Values
    """Those of fitted samples."""
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
    trace: float
    """The sum of squared lengths of rows over all ranks, as |r|^2."""
    others: float
    """Number of samples that are not fitted, as a mean over ranks."""

    @property
    def all_fitted(self) -> bool:
        """Whether there are no other samples, which would show that a jump fits its samples alone."""
        return not self.others

    @property
    def probes(self) -> int:
        """Evaluations of the fitted samples from which the curve of a jump follows."""
        return 1 if self.all_fitted else 3

    @property
    def scale(self) -> float:
        """What damping is relative to: the loss of fitted samples, and not |r|^2 where that is larger.

        Where a loss is steep but hardly curved, as at outliers, r is long.
        """
        return min(self.square, abs(self.fitted))

    def at(self, weights: Tensor, samples: dict[str, Samples]) -> Values:
        """The outputs of some samples at other weights; raises on all ranks, or on none."""
        if self.ranks.size == 1:  # nobody to agree with
            return self.residuals.values(weights, samples)
        with agreeing(self.ranks):
            return self.residuals.values(weights, samples)


@dataclass
class Move:
    """The curve of weights along which to jump: to third order, residuals on it fall in proportion to the length."""

    jump: Tensor
    bend: Tensor
    twist: Tensor
    promised: float
    """The loss of fitted samples that the linear model promises at length 1."""

    def to(self, length: float) -> Tensor:
        """How far the weights have moved, with the opposite sign."""
        return length * self.jump + length**2 / 2 * self.bend + length**3 / 6 * self.twist


def measure(residuals: Residuals, batch: Batch, ranks: Ranks, weights: Tensor, rows: Rows) -> Model:
    """Evaluate the outputs of all samples, and rows of fitted ones."""
    with agreeing(ranks):
        values = residuals.values(weights, batch.samples)
        seen = batch.seen(values)
        right, sums = batch.expand(seen)
        if not all(x.isfinite().all() for x in (right, *values.values())):
            raise Unusable("nonfinite_outputs", "residuals are not finite")
        losses = batch.losses(values)
        if not losses.isfinite().all():
            raise Unusable("nonfinite_outputs", "the loss of some sample is not finite")
        residuals.rows(weights, batch.first, sums, rows)
    squares = torch.stack([right @ right, rows.squares()]).double().cpu()
    others = torch.tensor([float(batch.others)], dtype=torch.float64, device="cpu")
    found = ranks.mean(torch.cat([losses, squares, others])).tolist()
    return Model(residuals, batch, ranks, weights, values, seen, rows, right, sums, *found)


def fit(model: Model, before: Tensor, damping: float, length: float, memory: Memory) -> Move:
    """The jump with momentum; its bend and twist from three more evaluations of the fitted samples.

    Where all samples are fitted, there is no twist, and the bend comes from one evaluation.

    With d, b, c for jump, bend and twist, and derivatives r2, r3 of the residuals along d, the terms of second and
    third order in r(w - h d - h^2/2 b - h^3/6 c) vanish if J b = r2 and J c = 3 r2(d, b) - r3. Differences give

        ahead  = r(w - h d) - r + h J d               = h^2/2 r2 - h^3/6 r3,
        behind = r(w + h d) - r - h J d               = h^2/2 r2 + h^3/6 r3,
        bent   = r(w - h d - h^2/2 b) - r + h J d + h^2/2 J b = ahead + h^3/2 r2(d, b),

    each up to terms of fourth order.
    """
    normal = Normal(model.rows, damping, model.ranks, memory)
    jump = MOMENTUM * before + normal.solve(model.right - MOMENTUM * (model.rows @ before))
    slope, h, size = model.rows @ jump, PROBE * length, float(jump.norm())

    def change(step: Tensor) -> Tensor:
        there = model.at(model.weights - step, model.batch.first)
        return weighted_change(model.sums, model.seen, there)

    ahead, twist = change(h * jump) + h * slope, torch.zeros_like(jump)
    most_bend = MOST_BEND * size / (length / 2)
    if model.all_fitted:  # longer jumps would fit these samples alone too early
        bend = _at_most(normal.solve(2 / h**2 * ahead), most_bend)
    else:
        behind = change(-h * jump) - h * slope
        bend = _at_most(normal.solve((ahead + behind) / h**2), most_bend)
        bent = change(h * jump + h**2 / 2 * bend) + h * slope + h**2 / 2 * (model.rows @ bend)
        third = 6 / h**3 * (bent - ahead) - 3 / h**3 * (behind - ahead)
        twist = _at_most(normal.solve(third), MOST_TWIST * size / (length**2 / 6))
    left = model.right - slope
    promised = model.fitted - model.square + float(model.ranks.mean(left @ left))
    return Move(jump, bend, twist, promised)


def _at_most(vector: Tensor, longest: float) -> Tensor:
    """The vector, shortened if it is longer than this; 0 if it is not finite."""
    size = float(vector.norm())
    if size <= longest:
        return vector
    return vector * (longest / size) if size < inf else torch.zeros_like(vector)


# ------------------------------------------------------------------------------------------------------ how far


@dataclass
class Trial:
    """Outputs at one length, and their loss: over all samples, fitted ones and the others, as in ``Model``."""

    length: float
    weights: Tensor
    loss: float
    fitted: float
    unseen: float
    values: Values = field(repr=False)


@dataclass
class Found:
    """The best length that was tried."""

    best: Trial
    wanted: float
    """The expected minimum."""
    tried: int


@dataclass
class Path:
    """The loss of all samples along a curve of weights, as far as it is known."""

    model: Model
    move: Move
    tried: list[Trial] = field(default_factory=list)

    def at(self, length: float) -> Trial:
        """Evaluate the outputs at one length."""
        model = self.model
        weights = model.weights - self.move.to(length)
        values = model.at(weights, model.batch.samples)
        loss, fitted, unseen = model.ranks.mean(model.batch.losses(values)).tolist()
        self.tried.append(Trial(length, weights, inf if isnan(loss) else loss, fitted, unseen, values))
        return self.tried[-1]

    @property
    def best(self) -> Trial:
        """The lowest loss so far."""
        return min(self.tried, key=lambda trial: trial.loss)

    @property
    def falls(self) -> bool:
        """Whether the loss falls at some length."""
        return self.best.loss < self.model.loss

    def minimum(self, one: Trial, other: Trial) -> float:
        """The length with the least loss by the parabolas through the start and two trials."""
        slopes, bends = {}, {}
        for name, start in self.model.values.items():
            first, second = ((trial.values[name] - start) / trial.length for trial in (one, other))
            bends[name] = (second - first) / (other.length - one.length)
            slopes[name] = first - one.length * bends[name]
        lengths = (GRID * one.length).clamp(SHORTEST, LONGEST)
        try:
            expected = self.model.batch.along(self.model.values, slopes, bends, lengths)
        except (RuntimeError, ValueError):  # a loss may refuse outputs that no weights give, as BCELoss beyond 0 and 1
            expected = torch.full_like(lengths, nan)
        expected = torch.nan_to_num(self.model.ranks.mean(expected), inf, inf)
        return float(lengths[expected.argmin()]) if expected.min() < inf else self.best.length


def search(model: Model, move: Move, length: float, longer: bool) -> Found:
    """Try the last length, twice or half of it, the expected minimum, and what follows from them."""
    path = Path(model, move)
    one = path.at(length)
    other = path.at(2 * length if longer and length <= LONGEST / 2 else length / 2)
    wanted = path.minimum(one, other)
    better = path.best.length
    if not path.falls:
        wanted = max(min(wanted, length / 4), SHORTEST)
    if not path.falls or not better / NEAR <= wanted <= better * NEAR:
        path.at(wanted)
        shorten(path)
        lengthen(path, better)
    return Found(path.best, wanted, len(path.tried))


def shorten(path: Path) -> None:
    """Try a quarter of the length while the loss does not fall."""
    while not path.falls and path.tried[-1].length > SHORTEST and len(path.tried) < MOST:
        path.at(max(path.tried[-1].length / 4, SHORTEST))


def lengthen(path: Path, before: float) -> None:
    """Try twice the length while it is the best so far, if it is beyond those that were tried before."""
    last = path.tried[-1]
    while last.length >= 1.9 * before and last is path.best and last.length < LONGEST and path.falls:
        last = path.at(min(2 * last.length, LONGEST))
