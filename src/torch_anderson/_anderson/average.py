"""The adaptive moving average: a window of raw points after each step, and the test whether they are noisy.

The window holds points, never averages of them: averages of averages would slow the drift of the weights by another
factor of the window's length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._options import integer, real
from .._tensors.blocks import Space, Vector
from .pairs import LAUNCHES, chunks, full_precision
from .residuals import largest

CHUNK = 1 << 15
"""Columns averaged at once: few enough to stay in a cache."""


@dataclass(frozen=True)
class MovingAverage:
    """The paper's adaptive moving average, an option of ``Anderson``.

    Args:
        window: t, number of points.
        tolerance: epsilon; the average is taken while the window's largest standard deviation is above epsilon times
            the largest entry of r.

    >>> MovingAverage(window=0)
    Traceback (most recent call last):
    ValueError: Invalid window: 0. Allowed: an integer of at least 1.
    """

    window: int
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", integer("window", self.window, 1))
        tolerance = real("tolerance", self.tolerance, lambda x: x >= 0, "a number of at least 0")
        object.__setattr__(self, "tolerance", tolerance)


class Window:
    """The last points of all blocks, in a ring."""

    def __init__(self, settings: MovingAverage, space: Space):
        self.settings = settings
        self.length = settings.window
        self.space = space
        self.points = space.rows(self.length)
        self._shares = [points.new_full((self.length,), 1 / self.length) for points in self.points]
        """Weights of the mean, for each block."""
        self.count = 0
        """Points since the window was last cleared."""
        self.stale = 0
        """Points to add until the window holds none from before other code wrote to the weights."""

    @property
    def newest(self) -> Vector:
        """The newest point."""
        return [points[(self.count - 1) % self.length] for points in self.points]

    def push(self, point: Vector | None, restart: bool = False) -> None:
        """Add a point (the present weights if None), in place of the oldest; ``restart``: as the only one."""
        self.stale = max(self.stale - 1, 0)
        self.count = 1 if restart else self.count + 1
        if point is None:
            self.space.read(self.newest)
        else:
            self.replace_newest(point)

    def replace_newest(self, point: Vector) -> None:
        """Replace the newest point."""
        for row, part in zip(self.newest, point, strict=True):
            row.copy_(part)

    def clear(self) -> None:
        """Empty the window."""
        self.count = self.stale = 0

    def average(self, residual_max: Tensor, out: Vector) -> Tensor | None:
        """Put the mean into ``out`` if the points are noisy, else the newest one; returns whether they are.

        None if the window is not full yet. The choice is made on the device, so that no step waits for it.
        """
        if self.count < self.length:
            return None
        with full_precision(residual_max.device):
            noise = largest([self._mean(*parts) for parts in zip(self.points, self._shares, out, strict=True)])
        if self.space.ranks.size > 1:
            noise = torch.full_like(noise, torch.nan) if self.stale else noise  # then no rank averages
            noise, residual_max = self.space.ranks.largest(torch.stack([noise, residual_max.to(noise)]))
        noisy = noise > self.settings.tolerance * residual_max.to(noise.device)
        for part, newest in zip(out, self.newest, strict=True):
            torch.where(noisy.to(part.device), part, newest, out=part)
        return noisy

    def _mean(self, points: Tensor, shares: Tensor, out: Tensor) -> Tensor:
        """Put the mean of the points into ``out``; returns the largest standard deviation of an entry.

        Points are shifted by one of them first: raw weights in float32 would lose all digits to cancellation. A few
        passes over a chunk take less time than a product with a projection, and about a tenth of ``torch.var_mean``'s.
        """
        variances = []
        for a, b in chunks(0, out.numel(), CHUNK if out.device.type == "cpu" else CHUNK * LAUNCHES):
            newest = points[(self.count - 1) % self.length, a:b]
            deviations = points[:, a:b] - newest
            mean = torch.mv(deviations.t(), shares)
            torch.add(mean, newest, out=out[a:b])
            deviations.sub_(mean)
            variances.append(torch.mv(deviations.square_().t(), shares).amax() if b > a else mean.new_zeros(()))
        return largest(variances).sqrt_()
