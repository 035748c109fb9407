"""Equations solved by ``GaussNewton`` with its defaults, in seconds of processor time.

    OMP_NUM_THREADS=1 python -m experiments.benchmarks.tangent_equations burgers helmholtz --seeds 0 1 --seconds 20

Prints the relative L2 error against the exact solution. The equations are those of experiments.equations.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from experiments import solutions
from experiments.equations import problems
from experiments.equations.case import Case, box, grid, zero
from torch_anderson import GaussNewton, Objective, Term


def burgers(dtype: torch.dtype) -> Case:
    """Errors are taken from t = 0.01 on."""
    points = grid((0.01, 1, 100), (-1, 1, 256))
    t, x = points.numpy().T
    expected = torch.from_numpy(solutions.cole_hopf(x, t, problems.VISCOSITY, nodes=200))
    return replace(problems.burgers(dtype), points=points, expected=expected)


def poisson(dtype: torch.dtype) -> Case:
    return zero_on_faces(problems.poisson3d(dtype), solutions.product_of_sines, [(0, 1)] * 3, dtype)


def helmholtz(dtype: torch.dtype) -> Case:
    return zero_on_faces(problems.helmholtz(dtype), solutions.helmholtz, [(-1, 1)] * 2, dtype)


def zero_on_faces(
    case: Case, exact: Callable[[Tensor], Tensor], sides: list[tuple[float, float]], dtype: torch.dtype
) -> Case:
    """Exact zeros on the faces, and test points of the run's own random numbers.

    Random numbers are drawn in another order than by ``case.faces``, so that earlier runs can be repeated.
    """
    inside, ends = box(*sides, dtype=dtype), torch.tensor(sides, dtype=dtype)

    def faces(count: int) -> Tensor:
        points = inside(count)
        axis = torch.randint(len(sides), (count,))
        return points.scatter(1, axis[:, None], ends[axis, torch.randint(2, (count,))][:, None])

    points = box(*sides)(10_000)
    terms = case.terms | {"faces": Term(zero, faces, count=problems.EDGES)}
    return replace(case, terms=terms, points=points, expected=exact(points))


EQUATIONS: dict[str, Callable[[torch.dtype], Case]] = {
    f.__name__: f for f in (burgers, problems.convection, poisson, helmholtz, problems.reaction)
}


def solve(name: str, seed: int, seconds: float, dtype: torch.dtype) -> tuple[float, dict[str, float]]:
    """The relative L2 error after so many seconds of processor time, and the optimizer's counters."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(seed)
    case = EQUATIONS[name](dtype)
    begin = time.process_time()
    objective = Objective(case.model, **case.terms)
    optimizer = GaussNewton(torch.optim.Adam(case.model.parameters(), lr=1e-3))
    while time.process_time() - begin < seconds:
        optimizer.step(objective)
    with torch.no_grad():
        found = case.model(case.points.to(dtype))[:, 0].double()
    return float((found - case.expected).norm()) / case.size, optimizer.stats.as_dict()


def run(name: str, seed: int, seconds: float, dtype: torch.dtype) -> None:
    error, stats = solve(name, seed, seconds, dtype)
    kept = {key: round(stats[key], 4) for key in ("accepted", "rejected_loss", "length", "blocks", "boost")}
    print(f"{name:12} seed {seed}  {seconds:g} s  relative L2 error {error:.1e}  {kept}", flush=True)


def main() -> None:
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
