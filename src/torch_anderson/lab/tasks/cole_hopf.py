"""Burgers' equation in one space dimension from u(x, 0) = -sin(pi x), and its exact solution after Cole and Hopf."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import roots_hermite
from torch import Tensor, nn

from ..task import Metrics


def cole_hopf(x: ArrayLike, t: ArrayLike, viscosity: float, nodes: int = 100) -> NDArray[np.float64]:
    """The solution u(x, t) on [-1, 1] that is zero at both ends, by Gauss-Hermite quadrature in float64.

    With y = x - 2 sqrt(viscosity t) z and F(y) = exp(-cos(pi y) / (2 pi viscosity)), u is minus the mean of sin(pi y)
    weighted by F, over z with the density exp(-z^2). At t = 0 all nodes fall on x.

    >>> float(cole_hopf(0.5, 0.0, viscosity=0.01))
    -1.0
    """
    z, weights = roots_hermite(nodes)
    x, t = (np.asarray(array, dtype=np.float64)[..., None] for array in (x, t))
    y = np.pi * (x - 2 * np.sqrt(viscosity * t) * z)
    exponent = -np.cos(y) / (2 * np.pi * viscosity)
    weights = weights * np.exp(exponent - exponent.max(axis=-1, keepdims=True))
    return -(np.sin(y) * weights).sum(axis=-1) / weights.sum(axis=-1)


class SineWave:
    """The equation without forcing; errors are taken on a grid over the whole domain."""

    dimensions = 2

    def __init__(self, viscosity: float, dtype: torch.dtype, grid: tuple[int, int]):
        self.viscosity = viscosity
        self.x, self.t = np.linspace(-1, 1, grid[0]), np.linspace(0, 1, grid[1])
        self.points = torch.cartesian_prod(torch.from_numpy(self.x), torch.from_numpy(self.t)).to(dtype)
        self.solution = self.exact(self.points)

    def exact(self, points: Tensor) -> Tensor:
        """The solution at points (n, 2)."""
        x, t = points.double().numpy().T
        return torch.from_numpy(cole_hopf(x, t, self.viscosity))

    def forcing(self, points: Tensor) -> Tensor:
        """Zero."""
        return points.new_zeros(len(points), dtype=torch.float64)

    def errors(self, network: nn.Module) -> Metrics:
        """The relative error on the grid."""
        error = network(self.points).double() - self.solution
        return {"relative_l2": float(error.norm() / self.solution.norm())}

    def zero_errors(self) -> Metrics:
        """The metrics of a network that is zero."""
        return {"relative_l2": 1.0}

    def pictures(self, network: nn.Module) -> dict[str, NDArray[np.float32]]:
        """Solution and network on the grid, as (x, t) images."""
        shape = (len(self.x), len(self.t))
        arrays = {
            "x": self.x,
            "t": self.t,
            "exact": self.solution.numpy().reshape(shape),
            "predicted": network(self.points).numpy().reshape(shape),
        }
        return {name: array.astype(np.float32) for name, array in arrays.items()}
