"""Equations solved by ``GaussNewton`` with its defaults, in seconds of processor time.

    OMP_NUM_THREADS=1 python benchmarks/tangent_equations.py burgers helmholtz --seeds 0 1 --seconds 20

Prints the relative L2 error against the exact solution. Residuals are written with torch.func, as users write them.
"""

import argparse
import itertools
import math
import time

import torch
from torch import nn
from torch.func import grad, jvp

from torch_anderson import GaussNewton, Objective, Term

PI = math.pi
NU = 0.01 / PI


def network(inputs, width, layers):
    sizes = [inputs, *[width] * layers, 1]
    model = nn.Sequential()
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(a, b)
        nn.init.xavier_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        model.extend([linear] if i == layers else [linear, nn.Tanh()])
    return model


def box(*sides):
    """A sampler of points in a box."""
    low, high = (torch.tensor(x, dtype=torch.get_default_dtype()) for x in zip(*sides, strict=True))
    return lambda count: low + (high - low) * torch.rand(count, len(low))


def faces(*sides):
    """A sampler of points on the faces of a box."""
    inside = box(*sides)

    def sample(count):
        points = inside(count)
        axis = torch.randint(len(sides), (count,))
        ends = torch.tensor(sides, dtype=points.dtype)[axis, torch.randint(2, (count,))]
        return points.scatter(1, axis[:, None], ends[:, None])

    return sample


def laplacian(u, x):
    return sum(jvp(grad(u), (x,), (axis,))[1] @ axis for axis in torch.eye(len(x), dtype=x.dtype))


# ------------------------------------------------------------------------------------------------------- equations


def burgers():
    domain = box((0, 1), (-1, 1))  # t, x

    def residual(u, point):
        along_x = torch.tensor([0.0, 1.0], dtype=point.dtype)
        (u_t, u_x), (_, u_xx) = jvp(grad(u), (point,), (along_x,))
        return u_t + u(point) * u_x - NU * u_xx

    def edges(count):
        points = domain(count)
        points[::2, 0] = 0
        points[1::2, 1] = points[1::2, 1].sign()
        return points, torch.where(points[:, 0] == 0, -torch.sin(PI * points[:, 1]), 0)

    terms = {"interior": Term(residual, domain, count=1200), "edges": Term(known, edges, count=300)}
    return network(2, 20, 4), terms, grid((0.01, 1, 100), (-1, 1, 256)), cole_hopf


def known(u, point, value):
    return u(point) - value


def periodic(u, point):
    return u(point) - u(point + torch.tensor([0.0, 2 * PI], dtype=point.dtype))


def transport(residual, first, solution):
    """An equation in t and periodic x, with given first values."""
    domain = box((0, 1), (0, 2 * PI))

    def start(count):
        points = domain(count)
        points[:, 0] = 0
        return points, first(points[:, 1])

    def left(count):
        points = domain(count)
        points[:, 1] = 0
        return points

    terms = {
        "interior": Term(residual, domain, count=1200),
        "start": Term(known, start, count=150),
        "sides": Term(periodic, left, count=150),
    }
    return network(2, 32, 3), terms, grid((0, 1, 101), (0, 2 * PI, 128)), solution


def convection():
    def residual(u, point):
        u_t, u_x = grad(u)(point)
        return u_t + 30 * u_x

    return transport(residual, torch.sin, lambda p: torch.sin(p[:, 1] - 30 * p[:, 0]))


def reaction():
    def bell(x):
        return torch.exp(-((x - PI) ** 2) / (2 * (PI / 4) ** 2))

    def residual(u, point):
        value = u(point)
        return grad(u)(point)[0] - 5 * value * (1 - value)

    def solution(points):
        grown = bell(points[:, 1]) * torch.exp(5 * points[:, 0])
        return grown / (grown + 1 - bell(points[:, 1]))

    return transport(residual, bell, solution)


def poisson():
    def exact(points):
        return torch.sin(PI * points).prod(-1)

    def residual(u, x):
        return laplacian(u, x) + 3 * PI**2 * exact(x)

    sides = [(0, 1)] * 3
    terms = {"interior": Term(residual, box(*sides), count=1200), "faces": Term(zero, faces(*sides), count=300)}
    return network(3, 32, 3), terms, torch.rand(10_000, 3, dtype=torch.float64), exact


def helmholtz():
    def exact(points):
        return torch.sin(PI * points[..., 0]) * torch.sin(4 * PI * points[..., 1])

    def residual(u, x):
        return laplacian(u, x) + 16 * u(x) - (16 - 17 * PI**2) * exact(x)

    sides = [(-1, 1)] * 2
    terms = {"interior": Term(residual, box(*sides), count=1200), "faces": Term(zero, faces(*sides), count=300)}
    return network(2, 32, 3), terms, 2 * torch.rand(10_000, 2, dtype=torch.float64) - 1, exact


def zero(u, point):
    return u(point)


def grid(*axes):
    return torch.cartesian_prod(*(torch.linspace(*axis, dtype=torch.float64) for axis in axes))


def cole_hopf(points):
    """The exact solution of Burgers' equation, by Gauss-Hermite quadrature."""
    import numpy as np

    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.hermite.hermgauss(200))
    z = points[:, 1:] - torch.sqrt(4 * NU * points[:, :1]) * nodes
    exponent = -torch.cos(PI * z) / (2 * PI * NU)
    factors = torch.exp(exponent - exponent.amax(1, keepdim=True)) * weights
    return -(torch.sin(PI * z) * factors).sum(1) / factors.sum(1)


EQUATIONS = {f.__name__: f for f in (burgers, convection, poisson, helmholtz, reaction)}


def solve(name, seed, seconds, dtype):
    """The relative L2 error after so many seconds of processor time, and the optimizer's counters."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(seed)
    model, terms, points, solution = EQUATIONS[name]()
    expected = solution(points)
    begin = time.process_time()
    objective = Objective(model, **terms)
    optimizer = GaussNewton(torch.optim.Adam(model.parameters(), lr=1e-3))
    while time.process_time() - begin < seconds:
        optimizer.step(objective)
    with torch.no_grad():
        found = model(points.to(dtype))[:, 0].double()
    return float((found - expected).norm() / expected.norm()), optimizer.stats.as_dict()


def run(name, seed, seconds, dtype):
    error, stats = solve(name, seed, seconds, dtype)
    kept = {key: round(stats[key], 4) for key in ("accepted", "rejected_loss", "length", "blocks", "boost")}
    print(f"{name:12} seed {seed}  {seconds:g} s  relative L2 error {error:.1e}  {kept}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("equations", nargs="*", default=list(EQUATIONS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--float32", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.equations:
        for seed in arguments.seeds:
            run(name, seed, arguments.seconds, torch.float32 if arguments.float32 else torch.float64)


if __name__ == "__main__":
    main()
