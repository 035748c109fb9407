"""How exact is it? Anderson against GMRES, direct solvers and optimal least squares, on problems with known answers.

python -m benchmarks.accuracy                 about two minutes
python -m benchmarks.accuracy --seeds 3       fewer problems of each kind
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import gmres
from torch import Tensor, optim

from benchmarks.report import header, table
from torch_anderson import Anderson, joint
from torch_anderson.distributed import Ranks

STEPS = 1000
DIVERGED = 1e3
Settings = dict[str, Any]

DEFAULTS = Anderson(optim.SGD([torch.zeros(1, requires_grad=True)])).options

METHODS: dict[str, Settings | None] = {
    "base alone": None,
    "step, p=10": {"period": 10},
    "step, p=1": {"period": 1},
    "cycle, p=10": {"period": 10, "residual": "cycle"},
    "cycle, p=25, t=20": {"period": 25, "residual": "cycle", "average_window": 20},
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="problems of each kind")
    seeds = range(parser.parse_args().seeds)
    print(header(), end="\n\n")
    regularized = f"at the default, {joint.LEAST_REGULARIZATION:g}"
    print(table(exactness(seeds), ["worst of all seeds", "regularization 0", regularized, "limit at 0"]), end="\n\n")
    print(
        "Relative error after 1,000 gradients, least squares with 200 unknowns, m = 10, geometric mean of the seeds:\n"
    )
    print(table(training(seeds), ["noise, base, safeguard", *METHODS]))


# ------------------------------------------------------------------------------------------------ first table


def exactness(seeds: range) -> list[list[object]]:
    """Rows of the first table: a measure without regularization, with the default one, and its limit."""
    every_step = {"period": 1, "safeguard": None}
    measures: list[tuple[str, Callable[[int, float], float], float]] = [
        ("deviation from GMRES while its residual is above 1e-6", gmres_deviation, 1e-8),
        ("relative error of SGD + Anderson at every step, after 1,000", _sgd_error(every_step), 1e-10),
        ("the same with QR", _sgd_error(every_step | {"solver": "qr"}), 1e-10),
    ]
    for condition in (1e2, 1e4, 1e6):
        name = f"least-squares residual / optimum - 1, float32, condition {condition:.0e}"
        measures.append((name, partial(excess_residual, condition=condition), 1e-3))
    rows: list[list[object]] = [
        ["relative error of SGD alone", *2 * [max(error(s, "SGD", 0.0, None) for s in seeds)], ""]
    ]
    for name, measure, limit in measures:
        found = [
            max(measure(seed, regularization) for seed in seeds) for regularization in (0.0, joint.LEAST_REGULARIZATION)
        ]
        rows.append([name, *(f"{x:.1e}" for x in found), f"{limit:.0e}" + (" !" if found[0] > limit else "")])
    return rows


def _sgd_error(options: Settings) -> Callable[[int, float], float]:
    return lambda seed, regularization: error(seed, "SGD", 0.0, options | {"regularization": regularization})


def gmres_deviation(seed: int, regularization: float, n: int = 40) -> float:
    """Largest relative deviation of the predicted residual on x -> M x + b, M of spectral radius 0.9."""
    rng = np.random.default_rng(seed)
    M, b = rng.standard_normal((n, n)), rng.standard_normal(n)
    M *= 0.9 / abs(np.linalg.eigvals(M)).max()
    expected: list[float] = []
    gmres(np.eye(n) - M, b, rtol=1e-12, restart=n, maxiter=1, callback=expected.append, callback_type="pr_norm")

    matrix, offset = torch.from_numpy(M), torch.from_numpy(b)
    w = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    options: Settings = {"regularization": regularization, "safeguard": None, "max_jump": inf}
    optimizer = Anderson(optim.SGD([w], lr=1.0), history_size=n, period=1, **options)
    predicted: list[float] = []
    optimizer.register_acceleration_hook(lambda record: predicted.append(record.predicted_residual_norm))
    for _ in range(n):
        w.grad = w.detach() - (matrix @ w.detach() + offset)
        optimizer.step()
    pairs = zip(predicted, np.array(expected) * np.linalg.norm(b), strict=False)
    return max(abs(ours / theirs - 1) for ours, theirs in pairs if theirs > 1e-6 * np.linalg.norm(b))


def excess_residual(seed: int, regularization: float, condition: float, n: int = 40_000, columns: int = 10) -> float:
    """|r - R g| over its minimum, less 1. Columns in float32, of that condition number; 1e-3 of r is out of reach."""
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    q = torch.linalg.qr(randn(n, columns + 1)).Q
    v = torch.linalg.qr(randn(columns, columns)).Q
    R = q[:, :columns] * torch.logspace(0, -np.log10(condition), columns, dtype=torch.float64) @ v
    r = q @ torch.cat([randn(columns), torch.tensor([1e-3], dtype=torch.float64)])

    optimizer = Anderson(
        optim.SGD([torch.zeros(n, requires_grad=True)], lr=1.0), regularization=regularization, history_size=columns
    )
    [block] = optimizer._accelerator.build_blocks()
    history = block.history
    for newer in reversed(range(columns + 1)):  # residuals whose differences are the columns, newest last
        residual = (r - R[:, :newer].sum(1)).float()
        history.store(torch.zeros(n), lambda a, b, residual=residual: residual[a:b])
    problem = joint.assemble([block], optimizer.options, Ranks())
    assert problem is not None
    g, slots = problem.solution.values, history.newest_first
    rows, target = history.residual_diffs[slots].double().T, history.last_residual.double()
    best = torch.linalg.lstsq(rows, target[:, None], driver="gelsd").solution[:, 0]
    return ((target - rows @ target.new_tensor(g)).norm() / (target - rows @ best).norm()).item() - 1


# ----------------------------------------------------------------------------------------------- second table


@dataclass(frozen=True)
class LeastSquares:
    """min |A x - b|^2 / 2, 200 unknowns, condition number of A about 30."""

    A: Tensor
    b: Tensor
    noise: Tensor

    @classmethod
    def of(cls, seed: int, noise: float) -> "LeastSquares":
        """The problem of a seed, with noise for every step."""
        randn = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        A = randn(400, 200) * torch.logspace(0, -1.5, 200, dtype=torch.float64)
        return cls(A, randn(400), noise * randn(STEPS, 200))

    @property
    def curvature(self) -> float:
        """The largest eigenvalue of A'A."""
        return torch.linalg.matrix_norm(self.A, ord=2).item() ** 2


