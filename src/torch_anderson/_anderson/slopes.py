"""The test of a jump by the next gradient, which both kinds of residuals share: slopes along the way there."""

from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._tensors.blocks import Space, Vector
from .history import History
from .residual import GradientResidual, Reading, unusable_gradients

FLATTER, STEEPER = 0.3, 4.0
"""A jump passes if the slope at its end is at most this part of the descent at its start, and the gradient at most so
many times as long."""
LOADED = 2.0
"""Displacement of the weights, in units of the jump and the path through all stored points, above which other code has
loaded other weights."""


def passes(slope: float, descent: float, norm: float, norm_before: float) -> bool:
    """Whether a displacement D lowers the loss, by the gradients at its ends: slope g'D there, descent -g D here."""
    return slope <= FLATTER * descent and norm <= STEEPER * norm_before


class Slopes:
    """The gradients at both ends of a displacement of the weights, for steps: nothing else needs them there."""

    def __init__(self, base: Optimizer, space: Space, history: History):
        self._base = base
        self._space = space
        self._history = history
        self._residual = GradientResidual(base, space, scaled=False)
        self.before, self.now = history.vector(), history.vector()
        """The last gradient that the base has seen before a jump, and the newest."""

    @property
    def usable(self) -> bool:
        """Whether gradients show where the base's minimum is."""
        return unusable_gradients(self._base) is None

    def read(self, point: Vector) -> Reading:
        """Read the present weights and gradient."""
        return self._residual.read(point, self.now)

    def keep(self) -> None:
        """Keep the newest gradient: the weights may jump after the base's step from here."""
        self.before, self.now = self.now, self.before

    def judge(self, present: Vector, known: float) -> str:
        """The test of a jump; empty if it passes, ``"outside_write"`` if other weights were loaded.

        ``known``: length of the jump and the path through all stored points.

        D is the displacement from the weights of the gradient g before to the present ones. Besides ``passes``, the
        jump has to lower the loss by what half a plain step r would, to first order: (g + g')D <= g r.
        """
        rate = self._history.rates[-1]
        moves = zip(self._displacements(present), self.before, self.now, self._history.rows, strict=True)
        products = [
            torch.stack([g_now @ d, g @ d, rate * (g @ rows.last_residual), g_now @ g_now, g @ g, d @ d])
            for d, g, g_now, rows in moves
        ]
        slope, start, plain, norm_sq, norm_sq_before, moved_sq = self._space.add_up(products).tolist()
        if sqrt(moved_sq) > LOADED * known:
            return "outside_write"
        gains = slope + start <= plain
        return "" if gains and passes(slope, -start, sqrt(norm_sq), sqrt(norm_sq_before)) else "gradient"

    def descends(self, candidate: Vector) -> bool:
        """Whether the gradient that was kept has a descent direction in the displacement to a candidate."""
        moves = zip(self._displacements(candidate), self.before, strict=True)
        return float(self._space.add_up([g @ d for d, g in moves])) < 0

    def _displacements(self, point: Vector) -> Iterator[Tensor]:
        """From the weights w of the gradient before to a point; w is the last stored point u minus its residual."""
        rate = self._history.rates[-1]
        for rows, x, u in zip(self._history.rows, point, self._history.last_point, strict=True):
            yield torch.sub(x, u).add_(rows.last_residual, alpha=rate)
