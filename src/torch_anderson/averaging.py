"""The adaptive moving average: a window of raw post-step iterates, and the test whether they are noisy.

The window holds iterates, never averages of them: averages of averages would slow the drift of the weights
by another factor of the window's length.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .history import PRODUCT_CHUNK, chunks, columns


def noise_projection(window: int, criterion: str) -> Tensor:
    """The matrix P for which ``P @ points`` is what the criterion calls noise, scaled so that the sum of its
    squares over the window is a variance.

    ``paper``: deviations from the mean (population variance). ``detrended``: deviations from a straight line
    (t - 2 degrees of freedom), so that noise-free drift does not count as noise.
    """
    identity = torch.eye(window, dtype=torch.float64)
    regressors = torch.ones(window, 1, dtype=torch.float64)
    freedom = window
    if criterion == "detrended":
        line = torch.arange(window, dtype=torch.float64).unsqueeze(-1)
        regressors = torch.cat([regressors, line], dim=1)
        freedom = window - 2
    q, _ = torch.linalg.qr(regressors)
    return (identity - q @ q.T) / freedom**0.5


class Window:
    """The last ``length`` iterates of ``n`` numbers, in a ring."""

    def __init__(self, length: int, n: int, criterion: str, *, device: torch.device, dtype: torch.dtype):
        self.length = length
        self.criterion = criterion
        self.points = torch.zeros(length, n, device=device, dtype=dtype)
        self.count = 0
        self._rows = self.points.unbind()

    @property
    def full(self) -> bool:
        """Whether the window holds as many points as it can."""
        return self.count >= self.length

    def new_row(self) -> Tensor:
        """Where to put the next point: in place of the oldest when full."""
        self.count += 1
        return self.newest

    @property
    def newest(self) -> Tensor:
        """The point put in last."""
        return self._rows[(self.count - 1) % self.length]

    def clear(self) -> None:
        """Start anew."""
        self.count = 0

    def average(self, out: Tensor) -> Tensor:
        """Put the mean of the points into ``out``. Returns the largest standard deviation of an entry (a tensor
        without dimensions, on the device).

        Points are shifted by one of them first: raw weights in float32 would be all cancellation. One product of
        small matrices gives the deviations and the mean, so that the points are read once.
        """
        projection = self._projections.narrow(1, -self.count % self.length, self.length)
        ones = projection.new_ones(self.length)
        variances = []
        for start, stop in chunks(out.numel(), out.device, PRODUCT_CHUNK):
            newest = columns(self.newest, start, stop)
            projected = projection @ (columns(self.points, start, stop) - newest)
            deviations, mean = projected.narrow(0, 0, self.length), projected.select(0, self.length)
            torch.add(mean, newest, out=columns(out, start, stop))
            variances.append(torch.mv(deviations.square_().t(), ones).amax())
        return largest(variances).sqrt()

    @cached_property
    def _projections(self) -> Tensor:
        """Rows of the noise and of the mean. Columns twice over, so that any rotation of the ring is a slice."""
        mean = torch.full((1, self.length), 1 / self.length, dtype=torch.float64)
        rows = torch.cat([noise_projection(self.length, self.criterion), mean])
        return torch.cat([rows, rows], dim=1).to(self.points)


def largest(numbers: Sequence[Tensor]) -> Tensor:
    """The largest of numbers without dimensions, on the device of the first."""
    if len(numbers) == 1:
        return numbers[0]
    return torch.stack([number.to(numbers[0]) for number in numbers]).amax()