BASES: dict[str, Callable[[list[Tensor], float], optim.Optimizer]] = {
    "SGD": lambda params, curvature: optim.SGD(params, lr=1 / curvature),
    "Nesterov": lambda params, curvature: optim.SGD(params, lr=0.3 / curvature, momentum=0.9, nesterov=True),
    "Adam": lambda params, curvature: optim.Adam(params, lr=0.02),
}


def training(seeds: range) -> list[list[object]]:
    """Rows of the second table."""
    rows: list[list[object]] = []
    for noise in (0.0, 0.1):
        for base in BASES:
            for safeguard in (None, DEFAULTS.safeguard):
                cells = [
                    _cell(seeds, base, noise, options and options | {"safeguard": safeguard})
                    for options in METHODS.values()
                ]
                rows.append([f"{noise:g}, {base}, {safeguard}", *cells])
    return rows


def _cell(seeds: range, base: str, noise: float, options: Settings | None) -> str:
    errors = [error(seed, base, noise, options) for seed in seeds]
    return f"{geometric_mean(errors):.1e}" if max(errors) < DIVERGED else "diverged"


def error(seed: int, base: str, noise: float, options: Settings | None) -> float:
    """|x - solution| / |solution| after 1,000 steps from 0; without options, of the base alone."""
    problem = LeastSquares.of(seed, noise)
    A, b = problem.A, problem.b
    solution = torch.linalg.lstsq(A, b[:, None]).solution[:, 0]
    x = torch.zeros(200, dtype=torch.float64, requires_grad=True)
    optimizer = BASES[base]([x], problem.curvature)
    if options is not None:
        optimizer = Anderson(optimizer, history_size=10, **options)
    for step in range(STEPS):
        x.grad = A.T @ (A @ x.detach() - b) + problem.noise[step]
        optimizer.step()
    found = ((x.detach() - solution).norm() / solution.norm()).item()
    return found if isfinite(found) else inf


if __name__ == "__main__":
    main()
