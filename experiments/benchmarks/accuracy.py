"""Measures how exact Anderson is, against GMRES, direct solvers and optimal least squares.

python -m experiments.benchmarks.accuracy                 about two minutes
python -m experiments.benchmarks.accuracy --seeds 3       fewer problems of each kind
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from math import inf, isfinite
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import gmres
from torch import Tensor, nn, optim

from experiments.benchmarks.common import command
from experiments.benchmarks.problems import LeastSquares
from experiments.optimizers import LABELS, build
from experiments.text import header, table
from torch_anderson import Anderson

STEPS = 1000
HISTORY = 10
DIVERGED = 1e3
Settings = dict[str, Any]
Measure = Callable[..., float]
"""From a seed and a regularization."""

DEFAULT_REGULARIZATION = Anderson(optim.SGD([torch.zeros(1, requires_grad=True)])).options.regularization

METHODS: dict[str, Settings | None] = {
    "base alone": None,
    "default options": {},
    "step, p=10, no safeguard": {"residual": "step", "period": 10, "safeguard": None},
    "step, p=10, residual safeguard": {"residual": "step", "period": 10, "safeguard": "residual"},
    "step, p=1, no safeguard": {"residual": "step", "period": 1, "safeguard": None},
    "step, p=1, residual safeguard": {"residual": "step", "period": 1, "safeguard": "residual"},
}
"""The columns of the second table: jumps by gradients, and by residuals of steps every p steps."""


# ------------------------------------------------------------------------------------------------ first table


def exactness(seeds: range) -> list[list[object]]:
    """Rows of the first table: a measure without regularization, with the default one, and its limit."""
    measures: list[tuple[str, Measure, float]] = [
        ("deviation from GMRES while its residual is above 1e-6", gmres_deviation, 1e-8),
        ("relative error of SGD + Anderson at every step, after 1,000", every_step_error, 1e-10),
    ]
    for dtype, condition, limit in CONDITIONS:
        name = f"least-squares residual / optimum - 1, {str(dtype).removeprefix('torch.')}, condition {condition:.0e}"
        measures.append((name, partial(excess_residual, dtype=dtype, condition=condition), limit))
    rows: list[list[object]] = [
        ["relative error of SGD alone", _worst(seeds, lambda seed: error(seed, "sgd", 0.0, None)), "", ""],
        ["the same with Anderson as in the textbook, solved by SVD", _worst(seeds, textbook_error), "", "1e-10"],
    ]
    return [*rows, *(_exactness_row(seeds, *each) for each in measures)]


def _exactness_row(seeds: range, name: str, measure: Measure, limit: float) -> list[object]:
    values = 0.0, DEFAULT_REGULARIZATION
    exact, regularized = (_worst(seeds, partial(measure, regularization=each)) for each in values)
    return [name, exact, regularized, f"{limit:.0e}" + ("" if float(exact) <= limit else " !")]


def _worst(seeds: range, measure: Callable[[int], float]) -> str:
    return f"{max(map(measure, seeds)):.1e}"


def every_step_error(seed: int, regularization: float) -> float:
    """Relative error of SGD with an acceleration at every step."""
    return error(seed, "sgd", 0.0, _unguarded(regularization) | {"period": 1})


def _unguarded(regularization: float) -> Settings:
    """The paper's method, every jump made."""
    return {"residual": "step", "safeguard": None, "regularization": regularization}


def gmres_deviation(seed: int, regularization: float, n: int = 40) -> float:
    """Largest relative deviation of the predicted residual on x -> M x + b, M of spectral radius 0.9."""
    rng = np.random.default_rng(seed)
    M, b = rng.standard_normal((n, n)), rng.standard_normal(n)
    M *= 0.9 / abs(np.linalg.eigvals(M)).max()
    expected: list[float] = []
    gmres(np.eye(n) - M, b, rtol=1e-12, restart=n, maxiter=1, callback=expected.append, callback_type="pr_norm")

    matrix, offset = torch.from_numpy(M), torch.from_numpy(b)
    w = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    optimizer = Anderson(optim.SGD([w], lr=1.0), history_size=n, period=1, **_unguarded(regularization))
    predicted: list[float] = []
    optimizer.register_acceleration_hook(lambda record: predicted.append(record.predicted_residual_norm))
    for _ in range(n):
        w.grad = w.detach() - (matrix @ w.detach() + offset)
        optimizer.step()
    pairs = zip(predicted, np.array(expected) * np.linalg.norm(b), strict=False)
    return max(abs(ours / theirs - 1) for ours, theirs in pairs if theirs > 1e-6 * np.linalg.norm(b))


CONDITIONS = (
    (torch.float32, 1e2, 1e-3),
    (torch.float32, 1e4, 1e-3),
    (torch.float32, 1e5, 1e-3),
    (torch.float64, 1e6, 1e-2),
)
"""Types of the parameters, condition numbers of R, and limits. Without rounding, float32 allows no more than 1e5; in
float64, products of numbers that fill the type are rounded themselves."""
LARGEST_GAIN = 0.98
"""|r - R g| / |r| above which the library makes no jump."""


