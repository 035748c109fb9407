"""The equations, as users write them: a model, residuals with torch.func, samples, and the solution at test points."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jvp

from torch_anderson import Term

from .. import solutions
from ..solutions import PI, bell, product_of_sines, sum_of_cosines
from ..solutions import helmholtz as helmholtz_solution
from .case import Case, Network, Problem, bent, box, direction, faces, grid, known, laplacian, network, scattered
from .surrogates import SURROGATES

Residual = Callable[[Network, Tensor], Tensor]
Values = Callable[[Tensor], Tensor]
"""From points to values."""
VISCOSITY = 0.01 / PI
KDV_DISPERSION = 0.022**2
INTERIOR, EDGES = 1200, 300
"""Points that an evaluation of the loss draws."""
FIXED_INTERIOR, FIXED_EDGES = 3200, 320
"""Points that stay for a whole run."""


# Burgers' equation, points (t, x)


def burgers_residual(u: Network, point: Tensor) -> Tensor:
    """u_t + u u_x - viscosity u_xx."""
    (u_t, u_x), (_, u_xx) = bent(u, point)
    return solutions.burgers(VISCOSITY, u(point), u_t, u_x, u_xx)


def burgers_edges(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Points at t = 0 and at x = -1 and 1, with the solution there."""
    points = box((0, 1), (-1, 1), dtype=dtype)(count)
    points[::2, 0] = 0
    points[1::2, 1] = points[1::2, 1].sign()
    return points, torch.where(points[:, 0] == 0, -torch.sin(PI * points[:, 1]), 0)


@cache
def burgers_solution() -> tuple[Tensor, Tensor]:
    """The test grid and the exact solution."""
    points = grid((0, 1, 101), (-1, 1, 256))
    t, x = points.numpy().T
    return points, torch.from_numpy(solutions.cole_hopf(x, t, VISCOSITY, nodes=200))


def burgers(dtype: torch.dtype = torch.float64) -> Case:
    """u_t + u u_x = (0.01 / pi) u_xx from -sin(pi x): a shock forms. 4 layers of 20 neurons."""
    terms = {
        "interior": Term(burgers_residual, box((0, 1), (-1, 1), dtype=dtype), count=INTERIOR),
        "edges": Term(known, partial(burgers_edges, dtype=dtype), count=EDGES),
    }
    return Case(network(2, 20, 4, dtype=dtype), terms, *burgers_solution())


def burgers_fixed() -> Case:
    """Burgers' equation with 3,200 points inside and 320 at the edges, drawn once for a run."""
    terms = {
        "interior": Term(burgers_residual, box((0, 1), (-1, 1))(FIXED_INTERIOR)),
        "edges": Term(known, burgers_edges(FIXED_EDGES)),
    }
    return replace(burgers(), terms=terms)


def burgers_wide() -> Case:
    """Burgers' equation with drawn points and 3 layers of 200 neurons: 81,201 weights."""
    return replace(burgers(), model=network(2, 200, 3))


# Equations in t and periodic x


