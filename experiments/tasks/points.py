"""Random points of the domain [-1, 1]^{d-1} x [0, 1] of space and time, one row each, time last."""

import numpy as np
import torch
from torch import Tensor


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
