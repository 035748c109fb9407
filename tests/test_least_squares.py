"""The small solver against NumPy's least squares, over condition numbers, scales and degenerate columns."""

import numpy as np
import pytest
import torch

from torch_anderson import Storage
from torch_anderson._anderson.least_squares import solve
from torch_anderson._anderson.pairs import FLOAT64_NUMBERS, Pairs
from torch_anderson._anderson.step import Problem, solved
from torch_anderson._tensors.blocks import Space

N, COLUMNS = 300, 8


def conditioned(
    condition: float, seed: int = 0, columns: int = COLUMNS, outside: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """R (N x columns) of that condition number, and r: all directions of R, and `outside` orthogonal to them."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((N, columns + 1)))
    v, _ = np.linalg.qr(rng.standard_normal((columns, columns)))
    R = q[:, :columns] * np.geomspace(1, 1 / condition, columns) @ v.T
    return R, q @ np.append(rng.standard_normal(columns), outside)


def gram_system(R: np.ndarray, r: np.ndarray) -> tuple[list[list[float]], list[float]]:
    gram = R.T @ R
    return [gram[i, : i + 1].tolist() for i in range(len(gram))], (R.T @ r).tolist()


class Stored:
    """Residuals as pairs of ``n`` numbers keep them; those of more than FLOAT64_NUMBERS in float32."""

    def __init__(self, columns: int, n: int) -> None:
        self.space = Space([{"params": [torch.zeros(n, requires_grad=True)]}], None)
        self.pairs = Pairs(self.space, columns, Storage())
        self.n = n

    def store(self, residual: np.ndarray) -> None:
        value = torch.from_numpy(np.pad(residual, (0, self.n - len(residual)))).float()
        self.pairs.store([value], [value.clone()])

    def problem(self) -> Problem:
        return solved(self.pairs, 0.0)

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """R, newest column first, and r, as they are stored."""
        [rows] = self.pairs.rows
        R = rows.residual_diffs[self.pairs.newest_first].double().numpy().T
        return R, rows.last_residual.double().numpy()


def norm_left(R: np.ndarray, r: np.ndarray, g: np.ndarray | list[float]) -> float:
    return float(np.linalg.norm(r - R @ np.asarray(g)))


def optimum(R: np.ndarray, r: np.ndarray) -> float:
    return norm_left(R, r, np.linalg.lstsq(R, r, rcond=None)[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outside", [1.0, 1e-3])
@pytest.mark.parametrize("condition", [1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("n", [N, FLOAT64_NUMBERS + 1])
def test_residual_from_float32_columns_is_the_optimum(n, condition, outside, seed):
    # Products accumulated in float32 leave up to 20 times the optimum at outside = 1, 10,000 times at 1e-3. Rows of
    # more than FLOAT64_NUMBERS numbers are kept in float32, shorter ones in float64.
    R, r = conditioned(condition, seed, outside=outside)
    stored = Stored(COLUMNS, n)
    for residual in [r - R[:, :j].sum(1) for j in range(COLUMNS + 1)][::-1]:  # R is their differences
        stored.store(residual)
    problem = stored.problem()
    R, r = stored.columns
    found = problem.c
    assert norm_left(R, r, found.values) <= 1.001 * optimum(R, r)
    # fitted_sq is known to the rounding of as many columns times |scaled g|^2: normal equations cannot do better.
    known = COLUMNS * np.finfo(float).eps * float(np.sum((found.values * np.linalg.norm(R, axis=0)) ** 2))
    if condition > 100 or outside < 1:  # there products are exact
        assert found.fitted_sq == pytest.approx(r @ r - norm_left(R, r, found.values) ** 2, rel=1e-12, abs=known)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e8])
def test_solution_does_not_depend_on_the_scale_of_the_residuals(scale):
    R, r = conditioned(1e3)
    expected = solve(*gram_system(R, r), 1e-8)
    found = solve(*gram_system(scale * R, scale * r), 1e-8)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-6)
    assert found.rank == expected.rank == COLUMNS


def test_solution_does_not_depend_on_the_scale_of_a_column():
    R, r = conditioned(1e3)
    lengths = np.geomspace(1e-8, 1e8, COLUMNS)
    expected = solve(*gram_system(R, r), 1e-8).values
    found = solve(*gram_system(R * lengths, r), 1e-8).values
    np.testing.assert_allclose(found * lengths, expected, rtol=1e-6)


def augmented(R: np.ndarray, r: np.ndarray, regularization: float) -> np.ndarray:
    """argmin |r - R g|^2 + regularization |D g|^2, D the lengths of the columns."""
    damping = np.sqrt(regularization) * np.diag(np.linalg.norm(R, axis=0))
    return np.linalg.lstsq(np.vstack([R, damping]), np.concatenate([r, np.zeros(R.shape[1])]), rcond=None)[0]


@pytest.mark.parametrize("regularization", [1.0, 1e-2, 1e-4, 1e-6])
def test_regularised_solution_is_that_of_the_augmented_system(regularization):
    # Not below 1e-6: normal equations are accurate to 1e-16 / regularization.
    R, r = conditioned(1e5, columns=5)
    R = R * [1, 10, 0.1, 3, 1e-4]
    expected = augmented(R, r, regularization)
    found = solve(*gram_system(R, r), regularization)
    np.testing.assert_allclose(found.values, expected, rtol=1e-7)
    assert found.fitted_sq == pytest.approx(r @ r - norm_left(R, r, expected) ** 2, rel=1e-7)


# Degenerate columns. Index 0 is the newest.


def zero_columns(R: np.ndarray) -> np.ndarray:
    return R * [1, 0, 1, 0]


def newest_zero(R: np.ndarray) -> np.ndarray:
    return R * [0, 1, 1, 1]


def all_zero(R: np.ndarray) -> np.ndarray:
    return 0 * R


def duplicates(R: np.ndarray) -> np.ndarray:
    return R[:, [0, 0, 1, 0]]


def opposite(R: np.ndarray) -> np.ndarray:
    return R[:, [0, 1, 0, 1]] * [1, 1, -3, -1e-5]


def collinear(R: np.ndarray) -> np.ndarray:
    return np.stack([R[:, 0], R[:, 1], R[:, 0] + R[:, 1], R[:, 0] - 2 * R[:, 1]], axis=1)


def nearly_collinear(R: np.ndarray) -> np.ndarray:
    return R[:, :1] + 1e-9 * R


def tiny_and_huge(R: np.ndarray) -> np.ndarray:
    return R * [1e-140, 1e140, 1e-100, 1.0]


DEGENERATE = [zero_columns, newest_zero, all_zero, duplicates, opposite, collinear, nearly_collinear, tiny_and_huge]


@pytest.mark.parametrize("regularization", [0.0, 1e-12, 1e-6])
@pytest.mark.parametrize("damage", DEGENERATE)
def test_degenerate_columns_give_finite_coefficients_that_fit(damage, regularization):
    R, r = conditioned(10, columns=4)
    R = damage(R)
    values = solve(*gram_system(R, r), regularization).values
    assert np.isfinite(values).all()
    # What may be lost: directions that the columns hold to less than the tolerances.
    lengths = np.linalg.norm(R, axis=0)
    expected = norm_left(R / np.where(lengths, lengths, 1), r, augmented(R / np.where(lengths, lengths, 1), r, 1e-6))
    assert norm_left(R, r, values) <= 1.001 * expected


@pytest.mark.parametrize(
    ("damage", "kept"),
    [(duplicates, [0, 2]), (opposite, [0, 1]), (collinear, [0, 1]), (newest_zero, [1, 2, 3]), (all_zero, [])],
)
def test_older_columns_that_depend_on_newer_ones_are_dropped(damage, kept):
    R, r = conditioned(10, columns=4)
    found = solve(*gram_system(damage(R), r), 0.0)
    assert np.flatnonzero(found.values).tolist() == kept
    assert found.rank == len(kept)


def excess(stored: Stored) -> float:
    """|r - R g| over its minimum, as a step of ``Anderson`` would have it."""
    problem = stored.problem()
    R, r = stored.columns
    assert problem.gain == pytest.approx(norm_left(R, r, problem.c.values) / np.linalg.norm(r), abs=1e-2)
    return norm_left(R, r, problem.c.values) / optimum(R, r)


def test_products_are_precise_only_while_columns_are_collinear():
    rng = np.random.default_rng(0)
    stored = Stored(4, FLOAT64_NUMBERS + 1)
    direction, residual = rng.standard_normal(N), rng.standard_normal(N)
    precise = []
    for step in range(16):
        collinear = 5 <= step < 8
        residual = residual + (direction + 1e-4 * rng.standard_normal(N) if collinear else rng.standard_normal(N))
        stored.store(residual)
        if step > 1:
            assert excess(stored) <= 1.001
            precise.append(stored.pairs.precise)
    assert precise[0] is False
    assert True in precise
    assert precise[-1] is False
