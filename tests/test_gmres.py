"""On a linear map, Anderson acceleration with a full history is GMRES: their residuals must agree."""

import numpy as np
import pytest
import torch
from scipy.linalg import circulant
from scipy.sparse.linalg import gmres

from torch_anderson import Anderson, fixed_point

N = 40


def linear_problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """M and b of the map x -> M x + b, M of spectral radius 0.9."""
    rng = np.random.default_rng(seed)
    M = rng.standard_normal((N, N))
    return 0.9 * M / abs(np.linalg.eigvals(M)).max(), rng.standard_normal(N)


def gmres_residuals(M: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|(I - M) x_k - b| / |b| at k = 0, 1, ... from 0."""
    norms: list[float] = [1.0]
    gmres(np.eye(N) - M, b, rtol=1e-14, restart=N, maxiter=1, callback=norms.append, callback_type="pr_norm")
    return np.array(norms)


def accelerate(M: np.ndarray, b: np.ndarray, steps: int, **options) -> tuple[torch.Tensor, list[float], list[str]]:
    """Weights, predicted residuals |r - R g| / |b| and causes of gradient descent whose step is the map."""
    matrix, offset = torch.from_numpy(M), torch.from_numpy(b)
    w = torch.zeros(len(b), dtype=torch.float64, requires_grad=True)
    options = {"history_size": N, "regularization": 0.0, "safeguard": None} | options
    optimizer = Anderson(torch.optim.SGD([w], lr=1.0), residual="step", **options)
    records = []
    optimizer.register_acceleration_hook(records.append)
    for _ in range(steps):
        w.grad = w.detach() - (matrix @ w.detach() + offset)
        optimizer.step()
    norm = float(np.linalg.norm(b))
    return w.detach(), [r.predicted_residual_norm / norm for r in records], [r.cause for r in records]


def deviation(predicted: list[float], expected: np.ndarray) -> float:
    """Largest relative deviation from GMRES while its residual is above 1e-6 of the first."""
    count = int((expected > 1e-6).sum()) - 1
    assert count >= 10
    return float(np.abs(np.array(predicted[:count]) / expected[1 : count + 1] - 1).max())


@pytest.mark.parametrize("seed", range(6))
def test_predicted_residuals_are_those_of_gmres(seed):
    M, b = linear_problem(seed)
    _, predicted, _ = accelerate(M, b, N)
    assert deviation(predicted, gmres_residuals(M, b)) < 1e-8


@pytest.mark.parametrize("seed", range(6))
def test_predicted_residuals_of_fixed_point_are_those_of_gmres(seed):
    M, b = linear_problem(seed)
    matrix, offset = torch.from_numpy(M), torch.from_numpy(b)
    start = torch.zeros(N, dtype=torch.float64)
    solution = fixed_point(
        lambda x: matrix @ x + offset, start, history_size=N, regularization=0.0, tol=0.0, max_iterations=N
    )
    predicted = solution.predicted[1:] / np.linalg.norm(b)
    assert deviation(predicted.tolist(), gmres_residuals(M, b)) < 1e-8


@pytest.mark.parametrize("seed", range(3))
def test_weights_stay_at_the_solution_once_reached(seed):
    M, b = linear_problem(seed)
    solution = np.linalg.solve(np.eye(N) - M, b)
    after = [accelerate(M, b, steps)[0].numpy() for steps in (N + 20, 3 * N, 6 * N)]
    for w in after:
        np.testing.assert_allclose(w, solution, rtol=0, atol=1e-12 * np.abs(solution).max())


def test_problem_on_which_gmres_stagnates_is_solved_all_the_same():
    # I - M shifts cyclically: no Krylov space but the whole one reduces the residual, so the first Anderson step goes
    # back to where it came from and adds no direction. That costs m steps, until the columns that hold it have left.
    n = 8
    shift, b = circulant(np.eye(n)[1]), np.eye(n)[0]
    w, *_ = accelerate(np.eye(n) - shift, b, 2 * n + 1, history_size=n)
    np.testing.assert_allclose(w, np.linalg.solve(shift, b), atol=1e-12)
