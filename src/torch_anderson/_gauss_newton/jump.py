"""One jump: measure the residuals and their Jacobian, fit a curve of weights, and search along it.

Notation, with the names in the code:

    w                                       ``weights``, one flat vector in float64
    r, J                                    ``rhs``, ``rows``: the loss of the fitted samples is |r + J dw|^2 nearby, up
                                            to a constant
    S v  = J'(J J' + damping)^-1 v          ``Normal.solve``; the damping is lambda in the docs
    d    = mu d + S (r - mu J d)            ``jump``, with momentum (Goldshlager et al. 2024)
    b    = S r2                             ``second_order``, with r2 the second derivative of r along d: geodesic
                                            acceleration (Transtrum and Sethna 2012)
    c    = S (3 r2(d, b) - r3)              ``third_order``, the next order of the same curve
    w(a) = w - a d - a^2/2 b - a^3/6 c      ``Curve``, with a the ``length``

On this curve the residuals fall in proportion to a, to third order. How far to jump is judged by all samples, fitted or
not: outputs at two lengths and at the start give a parabola for each output, and with it the loss as a function of the
length, a quartic for squares. Its minimum is tried too if it is far from both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isnan, nan

import torch
from torch import Tensor

from .jacobian import Memory, Normal, Rows
from .losses import Batch, Outputs
from .objective import Unusable
from .residuals import Residuals, agreeing

MOMENTUM = 0.5
"""mu, the part of the last jump that goes on."""
PROBE = 0.2
"""Distance of the evaluations that determine b and c, as a part of the length of the last jump."""
MOST_SECOND_ORDER, MOST_THIRD_ORDER = 0.75, 0.5
"""Limits of a^2/2 |b| and a^3/6 |c|, as parts of a |d|, at the length a of the last jump: b and c are shortened."""
SHORTEST, LONGEST = 1 / 256, 1.0
"""Limits of the length a; at 1 the linear model is at its minimum."""
CLOSE_LENGTHS = 1.6
"""The expected minimum is not tried within this factor of the best length so far."""
GRID = 2.0 ** torch.linspace(-3, 2, 101, dtype=torch.float64, device="cpu")
"""Lengths, in multiples of the last one, among which the minimum is expected."""


# ------------------------------------------------------------------------------------------------------- measure


@dataclass
class Linearization:
    """The outputs of a batch at the present weights, to first order, and their loss to second order."""

    residuals: Residuals
    batch: Batch
    weights: Tensor
    outputs: Outputs
    """Outputs of all samples."""
    fitted_outputs: Outputs
    rows: Rows
    """J, of the fitted samples."""
    rhs: Tensor
    """r, of the fitted samples."""
    loss_roots: dict[str, Tensor]
    """Weights of outputs in r, by term."""
    loss: float
    """The loss over all samples. This and the following numbers are means over ranks."""
    fitted_loss: float
    unseen_loss: float
    """The loss over samples that are not fitted; 0 if there are none."""
    square: float
    """|r|^2."""
    trace: float
    """The sum of squared lengths of rows."""
    unseen: float
    """Number of samples that are not fitted."""

    def __post_init__(self) -> None:
        self.all_fitted = not self.unseen
        """Whether there are no other samples, which would show that a jump fits its samples alone."""
        self.ranks = self.residuals.ranks


def measure(residuals: Residuals, batch: Batch, weights: Tensor, memory: Memory) -> Linearization:
    """Evaluate the outputs of all samples, and J of fitted ones."""
    with agreeing(residuals.ranks):
        outputs = residuals.outputs(weights, batch.samples)
        fitted_outputs = {name: z[: batch.fitted[name]] for name, z in outputs.items()}
        rhs, loss_roots = batch.expand(fitted_outputs)
        if not all(x.isfinite().all() for x in (rhs, *outputs.values())):
            raise Unusable("nonfinite_outputs", "residuals are not finite")
        losses = batch.loss(outputs)
        if not losses.isfinite().all():
            raise Unusable("nonfinite_outputs", "the loss of some sample is not finite")
        rows = Rows.empty(residuals.layout, len(rhs), weights.device, memory)
        residuals.rows(weights, batch.fitted_samples, loss_roots, rows)
    squares = torch.stack([rhs @ rhs, rows.squares()]).double().cpu()
    unseen = torch.tensor([float(batch.count - batch.fitted_count)], dtype=torch.float64, device="cpu")
    numbers = residuals.ranks.mean(torch.cat([losses, squares, unseen])).tolist()
    return Linearization(residuals, batch, weights, outputs, fitted_outputs, rows, rhs, loss_roots, *numbers)


# ----------------------------------------------------------------------------------------------------------- fit


@dataclass
class Curve:
    """The curve w(a) along which to jump: to third order, residuals on it fall in proportion to the length."""

    jump: Tensor
    second_order: Tensor
    third_order: Tensor
    promised: float
    """The loss of fitted samples that the linear model promises at length 1."""

    def displacement(self, a: float) -> Tensor:
        """w - w(a)."""
        return a * self.jump + a**2 / 2 * self.second_order + a**3 / 6 * self.third_order


def fit(model: Linearization, before: Tensor, damping: float, length: float, memory: Memory) -> Curve:
    """The jump d with the momentum of the one ``before``; b and c from three more evaluations of the fitted samples.

    Where all samples are fitted, c is 0, and b comes from one evaluation.

    The terms of second and third order in r(w - h d - h^2/2 b - h^3/6 c) vanish if J b = r2 and J c = 3 r2(d, b) - r3.
    Differences give

        ahead  = r(w - h d) - r + h J d                       = h^2/2 r2 - h^3/6 r3,
        behind = r(w + h d) - r - h J d                       = h^2/2 r2 + h^3/6 r3,
        bent   = r(w - h d - h^2/2 b) - r + h J d + h^2/2 J b = ahead + h^3/2 r2(d, b),

    each up to terms of fourth order.
    """
    rows, normal = model.rows, Normal(model.rows, damping, model.ranks, memory)
    d = MOMENTUM * before + normal.solve(model.rhs - MOMENTUM * (rows @ before))
    slope, h, size = rows @ d, PROBE * length, float(d.norm())

    def change(step: Tensor) -> Tensor:
        """The change of r, L' dz, in the order of the rows."""
        there = model.residuals.outputs(model.weights - step, model.batch.fitted_samples)
        here, roots = model.fitted_outputs, model.loss_roots
        parts = [torch.einsum("jkp,kp->kj", roots[name], there[name] - here[name]) for name in roots]
        return torch.cat([part.reshape(-1) for part in parts])

    ahead, c = change(h * d) + h * slope, torch.zeros_like(d)
    most_b = MOST_SECOND_ORDER * size / (length / 2)
    if model.all_fitted:  # longer jumps would fit these samples alone too early
        b = _shortened(normal.solve(2 / h**2 * ahead), most_b)
    else:
        behind = change(-h * d) - h * slope
        b = _shortened(normal.solve((ahead + behind) / h**2), most_b)
        bent = change(h * d + h**2 / 2 * b) + h * slope + h**2 / 2 * (rows @ b)
        third = 6 / h**3 * (bent - ahead) - 3 / h**3 * (behind - ahead)
        c = _shortened(normal.solve(third), MOST_THIRD_ORDER * size / (length**2 / 6))
    left = model.rhs - slope
    promised = model.fitted_loss - model.square + float(model.ranks.mean(left @ left))
    return Curve(d, b, c, promised)


