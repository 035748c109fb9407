"""fixed_point against SciPy's solvers and hand-computed solutions; batches, failure, extreme numbers."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize

from torch_anderson import fixed_point


def contraction(seed: int, n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """A and b of the nonlinear map x -> tanh(A x) + b, |A| = 0.95."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, dtype=torch.float64, generator=generator)
    b = torch.randn(n, dtype=torch.float64, generator=generator)
    return 0.95 * A / torch.linalg.matrix_norm(A, ord=2), b


def tanh_map(A: torch.Tensor, b: torch.Tensor):
    return lambda x: torch.tanh(x @ A.mT) + b


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mixing", ["anderson", "paper"])
def test_solution_is_that_of_scipy(seed, mixing):
    A, b = contraction(seed)
    solution = fixed_point(tanh_map(A, b), torch.zeros_like(b), tol=1e-12, mixing=mixing, relaxation=0.9)
    root = optimize.fsolve(lambda x: np.tanh(A.numpy() @ x) + b.numpy() - x, np.zeros(len(b)), xtol=1e-13)
    assert solution.converged
    np.testing.assert_allclose(solution.x, root, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_as_few_evaluations_as_scipys_anderson(seed):
    A, b = contraction(seed)
    counts = []

    def residual(x: np.ndarray) -> np.ndarray:
        counts.append(1)
        return np.tanh(A.numpy() @ x) + b.numpy() - x

    # SciPy's alpha = 1 is the plain step x + r, its M counts differences as our history_size does.
    optimize.anderson(residual, np.zeros(len(b)), M=5, alpha=1, w0=0, f_tol=1e-9, line_search=None)
    solution = fixed_point(tanh_map(A, b), torch.zeros_like(b), history_size=5, tol=0.0, max_iterations=200)
    ours = int((solution.trace > 1e-9).sum()) + 1
    assert ours <= len(counts) + 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mixing", ["anderson", "paper"])
def test_iterates_are_those_of_a_textbook_anderson(seed, mixing):
    A, b = contraction(seed)
    g, x = tanh_map(A, b), torch.zeros_like(b)
    xs, residuals, expected = [], [], []
    for _ in range(10):
        xs, residuals = [*xs, x][-4:], [*residuals, g(x) - x][-4:]
        expected.append(residuals[-1].norm())
        W, R = (torch.stack(vectors, dim=1).diff() for vectors in (xs, residuals))
        step = torch.linalg.lstsq(R, residuals[-1][:, None], driver="gelsd").solution[:, 0] if len(xs) > 1 else b[:0]
        if mixing == "anderson":
            x = xs[-1] - W @ step + 0.8 * (residuals[-1] - R @ step)
        else:
            x = xs[-1] + 0.8 * (residuals[-1] - (W + R) @ step)
    options = {"history_size": 3, "relaxation": 0.8, "regularization": 0.0, "max_iterations": 10}
    solution = fixed_point(g, torch.zeros_like(b), mixing=mixing, **options)
    torch.testing.assert_close(solution.trace, torch.stack(expected), rtol=1e-6, atol=1e-12)


def test_regularization_is_relative_to_the_length_of_the_columns():
    # x -> x / 2 + 1 from 0: r = 1, then r = 1/2 at 1, c = -1 / (1 + 1) instead of -1, so x = 3/2 + 1/4 and r = 1/8.
    solution = fixed_point(
        lambda x: x / 2 + 1, torch.zeros(1, dtype=torch.float64), regularization=1.0, max_iterations=3, tol=0.0
    )
    assert solution.trace.tolist() == [1.0, 0.5, 0.125]
    assert solution.predicted[:2].tolist() == [1.0, 0.25]


@pytest.mark.parametrize(("start", "step"), [(1e-4, 0.9e-3), (0.0, 0.9e-3), (1e4, 9.0)])
@pytest.mark.parametrize("met", [True, False])
def test_tolerance_is_absolute_below_one_and_relative_above(start, step, met):
    step = step if met else step * 1.25
    solution = fixed_point(lambda x: x + step, torch.tensor([start], dtype=torch.float64), tol=1e-3, max_iterations=1)
    assert bool(solution.converged) is met


def test_batch_is_a_loop_over_its_problems():
    problems = [contraction(seed, n=6) for seed in range(5)]
    A, b = (torch.stack(parts) for parts in zip(*problems, strict=True))
    options = {"tol": 1e-10, "history_size": 4, "max_iterations": 60}
    together = fixed_point(
        lambda x: torch.tanh((A @ x.unsqueeze(-1)).squeeze(-1)) + b, torch.zeros_like(b), batched=True, **options
    )
    for i, (matrix, offset) in enumerate(problems):
        alone = fixed_point(tanh_map(matrix, offset), torch.zeros_like(offset), **options)
        steps = alone.iterations
        torch.testing.assert_close(together.trace[:steps, i], alone.trace, rtol=1e-5, atol=1e-13)
        torch.testing.assert_close(together.x[i], alone.x, rtol=0, atol=1e-9)
        assert together.converged[i] and alone.converged
    assert together.iterations == max(
        fixed_point(tanh_map(*problem), torch.zeros(6, dtype=torch.float64), **options).iterations
        for problem in problems
    )


def test_problem_in_a_batch_survives_a_neighbour_that_fails():
    # One converges, one is not finite from its third evaluation on, one is at its solution from the start.
    calls = []

    def g(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.clone())
        broken = x[1] + 1 if len(calls) < 3 else torch.full_like(x[1], math.nan)
        return torch.stack([torch.cos(x[0]), broken, x[2]])

    solution = fixed_point(g, torch.ones(3, 2, dtype=torch.float64), tol=1e-12, batched=True)
    assert solution.converged.tolist() == [True, False, True]
    np.testing.assert_allclose(solution.x[0], 0.7390851332151607, atol=1e-11)
    assert solution.x[1].tolist() == calls[-1][1].tolist() == [1.0, 1.0]  # its first iterate was as good as the next
    assert solution.x[2].tolist() == [1.0, 1.0]
    assert solution.residual_norm[2] == 0


SHAPES = [(1,), (2, 3), (2, 3, 4)]


@pytest.mark.parametrize(("shape", "batched"), [((), False), *((s, b) for s in SHAPES for b in (False, True))])
def test_any_shape_comes_back_as_it_was(shape, batched):
    solution = fixed_point(torch.cos, torch.ones(shape, dtype=torch.float64), tol=1e-10, batched=batched)
    assert solution.x.shape == shape
    assert solution.converged.shape == solution.residual_norm.shape == (shape[:1] if batched else ())
    np.testing.assert_allclose(solution.x, np.full(shape, 0.7390851332151607), atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "tol"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_type_is_kept_and_its_accuracy_reached(dtype, tol):
    seen = []

    def g(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return torch.cos(x)

    solution = fixed_point(g, torch.ones(4, dtype=dtype), tol=tol)
    assert solution.converged
    assert solution.x.dtype == dtype and set(seen) == {dtype}
    np.testing.assert_allclose(solution.x.double(), 0.7390851332151607, atol=2 * tol)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_map_is_solved(dtype):
    A = torch.tensor([[0.5j, 0.2], [-0.1, 0.6 + 0.3j]], dtype=dtype)
    b = torch.tensor([1.0 + 1j, -2j], dtype=dtype)
    solution = fixed_point(lambda x: A @ x + b, torch.zeros(2, dtype=dtype), tol=1e-6)
    assert solution.converged and solution.x.dtype == dtype
    assert not solution.residual_norm.is_complex()
    torch.testing.assert_close(solution.x, torch.linalg.solve(torch.eye(2, dtype=dtype) - A, b), rtol=0, atol=2e-5)


def test_start_that_is_the_solution_needs_one_evaluation():
    solution = fixed_point(lambda x: x.clone(), torch.ones(3))
    assert (bool(solution.converged), solution.iterations) == (True, 1)
    assert solution.residual_norm.item() == 0.0
    assert solution.x.tolist() == [1.0] * 3


def test_iterating_on_after_convergence_gives_no_nan():
    A, b = contraction(0)
    solution = fixed_point(tanh_map(A, b), torch.zeros_like(b), tol=0.0, regularization=0.0, max_iterations=150)
    assert solution.trace.isfinite().all() and solution.predicted.isfinite().all()
    assert solution.residual_norm < 1e-14


def test_not_converging_is_told_and_not_raised():
    solution = fixed_point(lambda x: x + 1, torch.zeros(3), max_iterations=7)
    assert not solution.converged
    assert solution.iterations == len(solution.trace) == 7
    assert solution.residual_norm.item() == pytest.approx(math.sqrt(3))


def test_expansive_linear_map_is_solved_where_plain_iteration_diverges():
    A = torch.diag(torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64))
    solution = fixed_point(lambda x: A @ x + 1, torch.zeros(3, dtype=torch.float64), tol=1e-9)
    assert solution.converged
    np.testing.assert_allclose(solution.x, [1 / (1 - 3), 1 / (1 + 2), 1 / (1 - 0.5)], atol=1e-8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("first", [1, 2, 4])
def test_value_that_is_not_finite_ends_at_the_best_iterate(value, first):
    calls = []

    def g(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.clone())
        return torch.full_like(x, value) if len(calls) >= first else torch.cos(x)

    start = torch.ones(2, dtype=torch.float64)
    solution = fixed_point(g, start, tol=1e-14)
    assert not solution.converged
    assert solution.iterations == first
    assert solution.x.isfinite().all()
    if first > 1:
        norms = [float((torch.cos(x) - x).norm()) for x in calls[: first - 1]]
        assert solution.residual_norm.item() == pytest.approx(min(norms))
        torch.testing.assert_close(solution.x, calls[int(np.argmin(norms))])


def test_residual_norm_is_that_of_the_returned_iterate_and_within_tol():
    A, b = contraction(1)
    g = tanh_map(A, b)
    solution = fixed_point(g, torch.zeros_like(b), tol=1e-8)
    norm = (g(solution.x) - solution.x).norm()
    torch.testing.assert_close(solution.residual_norm, norm, rtol=1e-9, atol=1e-15)
    assert norm <= 1e-8 * solution.x.norm().clamp_min(1.0)
    assert solution.trace.min() == solution.residual_norm


def test_start_and_the_maps_tensors_are_left_as_they_were():
    start = torch.ones(3, dtype=torch.float64)
    constant = torch.full((3,), 0.3, dtype=torch.float64)
    solution = fixed_point(lambda x: constant, start)
    assert start.tolist() == [1.0] * 3 and constant.tolist() == [0.3] * 3
    assert solution.converged and solution.x.tolist() == constant.tolist()


def test_options_may_be_scalars_of_numpy_and_torch():
    A, b = contraction(0)
    plain = {"history_size": 3, "relaxation": 0.75, "tol": 0.5**30, "max_iterations": 40, "regularization": 0.5**40}
    expected = fixed_point(tanh_map(A, b), torch.zeros_like(b), **plain)
    for wrap in (np.asarray, torch.tensor, lambda v: np.int32(v) if isinstance(v, int) else np.float32(v)):
        solution = fixed_point(tanh_map(A, b), torch.zeros_like(b), **{k: wrap(v) for k, v in plain.items()})
        assert torch.equal(solution.trace, expected.trace)


# ------------------------------------------------------------------------------------------------- the extremes


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [(torch.float32, v) for v in (1.0, 1e19, 1e20, 1e36)] + [(torch.float64, v) for v in (1.0, 1e200, 1e300)],
)
@pytest.mark.parametrize("mixing", ["anderson", "paper"])
def test_solution_is_right_up_to_the_range_of_the_dtype(dtype, offset, mixing):
    slopes = torch.tensor([0.5, 0.9, 0.99], dtype=dtype)
    solution = fixed_point(lambda x: slopes * x + offset, torch.zeros(3, dtype=dtype), mixing=mixing)
    assert solution.converged
    scaled = solution.x.double() / offset
    np.testing.assert_allclose(scaled, [2.0, 10.0, 100.0], rtol=1e-3)
    assert solution.residual_norm / offset <= 1e-6 * scaled.norm()


def test_norm_of_an_iterate_beyond_the_range_of_float64_is_no_infinite_tolerance():
    start = torch.full((2,), 1.7e308, dtype=torch.float64)
    solution = fixed_point(lambda x: torch.full_like(x, 1e308), start, max_iterations=3)
    assert solution.x.tolist() == [1e308, 1e308] and solution.residual_norm == 0


def test_residual_whose_square_underflows_is_not_taken_for_zero():
    solution = fixed_point(lambda x: 0.5 * x + 1e-200, torch.zeros(2, dtype=torch.float64), tol=0.0)
    assert solution.converged
    np.testing.assert_allclose(solution.x / 1e-200, [2.0, 2.0], rtol=1e-12)


def test_extrapolation_beyond_the_range_of_the_dtype_gives_way_to_a_plain_step():
    # The first secant predicts a root near 1e40; the residual falls to zero at 1e38.
    def g(x: torch.Tensor) -> torch.Tensor:
        return x + torch.minimum(1e37 - 1e-3 * x, 1e38 - x)

    solution = fixed_point(g, torch.zeros(1))
    assert solution.converged
    np.testing.assert_allclose(solution.x, [1e38], rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_residual_is_measured_at_the_returned_point_as_the_map_saw_it(dtype):
    seen = []

    def g(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return torch.cos(x)

    solution = fixed_point(g, torch.tensor([1.0, 0.3, -2.0], dtype=dtype), tol=1e-2)
    assert solution.converged
    assert any(torch.equal(solution.x, x) for x in seen)
    norms = [float((torch.cos(x).double() - x.double()).norm()) for x in seen]
    np.testing.assert_allclose(solution.trace, norms, rtol=1e-12)
    assert solution.residual_norm.item() == pytest.approx(min(norms), rel=1e-12)


def test_map_without_a_fixed_point_does_not_converge_by_drifting_away():
    # |g(x) - x| = 1 everywhere: small relative to |x| once x is large, never smaller than at the start.
    solution = fixed_point(lambda x: x + 1, torch.zeros(1), tol=0.1, max_iterations=50)
    assert not solution.converged


@pytest.mark.parametrize(("shape", "batched"), [((0,), False), ((3, 0), False), ((0,), True), ((0, 4), True)])
def test_empty_tensor_is_its_own_solution(shape, batched):
    solution = fixed_point(torch.cos, torch.ones(shape), batched=batched)
    problems = shape[:1] if batched else ()
    assert solution.x.shape == shape and solution.iterations == 1
    assert solution.converged.shape == solution.residual_norm.shape == problems
    assert solution.trace.shape == solution.predicted.shape == (1, *problems)
    assert solution.converged.all()


def test_batch_of_empty_problems_has_converged():
    solution = fixed_point(torch.cos, torch.ones(3, 0), batched=True)
    assert solution.converged.tolist() == [True] * 3 and solution.residual_norm.tolist() == [0.0] * 3
