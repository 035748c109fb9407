"""The adaptive moving average: a window of raw post-step iterates, and the test whether they are noisy.

The window holds iterates, never averages of them: averages of averages would slow the drift of the weights
by another factor of the window's length.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .history import PRODUCT_CHUNK, chunks, columns


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

        Points are shifted by one of them first: raw weights in float32 would be all cancellation. A few passes over a
        chunk take less time than a product with a t x t projection, and about a tenth of ``torch.var_mean``'s.
        """
        mean_weights, line = self._weights
        variances = []
        for start, stop in chunks(out.numel(), out.device, PRODUCT_CHUNK):
            newest = columns(self.newest, start, stop)
            deviations = columns(self.points, start, stop) - newest
            mean = torch.mv(deviations.t(), mean_weights)
            torch.add(mean, newest, out=columns(out, start, stop))
            deviations.sub_(mean)
            if self.criterion == "detrended":
                order = line.roll(self.count)
                deviations.addr_(order, torch.mv(deviations.t(), order), alpha=-1)
            variances.append(
                torch.mv(deviations.square_().t(), mean_weights).amax() if stop > start else mean.new_zeros(())
            )
        return largest(variances).mul_(self.length / self.freedom).sqrt_()

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the noise: a population variance, or about a straight line."""
        return self.length - 2 if self.criterion == "detrended" else self.length

    @cached_property
    def _weights(self) -> tuple[Tensor, Tensor]:
        """Of the mean, and of the slope of a straight line through points in order, of length 1."""
        line = torch.arange(self.length, dtype=torch.float64) - (self.length - 1) / 2
        line /= torch.linalg.vector_norm(line)
        return torch.full_like(line, 1 / self.length).to(self.points), line.to(self.points)


def largest(numbers: Sequence[Tensor]) -> Tensor:
    """The largest of numbers without dimensions, on the device of the first."""
    if len(numbers) == 1:
        return numbers[0]
    return torch.stack([number.to(numbers[0]) for number in numbers]).amax()
