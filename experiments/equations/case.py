"""What a problem is, and what problems are built of: networks, samplers, derivatives."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import grad, jvp

from torch_anderson import Term

from ..networks import perceptron

Network = Callable[[Tensor], Tensor]
"""The model as a function of one point."""
Sampler = Callable[[int], Tensor]


@dataclass(frozen=True)
class Case:
    """A problem with one seed, ready to be trained."""

    model: nn.Module
    terms: dict[str, Term]
    points: Tensor
    """Where the error is taken."""
    expected: Tensor
    centred: bool = False
    """Whether the error is relative to the deviation of the expected values from their mean, not to their size."""

    @cached_property
    def size(self) -> float:
        """The norm that the error is relative to."""
        return float((self.expected - self.expected.mean(0) if self.centred else self.expected).norm())

    @torch.no_grad()
    def difference(self) -> Tensor:
        """The model minus what is expected at the test points."""
        points = self.points.to(next(self.model.parameters()).dtype)
        return self.model(points).reshape(self.expected.shape).to(self.expected.dtype) - self.expected

    def error(self) -> float:
        """The relative error in the L2 norm; for surrogates the RMSE in standard deviations of the targets."""
        return float(self.difference().norm()) / self.size


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something to solve."""

    name: str
    title: str
    group: str
    """Problems of one group share a figure."""
    build: Callable[..., Case]
    """Draws the first weights, and points where they are fixed, from torch's random numbers."""
    drawn: bool = True
    """Whether points are drawn at will."""
    needs: tuple[str, ...] = ()
    """Packages that must be importable."""
    picture: tuple[int, int] | None = None
    """Shape of the test grid, if errors are kept for pictures."""
    crashes: bool = False
    """Whether torch 2.13 ends with a segmentation fault when ``make_fx`` traces the gradient of the loss."""

    @property
    def data(self) -> bool:
        """Whether it is a regression on given data."""
        return self.group == "surrogates"

    @property
    def traceable(self) -> bool:
        """Whether the loss and its gradient can be traced for other optimizers."""
        return not self.data and not self.crashes


# Building blocks


def network(inputs: int, width: int, depth: int, outputs: int = 1, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A tanh network with normal Xavier weights and zero biases."""
    return perceptron(inputs, *[width] * depth, outputs, activation=nn.Tanh, dtype=dtype, xavier=True)


def box(*sides: tuple[float, float], dtype: torch.dtype = torch.float64) -> Sampler:
    """A sampler of points in a box."""
    low, high = torch.tensor(sides, dtype=dtype).T
    return lambda count: low + (high - low) * torch.rand(count, len(sides), dtype=dtype)


def faces(*sides: tuple[float, float], dtype: torch.dtype = torch.float64) -> Sampler:
    """A sampler of points on the faces of a box."""
    inside, ends = box(*sides, dtype=dtype), torch.tensor(sides, dtype=dtype)

    def sample(count: int) -> Tensor:
        axis = torch.randint(len(sides), (count,))
        values = ends[axis, torch.randint(2, (count,))]
        return inside(count).scatter(1, axis[:, None], values[:, None])

    return sample


def grid(*axes: tuple[float, float, int]) -> Tensor:
    """Points of a regular grid, the last coordinate fastest."""
    return torch.cartesian_prod(*(torch.linspace(*axis, dtype=torch.float64) for axis in axes))


def scattered(dimensions: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """10,000 test points in a cube, the same for every seed."""
    random = torch.Generator().manual_seed(5)
    return low + (high - low) * torch.rand(10_000, dimensions, generator=random, dtype=torch.float64)


def direction(point: Tensor, axis: int) -> Tensor:
    """The unit vector along an axis."""
    return torch.eye(len(point), dtype=point.dtype)[axis]


def bent(u: Network, point: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient by (t, x), and its derivative by x."""
    slope, bend = jvp(grad(u), (point,), (direction(point, 1),))[:2]
    return slope, bend


def laplacian(u: Network, point: Tensor) -> Tensor:
    """The sum of second derivatives."""
    axes = torch.eye(len(point), dtype=point.dtype)
    return torch.stack([jvp(grad(u), (point,), (axis,))[1] @ axis for axis in axes]).sum()


def known(u: Network, point: Tensor, value: Tensor) -> Tensor:
    """The residual where the solution is given."""
    return u(point) - value


def zero(u: Network, point: Tensor) -> Tensor:
    """The residual where the solution is zero."""
    return u(point)