def excess_residual(seed: int, regularization: float, dtype: torch.dtype, condition: float, n: int = 40_000) -> float:
    """|r - R g| with the coefficients of an acceleration, relative to its minimum by SVD, minus 1.

    The coefficients are read from a second parameter: its residual of step k is tiny and along axis k alone, so that
    the jump takes it to 1 - g, in units of that residual.
    """
    residuals = residuals_of_condition(seed, condition, dtype, n)
    marks = 1e-9 * residuals[-1].double().norm() * torch.eye(HISTORY + 1, dtype=torch.float64)
    weights = torch.zeros(n, dtype=dtype, requires_grad=True)
    marked = torch.zeros(HISTORY + 1, dtype=torch.float64, requires_grad=True)
    options = _unguarded(regularization) | {"history_size": HISTORY, "period": HISTORY + 1}
    optimizer = Anderson(optim.SGD([weights, marked], lr=1.0), **options)
    for residual, mark in zip(residuals, marks, strict=True):
        weights.grad, marked.grad = -residual, -mark
        optimizer.step()
    g = 1 - (marked.detach() / marks.diag())[1:]
    exact = torch.cat([residuals.double(), marks], dim=1)
    R, r = exact.diff(dim=0).T, exact[-1]
    return ((r - R @ g).norm() / (r - R @ least_squares(R, r)).norm()).item() - 1


def least_squares(R: Tensor, r: Tensor) -> Tensor:
    """The coefficients that minimise |r - R g|, by SVD of the columns scaled to length 1."""
    lengths = R.norm(dim=0)
    return torch.linalg.lstsq(R / lengths, r[:, None], driver="gelsd").solution[:, 0] / lengths


def residuals_of_condition(seed: int, condition: float, dtype: torch.dtype, n: int) -> Tensor:
    """Residuals, one per row, whose differences have this condition number and leave 1e-3 of the last one unexplained.

    They are integers, small enough for their sums to be exact in the type: the optimizer then gets exactly these
    residuals, and only its solver is compared with the optimum.
    """
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q = torch.linalg.qr(randn(n, HISTORY + 1)).Q
    v = torch.linalg.qr(randn(HISTORY, HISTORY)).Q
    R = q[:, :HISTORY] * torch.logspace(0, -np.log10(condition), HISTORY, dtype=torch.float64) @ v
    r = q @ torch.cat([randn(HISTORY), torch.tensor([1e-3], dtype=torch.float64)])
    residuals = torch.stack([r - R[:, newer:].sum(1) for newer in range(HISTORY + 1)])
    largest_exact_integer = 2 / torch.finfo(dtype).eps
    return (residuals * (largest_exact_integer / residuals.abs().sum(0).max() / 2)).round().to(dtype)


def textbook_error(seed: int) -> float:
    """Relative error of SGD with an acceleration at every step, all of R kept in float64 and solved by SVD.

    As in the library, there is no jump if hardly any of the residual is explained.
    """
    problem = LeastSquares.of(seed, 0.0)
    rate, w = 1 / problem.curvature, torch.zeros(200, dtype=torch.float64)
    starts: list[Tensor] = []
    residuals: list[Tensor] = []
    for _ in range(STEPS):
        residual = -rate * gradient(problem, w)
        starts, residuals = [*starts, w][-HISTORY - 1 :], [*residuals, residual][-HISTORY - 1 :]
        w = w + residual
        if len(residuals) > 1:
            W, R = torch.stack(starts).diff(dim=0).T, torch.stack(residuals).diff(dim=0).T
            g = least_squares(R, residual)
            if (residual - R @ g).norm() <= LARGEST_GAIN * residual.norm():
                w = w - (W + R) @ g
    return relative_error(problem, w)


# ----------------------------------------------------------------------------------------------- second table


def relative_error(problem: LeastSquares, x: Tensor) -> float:
    """|x - solution| / |solution|; infinite where x is not finite."""
    solution = problem.solution
    found = ((x - solution).norm() / solution.norm()).item()
    return found if isfinite(found) else inf


def gradient(problem: LeastSquares, x: Tensor) -> Tensor:
    """A'(A x - b)."""
    return problem.A.T @ (problem.A @ x - problem.b)


RATES: dict[str, Callable[[float], float]] = {
    "sgd": lambda curvature: 1 / curvature,
    "nesterov": lambda curvature: 0.3 / curvature,
    "adam": lambda curvature: 0.02,
}
"""Learning rates of the bases."""


def training(seeds: range) -> list[list[object]]:
    """Rows of the second table."""
    rows: list[list[object]] = []
    for noise, base in product((0.0, 0.1), RATES):
        errors = [[error(seed, base, noise, options) for seed in seeds] for options in METHODS.values()]
        cells = [f"{geometric_mean(each):.1e}" if max(each) < DIVERGED else "diverged" for each in errors]
        rows.append([f"{noise:g}, {LABELS[base]}", *cells])
    return rows


def error(seed: int, base: str, noise: float, options: Settings | None) -> float:
    """Relative error after 1,000 steps from 0; that of the base alone without options."""
    problem = LeastSquares.of(seed, noise)
    x = nn.Parameter(torch.zeros(200, dtype=torch.float64))
    optimizer = build(base, [x], RATES[base](problem.curvature))
    if options is not None:
        optimizer = Anderson(optimizer, history_size=HISTORY, **options)
    for step in range(STEPS):
        x.grad = gradient(problem, x.detach()) + problem.noise[step]
        optimizer.step()
    return relative_error(problem, x.detach())


def main(seeds: int = 5) -> None:
    """Print both tables.

    Args:
        seeds: Problems of each kind.
    """
    print(header(), end="\n\n")
    print(table(exactness(range(seeds)), ["worst of all seeds", "regularization 0", "at the default", "limit at 0"]))
    print(
        f"\nRelative error after {STEPS:,} gradients, least squares with 200 unknowns, m = {HISTORY}, geometric mean:\n"
    )
    print(table(training(range(seeds)), ["noise, base", *METHODS]))


if __name__ == "__main__":
    command(main)
