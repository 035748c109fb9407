"""Burgers' equation in many dimensions, with the forcing that makes a product of parabolas its solution."""

import math

import torch
from torch import Tensor, nn

from ..solutions import burgers
from ..task import Metrics
from .points import uniform_points


def products_without_one(factors: Tensor) -> Tensor:
    """For each factor in the last dimension the product of all the others, without a division.

    >>> products_without_one(torch.tensor([2.0, 0.0, 5.0]))
    tensor([ 0., 10.,  0.])
    """
    one = torch.ones_like(factors[..., :1])
    before = torch.cat([one, factors[..., :-1]], -1).cumprod(-1)
    after = torch.cat([one, factors[..., 1:].flip(-1)], -1).cumprod(-1).flip(-1)
    return before * after


class Product:
    """u = e^-t (x_1^2 - 1) ... (x_{d-1}^2 - 1) on [-1, 1]^{d-1} x [0, 1], in float64 throughout.

    Over many dimensions u is tiny nearly everywhere, and practically zero at random points. Its norm is known,
    and errors are sampled half from the domain and half from the density of u^2, each weighted by the mixture.
    """

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
        x, t = _split(points)
        return torch.exp(-t) * (x.square() - 1).prod(-1)

    def forcing(self, points: Tensor) -> Tensor:
        """Burgers' operator of the solution."""
        x, t = _split(points)
        u = self.exact(points)
        others = 2 * torch.exp(-t).unsqueeze(-1) * products_without_one(x.square() - 1)
        return burgers(self.viscosity, u, -u, (x * others).sum(-1), others.sum(-1))

    def errors(self, network: nn.Module) -> Metrics:
        """The relative error over the domain, and the value at the origin at t = 0, where the solution is 1 or -1."""
        squares = (network(self.points).double() - self.solution).square() / self.density
        origin = network(torch.zeros_like(self.points[:1])).item()
        return {"relative_l2": math.sqrt(squares.mean().item() / self.mean_square), "u_origin": origin}

    def zero_errors(self) -> Metrics:
        """The metrics of a network that is zero."""
        return {"relative_l2": 1.0, "u_origin": 0.0}

    def _points_of_square(self, count: int, random: torch.Generator) -> Tensor:
        """Points with the density of u^2: the median of five uniform numbers has that of (1 - x^2)^2."""
        uniform = torch.rand(count, self.dimensions - 1, 5, generator=random, dtype=torch.float64)
        t = torch.rand(count, 1, generator=random, dtype=torch.float64)
        return torch.cat([2 * uniform.median(-1).values - 1, -torch.log1p(t * math.expm1(-2)) / 2], -1)


def _split(points: Tensor) -> tuple[Tensor, Tensor]:
    points = points.double()
    return points[:, :-1], points[:, -1]
