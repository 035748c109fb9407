"""Burgers' equation with known solutions, and random points of its domain [-1, 1]^{d-1} x [0, 1].

Points have one row each, time last.
"""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..solutions import burgers, cole_hopf
from ..task import Metrics


def generator(*key: int) -> torch.Generator:
    """Random numbers that depend on the key alone; those of different keys are independent."""
    (state,) = np.random.SeedSequence(key).generate_state(1)
    return torch.Generator().manual_seed(int(state))


def uniform_points(count: int, dimensions: int, random: torch.Generator | None) -> Tensor:
    """Points anywhere in the domain."""
    points = torch.rand(count, dimensions, generator=random, dtype=torch.float64)
    points[:, :-1] = 2 * points[:, :-1] - 1
    return points


def boundary_points(count: int, dimensions: int, random: torch.Generator | None) -> Tensor:
    """Points where the solution is given: in turn at t = 0, and on a random face of space at any time."""
    points = uniform_points(count, dimensions, random)
    points[::2, -1] = 0
    faces = points[1::2]
    axis = torch.randint(dimensions - 1, (len(faces), 1), generator=random)
    side = 2 * torch.randint(2, (len(faces), 1), generator=random) - 1
    faces.scatter_(1, axis, side.double())
    return points


class SineWave:
    """One space dimension, from u(x, 0) = -sin(pi x), without forcing; errors are taken on a grid."""

    dimensions = 2
    zero_errors: ClassVar[Metrics] = {"relative_l2": 1.0}
    """The metrics of a network that is zero."""

    def __init__(self, viscosity: float, dtype: torch.dtype, grid: tuple[int, int] = (64, 40)):
        self.viscosity, self.dtype = viscosity, dtype
        self.x, self.t = np.linspace(-1, 1, grid[0]), np.linspace(0, 1, grid[1])
        self.points = torch.cartesian_prod(torch.from_numpy(self.x), torch.from_numpy(self.t)).to(dtype)
        self.solution = self.exact(self.points)

    def exact(self, points: Tensor) -> Tensor:
        """The solution at points (n, 2), after Cole and Hopf."""
        x, t = points.double().numpy().T
        return torch.from_numpy(cole_hopf(x, t, self.viscosity))

    def forcing(self, points: Tensor) -> Tensor:
        """Zero."""
        return points.new_zeros(len(points), dtype=torch.float64)

    def errors(self, network: nn.Module) -> Metrics:
        """The relative error on the grid."""
        error = network(self.points).double() - self.solution
        return {"relative_l2": float(error.norm() / self.solution.norm())}

    def pictures(self, network: nn.Module) -> dict[str, NDArray[Any]]:
        """Arrays x and t of a finer grid, and solution and network there as (x, t) images."""
        fine = SineWave(self.viscosity, self.dtype, grid=(100, 60))
        images = {"exact": fine.solution, "predicted": network(fine.points)}
        arrays = {name: image.numpy().reshape(len(fine.x), -1) for name, image in images.items()}
        return {name: array.astype(np.float32) for name, array in ({"x": fine.x, "t": fine.t} | arrays).items()}


class Product:
    """u = e^-t (x_1^2 - 1) ... (x_{d-1}^2 - 1), with the forcing that makes it the solution, in float64 throughout.

    Over many dimensions u is tiny nearly everywhere, and practically zero at random points. Its norm is known,
    and errors are sampled half from the domain and half from the density of u^2, each weighted by the mixture.
    """

    zero_errors: ClassVar[Metrics] = {"relative_l2": 1.0, "u_origin": 0.0}
    """The metrics of a network that is zero."""

    def __init__(self, dimensions: int, viscosity: float, dtype: torch.dtype, samples: int, random: torch.Generator):
        self.dimensions = dimensions
        self.viscosity = viscosity
        uniform = uniform_points(samples // 2, dimensions, random)
        self.points = torch.cat([uniform, self._points_of_square(samples // 2, random)]).to(dtype)
        self.solution = self.exact(self.points)
        self.density = (1 + self.solution.square() / self.mean_square) / 2

    @property
    def mean_square(self) -> float:
        """The mean of u^2 over the domain."""
        return (8 / 15) ** (self.dimensions - 1) * -math.expm1(-2) / 2

    def exact(self, points: Tensor) -> Tensor:
        """The solution at points (n, d)."""
        points = points.double()
        return torch.exp(-points[:, -1]) * (points[:, :-1].square() - 1).prod(-1)

    def forcing(self, points: Tensor) -> Tensor:
        """Burgers' operator of the solution."""
        u, points = self.exact(points), points.double()
        x, decay = points[:, :-1], torch.exp(-points[:, -1:])
        slopes = 2 * decay * products_without_one(x.square() - 1)
        return burgers(self.viscosity, u, -u, (x * slopes).sum(-1), slopes.sum(-1))

    def errors(self, network: nn.Module) -> Metrics:
        """The relative error over the domain, and the value at the origin at t = 0, where the solution is 1 or -1."""
        squares = (network(self.points).double() - self.solution).square() / self.density
        origin = network(torch.zeros_like(self.points[:1])).item()
        return {"relative_l2": math.sqrt(squares.mean().item() / self.mean_square), "u_origin": origin}

    def pictures(self, network: nn.Module) -> dict[str, NDArray[Any]]:
        """None: there are too many dimensions."""
        return {}

    def _points_of_square(self, count: int, random: torch.Generator) -> Tensor:
        """Points with the density of u^2: the median of five uniform numbers has that of (1 - x^2)^2."""
        uniform = torch.rand(count, self.dimensions - 1, 5, generator=random, dtype=torch.float64)
        t = torch.rand(count, 1, generator=random, dtype=torch.float64)
        return torch.cat([2 * uniform.median(-1).values - 1, -torch.log1p(t * math.expm1(-2)) / 2], -1)


def products_without_one(factors: Tensor) -> Tensor:
    """For each factor in the last dimension the product of all the others, without a division.

    >>> products_without_one(torch.tensor([2.0, 0.0, 5.0]))
    tensor([ 0., 10.,  0.])
    """
    one = torch.ones_like(factors[..., :1])
    before = torch.cat([one, factors[..., :-1]], -1).cumprod(-1)
    after = torch.cat([one, factors[..., 1:].flip(-1)], -1).cumprod(-1).flip(-1)
    return before * after
