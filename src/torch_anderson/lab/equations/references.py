"""Solutions without a formula: periodic equations, by Fourier series in space and exponential integration in time."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Waves = NDArray[np.complexfloating[Any, Any]]
FINER = 64
CONTOUR = 64
"""Points of the circle on which the functions of the scheme are averaged: their formulas cancel near 0."""


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
