"""The equations' exact and reference solutions, for every experiment that solves them.

Points are (t, x) or (x, y, ...), the coordinates in the last dimension. Periodic equations without a formula are solved
by Fourier series in space and exponential integration in time.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import roots_hermite
from torch import Tensor

Array = NDArray[np.floating[Any]]
Waves = NDArray[np.complexfloating[Any, Any]]
PI = math.pi
FINER = 64
CONTOUR = 64
"""Points of the circle on which the functions of the scheme are averaged: their formulas cancel near 0."""


def burgers(viscosity: float, u: Tensor, time: Tensor, space: Tensor, laplacian: Tensor) -> Tensor:
    """Burgers' operator, from u, its derivative in time, the sum of those in space, and its Laplacian."""
    return time + u * space - viscosity * laplacian


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


def convection(point: Tensor) -> Tensor:
    """u_t + 30 u_x = 0 from sin(x): the first wave, displaced."""
    return torch.sin(point[..., 1] - 30 * point[..., 0])


def bell(x: Tensor) -> Tensor:
    """The first values of the reaction."""
    return torch.exp(-((x - PI) ** 2) / (2 * (PI / 4) ** 2))


def reaction(point: Tensor) -> Tensor:
    """u_t = 5 u (1 - u): logistic growth at every place."""
    start = bell(point[..., 1])
    grown = start * torch.exp(5 * point[..., 0])
    return grown / (grown + 1 - start)


def product_of_sines(point: Tensor) -> Tensor:
    """sin(pi x) sin(pi y) sin(pi z)."""
    return torch.sin(PI * point).prod(-1)


def sum_of_cosines(point: Tensor) -> Tensor:
    """cos(pi x_1) + ... + cos(pi x_d)."""
    return torch.cos(PI * point).sum(-1)


def helmholtz(point: Tensor) -> Tensor:
    """sin(pi x) sin(4 pi y)."""
    return torch.sin(PI * point[..., 0]) * torch.sin(4 * PI * point[..., 1])


def integrate(
    first: Callable[[Array], Array], linear: Waves, nonlinear: Callable[[Waves], Waves], times: int, steps: int
) -> Array:
    """Values at ``times`` + 1 equidistant times of [0, 1] by ETDRK4 (Cox and Matthews 2002).

    ``first`` gives the first values from places; their Fourier coefficients are taken on a finer grid, as those of
    values with a kink would be wrong by aliasing. ``linear`` is the linear part of the equation for each wave number
    and ``nonlinear`` the other part, from Fourier coefficients to Fourier coefficients; ``steps`` is the number of
    steps between two times.
    """
    scheme = ExponentialStep(linear, nonlinear, 1 / (times * steps))
    points = 2 * (len(linear) - 1)
    waves: Waves = np.fft.rfft(first(space(FINER * points)))[: len(linear)] / FINER
    found = [first(space(points))]
    for _ in range(times):
        for _ in range(steps):
            waves = scheme(waves)
        found.append(np.fft.irfft(waves, points))
    return np.stack(found)


class ExponentialStep:
    """One step of fourth order; the linear part is exact. Coefficients as by Kassam and Trefethen (2005)."""

    def __init__(self, linear: Waves, nonlinear: Callable[[Waves], Waves], step: float) -> None:
        self.nonlinear = nonlinear
        self.whole, self.half = np.exp(step * linear), np.exp(step * linear / 2)
        circle = np.exp(2j * np.pi * (np.arange(CONTOUR) + 0.5) / CONTOUR)
        z = step * linear[:, None] + circle
        e = np.exp(z)
        self.middle = step * ((np.exp(z / 2) - 1) / z).mean(1)
        self.first = step * ((-4 - z + e * (4 - 3 * z + z**2)) / z**3).mean(1)
        self.second = step * ((2 + z + e * (z - 2)) / z**3).mean(1)
        self.last = step * ((-4 - 3 * z - z**2 + e * (4 - z)) / z**3).mean(1)

    def __call__(self, waves: Waves) -> Waves:
        """The coefficients one step later."""
        n = self.nonlinear(waves)
        a = self.half * waves + self.middle * n
        n_a = self.nonlinear(a)
        b = self.half * waves + self.middle * n_a
        n_b = self.nonlinear(b)
        c = self.half * a + self.middle * (2 * n_b - n)
        after: Waves = (
            self.whole * waves + self.first * n + 2 * self.second * (n_a + n_b) + self.last * self.nonlinear(c)
        )
        return after


def space(points: int) -> Array:
    """Equidistant points of [-1, 1), period 2."""
    return -1 + 2 * np.arange(points) / points


def wave_numbers(points: int) -> Array:
    """Wave numbers of real functions with period 2."""
    return np.pi * np.arange(points // 2 + 1)


@cache
def allen_cahn(points: int = 2048, times: int = 100, steps: int = 20) -> Array:
    """Solution (times, points) of u_t = 1e-4 u_xx + 5 u - 5 u^3 from x^2 cos(pi x), which has a kink at x = 1."""
    linear = -1e-4 * wave_numbers(points) ** 2 + 5

    def nonlinear(waves: Waves) -> Waves:
        return np.fft.rfft(-5 * np.fft.irfft(waves, points) ** 3)

    return integrate(lambda x: x**2 * np.cos(np.pi * x), linear.astype(complex), nonlinear, times, steps)


@cache
def korteweg_de_vries(points: int = 256, times: int = 100, steps: int = 80) -> Array:
    """Solution (times, points) of u_t + u u_x + 0.022^2 u_xxx = 0 from cos(pi x): a wave that breaks into solitons."""
    k = wave_numbers(points)

    def nonlinear(waves: Waves) -> Waves:
        return -0.5j * k * np.fft.rfft(np.fft.irfft(waves, points) ** 2)

    return integrate(lambda x: np.cos(np.pi * x), 1j * 0.022**2 * k**3, nonlinear, times, steps)
