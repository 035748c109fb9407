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
from torch_anderson._gauss_newton import control, jump
from torch_anderson._gauss_newton.objective import Retained

EQUATIONS: dict[str, Callable[[torch.dtype], Case]] = {
    "burgers2d": problems.burgers,
    "convection": problems.convection,
    "poisson3d": problems.poisson3d,
    "helmholtz": problems.helmholtz,
    "reaction": problems.reaction,
}


def shorten(search: Any) -> None:
    """Try shorter lengths while the loss does not fall."""
    last = search.trials[-1]
    while not search.falls and last.length > jump.SHORTEST:
        last = search.try_length(max(last.length / 4, jump.SHORTEST))


def two_lengths(search: Any, length: float, longer: bool) -> None:
    """Try two lengths, and shorter ones while the loss does not fall, without a model of the loss between them."""
    search.try_length(length)
    search.try_length(2 * length if longer and length <= jump.LONGEST / 2 else length / 2)
    shorten(search)
    best = search.best.length
    search.expected = 2 * best if best >= length else best


def one_length(search: Any, length: float, longer: bool) -> None:
    """Try the full jump, and shorter ones while the loss does not fall."""
    search.try_length(1.0)
    shorten(search)
    search.expected = search.best.length


def damping(power: int) -> Callable[..., float]:
    """Damping that grows with this power of the number of rows."""
    return lambda self, loss, trace, all_fitted: control.DAMPING * self.whole_blocks**power * loss * self.boost


VARIANTS: dict[str, list[Change]] = {
    "all parts": [],
    "no momentum": [(jump, "MOMENTUM", 0.0)],
    "momentum 0.9": [(jump, "MOMENTUM", 0.9)],
    "no term of third order": [(jump, "MOST_THIRD_ORDER", 0.0)],
    "no geodesic acceleration": [(jump, "MOST_SECOND_ORDER", 0.0), (jump, "MOST_THIRD_ORDER", 0.0)],
    "no retained samples": [(Retained, "renew", lambda self, fresh: fresh)],
    "no growth of rows": [(control, "GROWTH", 1.0)],
    "no interpolation in the search": [(jump.Search, "run", two_lengths)],
    "no search: the full jump, then shorter ones": [(jump.Search, "run", one_length)],
    "no more damping after a refused jump": [(control, "BOOST", 1.0)],
    "damping independent of the number of rows": [(control.State, "damping", damping(0))],
    "damping by the square of the number of rows": [(control.State, "damping", damping(2))],
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
