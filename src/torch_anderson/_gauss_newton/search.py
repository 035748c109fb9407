"""Search along a curve of weights: how far to jump, judged by all samples, fitted or not.

Outputs at two lengths and at the start give a parabola for each output, and with it the loss as a function of the
length, a quartic for squares. Its minimum is tried too if it is far from both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isnan

import torch
from torch import Tensor

from .residuals import Values

SHORTEST, LONGEST = 1 / 256, 1.0
"""Lengths of jumps; at 1 the linear model is at its minimum."""
NEAR = 1.6
"""The expected minimum is not tried within this factor of a length that was."""
MOST = 6
"""Lengths that are tried while the loss does not fall."""
GRID = 2.0 ** torch.linspace(-3, 2, 101, dtype=torch.float64)


@dataclass
class Trial:
    """Outputs at one length, and their loss."""

    length: float
    loss: float
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
    """The loss along a curve of weights that begins at length 0."""

    evaluate: Callable[[float], Values]
    loss: Callable[[Values], float]
    along: Callable[[Values, Values, Values, Tensor], Tensor]
    """The loss for outputs start + a slope + a^2 bend, at each length a."""
    start: Trial
    tried: list[Trial] = field(default_factory=list)

    def at(self, length: float) -> Trial:
        """Evaluate the outputs at one length."""
        values = self.evaluate(length)
        loss = self.loss(values)
        self.tried.append(Trial(length, inf if isnan(loss) else loss, values))
        return self.tried[-1]

    @property
    def best(self) -> Trial:
        """The lowest loss so far."""
        return min(self.tried, key=lambda trial: trial.loss)

    @property
    def falls(self) -> bool:
        """Whether the loss falls at some length."""
        return self.best.loss < self.start.loss

    def minimum(self, one: Trial, other: Trial) -> float:
        """The length with the least loss by the parabolas through the start and two trials."""
        slopes, bends = {}, {}
        for name, start in self.start.values.items():
            first, second = ((trial.values[name] - start) / trial.length for trial in (one, other))
            bends[name] = (second - first) / (other.length - one.length)
            slopes[name] = first - one.length * bends[name]
        lengths = (GRID * one.length).clamp(SHORTEST, LONGEST)
        expected = self.along(self.start.values, slopes, bends, lengths)
        return float(lengths[torch.nan_to_num(expected, torch.inf, torch.inf).argmin()])


def search(path: Path, length: float, longer: bool) -> Found:
    """Try the last length, twice or half of it, the expected minimum, and what follows from them."""
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