def _shortened(vector: Tensor, longest: float) -> Tensor:
    """The vector with at most this length; 0 if it is not finite."""
    size = float(vector.norm())
    if size <= longest:
        return vector
    return vector * (longest / size) if size < inf else torch.zeros_like(vector)


# -------------------------------------------------------------------------------------------------------- search


@dataclass
class Trial:
    """The weights at one length, their outputs and loss: over all samples, fitted ones and the others."""

    length: float
    weights: Tensor
    loss: float
    fitted_loss: float
    unseen_loss: float
    outputs: Outputs = field(repr=False)


class Search:
    """The lengths that were tried on a curve, and the loss of all samples there."""

    def __init__(self, model: Linearization, curve: Curve):
        self.model, self.curve = model, curve
        self.trials: list[Trial] = []
        self.best: Trial
        """The trial with the lowest loss so far."""
        self.falls = False
        """Whether the loss falls at some length."""
        self.expected = 0.0
        """The length at which the least loss was expected."""

    def run(self, length: float, longer: bool) -> None:
        """Try the last length, twice or half of it, the expected minimum, and what follows from them."""
        first = self.try_length(length)
        second = self.try_length(2 * length if longer and length <= LONGEST / 2 else length / 2)
        self.expected = self.minimum(first, second)
        better = self.best.length
        if not self.falls:
            self.expected = max(min(self.expected, length / 4), SHORTEST)
        elif better / CLOSE_LENGTHS <= self.expected <= better * CLOSE_LENGTHS:
            return
        last = self.try_length(self.expected)
        while not self.falls and last.length > SHORTEST:
            last = self.try_length(max(last.length / 4, SHORTEST))
        while last is self.best and self.falls and 1.9 * better <= last.length < LONGEST:  # about twice as long
            last = self.try_length(min(2 * last.length, LONGEST))

    def try_length(self, length: float) -> Trial:
        """Evaluate the outputs at one length."""
        model = self.model
        weights = model.weights - self.curve.displacement(length)
        outputs = model.residuals.outputs(weights, model.batch.samples)
        loss, fitted_loss, unseen_loss = model.ranks.mean(model.batch.loss(outputs)).tolist()
        trial = Trial(length, weights, inf if isnan(loss) else loss, fitted_loss, unseen_loss, outputs)
        if not self.trials or trial.loss < self.best.loss:
            self.best, self.falls = trial, trial.loss < model.loss
        self.trials.append(trial)
        return trial

    def minimum(self, one: Trial, other: Trial) -> float:
        """The length with the least loss by the parabolas through the start and two trials."""
        model, slopes, curvatures = self.model, {}, {}
        for name, start in model.outputs.items():
            first, second = ((trial.outputs[name] - start) / trial.length for trial in (one, other))
            curvatures[name] = (second - first) / (other.length - one.length)
            slopes[name] = first - one.length * curvatures[name]
        lengths = (GRID * one.length).clamp(SHORTEST, LONGEST)
        try:
            losses = model.batch.along(model.outputs, slopes, curvatures, lengths)
        except (RuntimeError, ValueError):  # a loss may refuse outputs that no weights give, as BCELoss beyond 0 and 1
            losses = torch.full_like(lengths, nan)
        losses = torch.nan_to_num(model.ranks.mean(losses), inf, inf)
        return float(lengths[losses.argmin()]) if losses.min() < inf else self.best.length
