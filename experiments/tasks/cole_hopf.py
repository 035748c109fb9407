"""Burgers' equation in one space dimension from u(x, 0) = -sin(pi x), and its exact solution after Cole and Hopf."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..solutions import cole_hopf
from ..task import Metrics


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
