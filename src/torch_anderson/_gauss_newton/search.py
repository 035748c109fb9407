"""Search along a curve of weights: how far to jump, judged by all samples, fitted or not.

Residuals at two lengths and at the start give a parabola for each residual, so that the loss is a quartic in the length.
Its minimum is tried too if it is far from both.
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
"""The minimum of the quartic is not tried within this factor of a length that was."""
MOST = 6
"""Lengths that are tried while the loss does not fall."""
GRID = 2.0 ** torch.linspace(-3, 2, 101, dtype=torch.float64)


@dataclass
class Trial:
    """Residuals at one length, and their loss."""

    length: float
    loss: float
    values: Values
    vector: Tensor = field(repr=False)
    """All residuals, scaled such that their squares add up to the loss of this rank."""


@dataclass
class Found:
    """The best length that was tried."""

    best: Trial
    wanted: float
    """The minimum of the quartic."""
    tried: int


@dataclass
class Path:
    """The loss along a curve of weights that begins at length 0."""

    evaluate: Callable[[float], Values]
    vector: Callable[[Values], Tensor]
    mean: Callable[[Tensor], Tensor]
    """Means over ranks."""
    start: Trial
    tried: list[Trial] = field(default_factory=list)

    def at(self, length: float) -> Trial:
        """Evaluate the residuals at one length."""
        values = self.evaluate(length)
        vector = self.vector(values)
        loss = float(self.mean(vector @ vector))
        self.tried.append(Trial(length, inf if isnan(loss) else loss, values, vector))
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
        start = self.start.vector
        first, second = ((trial.vector - start) / trial.length for trial in (one, other))
        bend = (second - first) / (other.length - one.length)
        slope = first - one.length * bend
        lengths = (GRID * one.length).clamp(SHORTEST, LONGEST)
        powers = [start @ slope * 2, slope @ slope + 2 * start @ bend, 2 * slope @ bend, bend @ bend]
        factors = self.mean(torch.stack(powers)).double().cpu()
        expected = sum(factor * lengths**power for power, factor in enumerate(factors, 1))
        return float(lengths[torch.nan_to_num(expected, torch.inf, torch.inf).argmin()])  # type: ignore[arg-type]


def search(path: Path, length: float, longer: bool) -> Found:
    """Try the last length, one beside it, the minimum of the quartic, and what follows from them."""
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