def periodic_terms(
    residual: Residual,
    sides: Callable[..., tuple[Tensor, ...]],
    first: Values,
    low: float,
    high: float,
    dtype: torch.dtype,
) -> dict[str, Term]:
    """The terms of an equation on 0 <= t <= 1 and low <= x <= high: inside, at t = 0, and at the ends of the period."""
    domain = box((0, 1), (low, high), dtype=dtype)

    def at_start(count: int) -> tuple[Tensor, Tensor]:
        points = domain(count)
        points[:, 0] = 0
        return points, first(points[:, 1])

    def at_side(count: int) -> Tensor:
        points = domain(count)
        points[:, 1] = low
        return points

    return {
        "interior": Term(residual, domain, count=INTERIOR),
        "start": Term(known, at_start, count=EDGES // 2),
        "sides": Term(sides, at_side, count=EDGES // 2),
    }


def transported(residual: Residual, first: Values, exact: Values, dtype: torch.dtype) -> Case:
    """An equation of first order with period 2 pi."""
    terms = periodic_terms(residual, periodic_sides(0, 2 * PI), first, 0.0, 2 * PI, dtype)
    points = grid((0, 1, 101), (0, 2 * PI, 128))
    return Case(network(2, 32, 3, dtype=dtype), terms, points, exact(points))


def convection_residual(u: Network, point: Tensor) -> Tensor:
    """u_t + 30 u_x."""
    u_t, u_x = grad(u)(point)
    return u_t + 30 * u_x


def convection(dtype: torch.dtype = torch.float64) -> Case:
    """u_t + 30 u_x = 0 from sin(x), where physics-informed networks are known to fail. 3 layers of 32 neurons."""
    return transported(convection_residual, torch.sin, solutions.convection, dtype)


def reaction_residual(u: Network, point: Tensor) -> Tensor:
    """u_t - 5 u (1 - u)."""
    value = u(point)
    return grad(u)(point)[0] - 5 * value * (1 - value)


def reaction(dtype: torch.dtype = torch.float64) -> Case:
    """u_t = 5 u (1 - u) from a bell curve. 3 layers of 32 neurons."""
    return transported(reaction_residual, bell, solutions.reaction, dtype)


def periodic_sides(order: int, period: float) -> Callable[[Network, Tensor], tuple[Tensor, ...]]:
    """Residuals of a period in x: of the value and of derivatives up to this order."""

    def residual(u: Network, point: Tensor) -> tuple[Tensor, ...]:
        ends = (along_x(u, order, point), along_x(u, order, point + period * direction(point, 1)))
        return tuple(left - right for left, right in zip(*ends, strict=True))

    return residual


def along_x(u: Network, order: int, point: Tensor) -> list[Tensor]:
    """The value and the derivatives by x up to this order."""
    along = direction(point, 1)
    functions = [u]
    for _ in range(order):
        functions.append(lambda p, f=functions[-1]: jvp(f, (p,), (along,))[1])  # type: ignore[misc]
    return [f(point) for f in functions]


def evolved(residual: Residual, first: Values, order: int, values: np.ndarray) -> Case:
    """An equation with period 2 from -1, and its reference (times, places)."""
    terms = periodic_terms(residual, periodic_sides(order, 2.0), first, -1.0, 1.0, torch.float64)
    times, places = values.shape
    points = grid((0, 1, times), (-1, 1 - 2 / places, places))
    return Case(network(2, 32, 3), terms, points, torch.from_numpy(values).flatten())


def allen_cahn_residual(u: Network, point: Tensor) -> Tensor:
    """u_t - 1e-4 u_xx - 5 u + 5 u^3."""
    (u_t, _), (_, u_xx) = bent(u, point)
    value = u(point)
    return u_t - 1e-4 * u_xx - 5 * value + 5 * value**3


def allen_cahn_start(x: Tensor) -> Tensor:
    """x^2 cos(pi x)."""
    return x**2 * torch.cos(PI * x)


def allen_cahn() -> Case:
    """u_t = 1e-4 u_xx + 5 u - 5 u^3 from x^2 cos(pi x), period 2: steep layers form. 3 layers of 32 neurons."""
    return evolved(allen_cahn_residual, allen_cahn_start, 1, solutions.allen_cahn()[:, ::16])


def korteweg_de_vries_residual(u: Network, point: Tensor) -> Tensor:
    """u_t + u u_x + 0.022^2 u_xxx."""
    along = direction(point, 1)

    def bend(p: Tensor) -> Tensor:
        return jvp(grad(u), (p,), (along,))[1][1]

    u_t, u_x = grad(u)(point)
    return u_t + u(point) * u_x + KDV_DISPERSION * jvp(bend, (point,), (along,))[1]


def korteweg_de_vries() -> Case:
    """u_t + u u_x + 0.022^2 u_xxx = 0 from cos(pi x), period 2: solitons form. 3 layers of 32 neurons."""
    first = lambda x: torch.cos(PI * x)  # noqa: E731
    return evolved(korteweg_de_vries_residual, first, 2, solutions.korteweg_de_vries()[:, ::2])


# Equations without time


def stationary(
    residual: Residual, exact: Values, sides: list[tuple[float, float]], dtype: torch.dtype = torch.float64
) -> Case:
    """An equation in a cube with given values on its faces."""
    on_faces = faces(*sides, dtype=dtype)

    def edges(count: int) -> tuple[Tensor, Tensor]:
        points = on_faces(count)
        return points, exact(points)

    terms = {
        "interior": Term(residual, box(*sides, dtype=dtype), count=INTERIOR),
        "faces": Term(known, edges, count=EDGES),
    }
    points = scattered(len(sides), *sides[0])
    return Case(network(len(sides), 32, 3, dtype=dtype), terms, points, exact(points))


def poisson3d_residual(u: Network, point: Tensor) -> Tensor:
    """The Laplacian and the source of the product of sines."""
    return laplacian(u, point) + 3 * PI**2 * product_of_sines(point)


def poisson3d(dtype: torch.dtype = torch.float64) -> Case:
    """-Laplacian(u) = 3 pi^2 sin(pi x) sin(pi y) sin(pi z), zero on the faces. 3 layers of 32 neurons."""
    return stationary(poisson3d_residual, product_of_sines, [(0, 1)] * 3, dtype)


def poisson10d_residual(u: Network, point: Tensor) -> Tensor:
    """The Laplacian and the source of the sum of cosines."""
    return laplacian(u, point) + PI**2 * sum_of_cosines(point)


def poisson10d() -> Case:
    """-Laplacian(u) = pi^2 (cos(pi x_1) + ... + cos(pi x_10)), u given on the faces. 3 layers of 32 neurons."""
    return stationary(poisson10d_residual, sum_of_cosines, [(0, 1)] * 10)


def helmholtz_residual(u: Network, point: Tensor) -> Tensor:
    """Laplacian(u) + 16 u and its source."""
    return laplacian(u, point) + 16 * u(point) - (16 - 17 * PI**2) * helmholtz_solution(point)


def helmholtz(dtype: torch.dtype = torch.float64) -> Case:
    """Laplacian(u) + 16 u = (16 - 17 pi^2) sin(pi x) sin(4 pi y), zero at the edges. 3 layers of 32 neurons."""
    return stationary(helmholtz_residual, helmholtz_solution, [(-1, 1)] * 2, dtype)


EQUATIONS = (
    Problem(name="burgers2d", title="Burgers", group="burgers", build=burgers, picture=(101, 256)),
    Problem(name="burgers2d-fixed", title="Burgers, fixed points", group="burgers", build=burgers_fixed, drawn=False),
    Problem(name="burgers2d-wide", title="Burgers, wide network", group="burgers", build=burgers_wide),
    Problem(name="convection", title="convection, speed 30", group="transport", build=convection),
    Problem(name="reaction", title="reaction, rate 5", group="transport", build=reaction),
    Problem(name="allen-cahn", title="Allen-Cahn", group="transport", build=allen_cahn),
    Problem(name="kdv", title="Korteweg-de Vries", group="transport", build=korteweg_de_vries, crashes=True),
    Problem(name="poisson3d", title="Poisson, 3 dimensions", group="stationary", build=poisson3d),
    Problem(name="poisson10d", title="Poisson, 10 dimensions", group="stationary", build=poisson10d),
    Problem(name="helmholtz", title="Helmholtz, k = 4", group="stationary", build=helmholtz),
)
PROBLEMS = {problem.name: problem for problem in (*EQUATIONS, *SURROGATES)}
