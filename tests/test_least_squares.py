"""The small solvers against NumPy's least squares, over condition numbers, scales and degenerate columns."""

import numpy as np
import pytest
import torch

from torch_anderson import Anderson, joint
from torch_anderson.distributed import Ranks
from torch_anderson.history import SHORT, History
from torch_anderson.least_squares import solve_gram, solve_gram_batch, solve_qr
from torch_anderson.options import Options
from torch_anderson.parameters import Block

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


def measured(R: np.ndarray, r: np.ndarray, dtype: torch.dtype, n: int) -> tuple[np.ndarray, np.ndarray, list, list]:
    """Columns (newest first) and residual as a history of `n` numbers in `dtype` keeps them, and their products."""
    history = History(R.shape[1], n, device=torch.device("cpu"), dtype=dtype)
    R, r = np.pad(R, [(0, n - N), (0, 0)]), np.pad(r, (0, n - N))
    residuals = [r - R[:, :j].sum(1) for j in range(R.shape[1] + 1)][::-1]  # so that R is their differences
    zero = torch.zeros(n, dtype=dtype)
    for residual in residuals:
        value = torch.from_numpy(residual).to(dtype)
        history.store(zero, lambda a, b, value=value: value[a:b])
    slots = history.newest_first
    products = history.products(slots)[0].numpy()
    gram = [products[slot, : i + 1].tolist() for i, slot in enumerate(slots)]
    stored = history.residual_diffs[slots].double().numpy().T
    return stored, history.last_residual.double().numpy(), gram, products[-1].tolist()


def norm_left(R: np.ndarray, r: np.ndarray, g: np.ndarray | list[float]) -> float:
    return float(np.linalg.norm(r - R @ np.asarray(g)))


