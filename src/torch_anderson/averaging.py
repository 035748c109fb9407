"""The adaptive moving average: a window of raw post-step iterates, and the test whether they are noisy.

The window holds iterates, never averages of them: averages of averages would slow the drift of the weights
by another factor of the window's length.
"""

import torch
from torch import Tensor

from .history import ReadMap, chunks


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

    def __init__(self, length: int, n: int, *, device: torch.device, dtype: torch.dtype):
        self.length = length
        self.points = torch.zeros(length, n, device=device, dtype=dtype)
        self.count = 0

    @property
    def full(self) -> bool:
        """Whether the window holds as many points as it can."""
        return self.count >= self.length

    def push(self, read: ReadMap) -> None:
        """Add a point, dropping the oldest when full."""
        row = self.points[self.count % self.length]
        for start, stop in chunks(row.numel(), row.device):
            row[start:stop].copy_(read(start, stop))
        self.count += 1

    @property
    def newest(self) -> Tensor:
        """The point pushed last."""
        return self.points[(self.count - 1) % self.length]

    def clear(self) -> None:
        """Start anew."""
        self.count = 0

    def chronological(self, projection: Tensor) -> Tensor:
        """The projection's columns in the ring's order."""
        return projection.roll(self.count % self.length, dims=1)

    def noise(self, projection: Tensor) -> Tensor:
        """The largest standard deviation of an entry (a tensor without dimensions, on the device).

        Points are shifted by one of them first: raw weights in float32 would be all cancellation.
        """
        projection = self.chronological(projection).to(self.points)
        largest = self.points.new_zeros(())
        for start, stop in chunks(self.points.shape[1], self.points.device):
            points = self.points[:, start:stop]
            deviations = projection @ (points - points[0])
            largest = torch.maximum(largest, deviations.square_().sum(0).amax())
        return largest.sqrt()

    def mean(self, start: int, stop: int) -> Tensor:
        """The average of the points, for a range of columns."""
        points = self.points[:, start:stop]
        return (points - points[0]).mean(0).add_(points[0])
