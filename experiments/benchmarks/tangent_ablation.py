"""Equations solved by `GaussNewton`, with all of its parts and with one part of its control switched off at a time.

    OMP_NUM_THREADS=1 python -m experiments.benchmarks.tangent_ablation burgers2d helmholtz --seeds 0 1 --seconds 15
    OMP_NUM_THREADS=1 python -m experiments.benchmarks.tangent_ablation --variants "all parts" --float32

Parts are switched off by other values of the constants and functions of the modules that define them; there are no
options for it. A number is the relative L2 error after the same processor time; "factor" is the geometric mean of
errors over that of the first variant: above 1, the part helps. The equations are those of experiments.equations.
"""

import time
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

import torch
from tyro.conf import Positional

from experiments.benchmarks.common import Change, changed, chosen, command
from experiments.equations import problems
from experiments.equations.case import Case
from experiments.text import header, table
from torch_anderson import GaussNewton, Objective
from torch_anderson._gauss_newton import driver, jump, retained, state

EQUATIONS: dict[str, Callable[[torch.dtype], Case]] = {
    "burgers2d": problems.burgers,
    "convection": problems.convection,
    "poisson3d": problems.poisson3d,
    "helmholtz": problems.helmholtz,
    "reaction": problems.reaction,
}


def two_lengths(model: Any, move: Any, length: float, longer: bool) -> Any:
    """Try two lengths, and shorter ones while the loss does not fall, without a model of the loss between them."""
    path = jump.Path(model, move)
    path.at(length)
    path.at(2 * length if longer and length <= jump.LONGEST / 2 else length / 2)
    jump.shorten(path)
    best = path.best
    return jump.Found(best, 2 * best.length if best.length >= length else best.length, len(path.tried))


def one_length(model: Any, move: Any, length: float, longer: bool) -> Any:
    """Try the full jump, and shorter ones while the loss does not fall."""
    path = jump.Path(model, move)
    path.at(1.0)
    jump.shorten(path)
    return jump.Found(path.best, path.best.length, len(path.tried))


def damping(power: int) -> Any:
    """Damping by a power of the number of rows, instead of the number itself."""
    return lambda self, loss, trace, all_fitted: 1e-3 * self.whole_blocks**power * loss * self.boost


VARIANTS: dict[str, list[Change]] = {
    "all parts": [],
    "no momentum": [(jump, "MOMENTUM", 0.0)],
    "momentum 0.9": [(jump, "MOMENTUM", 0.9)],
    "no term of third order": [(jump, "MOST_TWIST", 0.0)],
    "no geodesic acceleration": [(jump, "MOST_BEND", 0.0), (jump, "MOST_TWIST", 0.0)],
    "no retained samples": [(retained.Retained, "renew", lambda self, fresh: fresh)],
    "no growth of rows": [(state, "GROWTH", 1.0)],
    "no interpolation in the search": [(driver, "search", two_lengths)],
    "no search: the full jump, then shorter ones": [(driver, "search", one_length)],
    "no more damping after a refused jump": [(state, "STIFFEN", 1.0)],
    "damping independent of the number of rows": [(state.GaussNewtonState, "damping", damping(0))],
    "damping by the square of the number of rows": [(state.GaussNewtonState, "damping", damping(2))],
}


def solve(name: str, seed: int, seconds: float, dtype: torch.dtype) -> float:
    """The relative L2 error after so many seconds of processor time."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(seed)
    case = EQUATIONS[name](dtype)
    begin = time.process_time()
    objective = Objective(case.model, **case.terms)
    optimizer = GaussNewton(torch.optim.Adam(case.model.parameters(), lr=1e-3))
    while time.process_time() - begin < seconds:
        optimizer.step(objective)
    return case.error()


def main(
    equations: Positional[tuple[str, ...]] = (),
    seeds: tuple[int, ...] = (0, 1),
    seconds: float = 15.0,
    variants: tuple[str, ...] = (),
    float32: bool = False,
) -> None:
    """Print a line for each variant, and the table.

    Args:
        equations: Names; default: all.
        seeds: A run for each.
        seconds: Processor time of a run.
        variants: Names; default: all.
        float32: Networks and samples in float32.
    """
    torch.set_num_threads(1)
    print(header(), flush=True)
    runs = [(name, seed) for name in chosen(equations, EQUATIONS) for seed in seeds]
    rows: list[list[str]] = []
    means: list[float] = []
    for variant in chosen(variants, VARIANTS):
        with changed(VARIANTS[variant]):
            errors = [solve(*each, seconds, torch.float32 if float32 else torch.float64) for each in runs]
        means.append(geometric_mean(errors))
        rows.append([variant, *(f"{error:.1e}" for error in errors), f"{means[-1] / means[0]:.2g}"])
        print(*rows[-1], sep=" | ", flush=True)
    print("\n" + table(rows, ["variant", *(f"{name}, seed {seed}" for name, seed in runs), "factor"]))


if __name__ == "__main__":
    command(main)