def optimum(R: np.ndarray, r: np.ndarray) -> float:
    return norm_left(R, r, np.linalg.lstsq(R, r, rcond=None)[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outside", [1.0, 1e-3])
@pytest.mark.parametrize("condition", [1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("n", [N, SHORT + 1])
def test_residual_from_float32_columns_is_the_optimum(n, condition, outside, seed):
    # Products accumulated in float32 leave up to 20 times the optimum at outside = 1, 10,000 times at 1e-3. Rows of
    # more than SHORT numbers are kept in float32, shorter ones in float64.
    R, r, gram, rhs = measured(*conditioned(condition, seed, outside=outside), torch.float32, n)
    found = solve_gram(gram, rhs, 0.0)
    assert norm_left(R, r, found.values) <= 1.001 * optimum(R, r)
    # fitted_sq is known to rounding in the Gram matrix times |scaled g|^2: normal equations cannot do better.
    known = 1e-15 * float(np.sum((found.values * np.linalg.norm(R, axis=0)) ** 2))
    assert found.fitted_sq == pytest.approx(r @ r - norm_left(R, r, found.values) ** 2, rel=1e-12, abs=known)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e8])
def test_solution_does_not_depend_on_the_scale_of_the_residuals(scale):
    R, r = conditioned(1e3)
    expected = solve_gram(*gram_system(R, r), 1e-8)
    found = solve_gram(*gram_system(scale * R, scale * r), 1e-8)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-6)
    assert found.rank == expected.rank == COLUMNS


def test_solution_does_not_depend_on_the_scale_of_a_column():
    R, r = conditioned(1e3)
    lengths = np.geomspace(1e-8, 1e8, COLUMNS)
    expected = solve_gram(*gram_system(R, r), 1e-8).values
    found = solve_gram(*gram_system(R * lengths, r), 1e-8).values
    np.testing.assert_allclose(found * lengths, expected, rtol=1e-6)


def augmented(R: np.ndarray, r: np.ndarray, regularization: float) -> np.ndarray:
    """argmin |r - R g|^2 + regularization |D g|^2, D the lengths of the columns."""
    damping = np.sqrt(regularization) * np.diag(np.linalg.norm(R, axis=0))
    return np.linalg.lstsq(np.vstack([R, damping]), np.concatenate([r, np.zeros(R.shape[1])]), rcond=None)[0]


@pytest.mark.parametrize("solve", ["gram", "qr", "batch"])
@pytest.mark.parametrize("regularization", [1.0, 1e-2, 1e-4, 1e-6])
def test_regularised_solution_is_that_of_the_augmented_system(solve, regularization):
    # Not below 1e-6: normal equations are accurate to 1e-16 / regularization.
    R, r = conditioned(1e5, columns=5)
    R = R * [1, 10, 0.1, 3, 1e-4]
    expected = augmented(R, r, regularization)
    fitted_sq = r @ r - norm_left(R, r, expected) ** 2
    if solve == "batch":
        gram, rhs = torch.from_numpy(R.T @ R), torch.from_numpy(R.T @ r)
        values, fitted = (x.numpy() for x in solve_gram_batch(gram, rhs, regularization))
    else:
        tensors = torch.from_numpy(R), torch.from_numpy(r)
        found = solve_qr(*tensors, regularization) if solve == "qr" else solve_gram(*gram_system(R, r), regularization)
        values, fitted = found.values, found.fitted_sq
    np.testing.assert_allclose(values, expected, rtol=1e-7)
    assert fitted == pytest.approx(fitted_sq, rel=1e-7)


@pytest.mark.parametrize("condition", [1, 1e3, 1e6, 1e10])
def test_qr_finds_the_optimum_without_normal_equations(condition):
    R, r = conditioned(condition)
    found = solve_qr(torch.from_numpy(R), torch.from_numpy(r), 0.0)
    assert norm_left(R, r, found.values) <= (1 + 1e-9) * optimum(R, r)
    assert found.rank == COLUMNS


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
@pytest.mark.parametrize("solve", ["gram", "qr", "batch"])
@pytest.mark.parametrize("damage", DEGENERATE)
def test_degenerate_columns_give_finite_coefficients_that_fit(damage, solve, regularization):
    R, r = conditioned(10, columns=4)
    R = damage(R)
    if solve == "gram":
        values = solve_gram(*gram_system(R, r), regularization).values
    elif solve == "qr":
        values = solve_qr(torch.from_numpy(R), torch.from_numpy(r), regularization).values
    else:
        values = solve_gram_batch(torch.from_numpy(R.T @ R), torch.from_numpy(R.T @ r), regularization)[0].tolist()
    assert np.isfinite(values).all()
    # What may be lost: directions that the columns hold to less than the tolerances.
    lengths = np.linalg.norm(R, axis=0)
    expected = norm_left(R / np.where(lengths, lengths, 1), r, augmented(R / np.where(lengths, lengths, 1), r, 1e-6))
    assert norm_left(R, r, values) <= 1.001 * expected


@pytest.mark.parametrize(
    ("damage", "kept"),
    [(duplicates, [0, 2]), (opposite, [0, 1]), (collinear, [0, 1]), (newest_zero, [1, 2, 3]), (all_zero, [])],
)
@pytest.mark.parametrize("solver", ["gram", "qr"])
def test_older_columns_that_depend_on_newer_ones_are_dropped(damage, kept, solver):
    R, r = conditioned(10, columns=4)
    R = damage(R)
    by_qr = solver == "qr"
    found = solve_qr(torch.from_numpy(R), torch.from_numpy(r), 0.0) if by_qr else solve_gram(*gram_system(R, r), 0.0)
    assert np.flatnonzero(found.values).tolist() == kept
    assert found.rank == len(kept)


@pytest.mark.parametrize("regularization", [0.0, 1e-8, 1e-2])
def test_batch_is_the_single_solver_for_each_of_its_problems(regularization):
    systems = [conditioned(condition, seed) for seed, condition in enumerate([1, 10, 100, 1000])]
    grams = torch.stack([torch.from_numpy(R.T @ R) for R, _ in systems])
    sides = torch.stack([torch.from_numpy(R.T @ r) for R, r in systems])
    values, fitted = solve_gram_batch(grams, sides, regularization)
    for (R, r), g, fit in zip(systems, values.numpy(), fitted.tolist(), strict=True):
        single = solve_gram(*gram_system(R, r), regularization)
        np.testing.assert_allclose(g, single.values, rtol=1e-8)
        assert fit == pytest.approx(single.fitted_sq, rel=1e-9)


def test_problem_in_a_batch_does_not_feel_a_degenerate_neighbour():
    R, r = conditioned(10)
    gram, rhs = torch.from_numpy(R.T @ R), torch.from_numpy(R.T @ r)
    alone, _ = solve_gram_batch(gram, rhs, 0.0)
    together, _ = solve_gram_batch(torch.stack([0 * gram, gram]), torch.stack([0 * rhs, rhs]), 0.0)
    torch.testing.assert_close(together[1], alone, rtol=1e-13, atol=0)
    assert not together[0].any()


def long_block(columns: int) -> tuple[Block, Options]:
    """Rows of more than SHORT numbers: they are kept, and at first multiplied, in float32."""
    optimizer = Anderson(
        torch.optim.SGD([torch.zeros(SHORT + 1, requires_grad=True)], lr=1.0), regularization=0.0, history_size=columns
    )
    [block] = optimizer._accelerator.build_blocks()
    return block, optimizer.options


def store(block: Block, residual: np.ndarray) -> None:
    value = torch.from_numpy(np.pad(residual, (0, block.n - len(residual)))).float()
    block.history.store(torch.zeros(block.n), lambda a, b: value[a:b])


def excess(block: Block, options: Options) -> float:
    """|r - R g| over its minimum, as a step of ``Anderson`` would have it."""
    problem = joint.assemble([block], options, Ranks())
    assert problem is not None
    R = block.history.residual_diffs[block.history.newest_first].double().numpy().T
    r = block.history.last_residual.double().numpy()
    assert problem.gain == pytest.approx(norm_left(R, r, problem.solution.values) / np.linalg.norm(r), abs=1e-2)
    return norm_left(R, r, problem.solution.values) / optimum(R, r)


@pytest.mark.parametrize("outside", [1.0, 1e-3])
@pytest.mark.parametrize("condition", [1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
def test_long_rows_get_products_that_are_good_enough_as_pairs_come_in(condition, outside):
    R, r = conditioned(condition, seed=0, outside=outside)
    block, options = long_block(R.shape[1])
    store(block, r - R.sum(1))
    for j in reversed(range(R.shape[1])):
        store(block, r - R[:, :j].sum(1))
        assert excess(block, options) <= 1.001
    if condition >= 1e4 or outside < 1e-2:
        assert block.system.exact
    elif condition <= 10:
        assert not block.system.exact


def test_products_are_exact_only_while_columns_are_collinear():
    rng = np.random.default_rng(0)
    block, options = long_block(4)
    direction, residual = rng.standard_normal(N), rng.standard_normal(N)
    exact = []
    for step in range(16):
        collinear = 5 <= step < 8
        residual = residual + (direction + 1e-4 * rng.standard_normal(N) if collinear else rng.standard_normal(N))
        store(block, residual)
        if step > 1:
            assert excess(block, options) <= 1.001
            exact.append(block.system.exact)
    assert exact[0] is False
    assert True in exact
    assert exact[-1] is False
