"""Window and criteria of the moving average against NumPy, and the drift formulas of docs/algorithm."""

import math

import numpy as np
import pytest
import torch

from torch_anderson import Anderson
from torch_anderson.averaging import Window, noise_projection

CPU = torch.device("cpu")


def filled(points: np.ndarray, length: int, dtype: torch.dtype = torch.float64) -> Window:
    window = Window(length, points.shape[1], device=CPU, dtype=dtype)
    for point in torch.from_numpy(points).to(dtype):
        window.push(lambda a, b, point=point: point[a:b])
    return window


def variance(points: np.ndarray, criterion: str) -> np.ndarray:
    """Of each entry: about the mean, or about its straight line with t - 2 degrees of freedom."""
    if criterion == "paper":
        return np.var(points, axis=0)
    time = np.arange(len(points))
    slope, intercept = np.polyfit(time, points, 1)
    misfit = points - intercept - np.outer(time, slope)
    return (misfit**2).sum(0) / (len(points) - 2)


CRITERIA = [("paper", t) for t in (1, 2, 3, 5, 10)] + [("detrended", t) for t in (4, 5, 10)]


@pytest.mark.parametrize("pushed", [0, 1, 2, 7])
@pytest.mark.parametrize(("criterion", "t"), CRITERIA)
def test_noise_is_the_largest_standard_deviation_whatever_the_rings_position(criterion, t, pushed):
    rng = np.random.default_rng(t)
    points = rng.standard_normal((t + pushed, 6)) + np.outer(np.arange(t + pushed), rng.standard_normal(6))
    noise = filled(points, t).noise(noise_projection(t, criterion))
    assert noise.item() == pytest.approx(np.sqrt(variance(points[-t:], criterion).max()), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("t", [1, 3, 4])
def test_window_holds_the_last_points_and_their_mean(t):
    points = np.random.default_rng(0).standard_normal((7, 5))
    window = filled(points, t)
    np.testing.assert_allclose(window.mean(0, 5), points[-t:].mean(0), rtol=1e-14)
    np.testing.assert_allclose(window.mean(1, 3), points[-t:].mean(0)[1:3], rtol=1e-14)
    np.testing.assert_array_equal(window.newest, points[-1])


@pytest.mark.parametrize("t", [2, 5])
def test_window_is_full_only_after_t_points_and_again_after_clear(t):
    points = np.random.default_rng(0).standard_normal((t - 1, 3))
    window = filled(points, t)
    assert not window.full
    window.push(lambda a, b: torch.zeros(3, dtype=torch.float64)[a:b])
    assert window.full
    window.clear()
    assert not window.full


@pytest.mark.parametrize(("criterion", "t"), [("paper", 2), ("paper", 10), ("detrended", 4), ("detrended", 10)])
def test_float32_points_far_from_zero_keep_their_variance(criterion, t):
    # Spread 1e-3 around weights of 1,000: E[w^2] - E[w]^2 in float32 would be all cancellation. Compared with what
    # float32 holds of the points, so that only the computation is judged.
    rng = np.random.default_rng(0)
    offset = 1000 * rng.standard_normal(50)
    points = (offset + 1e-3 * rng.standard_normal((t, 50))).astype(np.float32)
    window = filled(points, t, torch.float32)
    exact = points.astype(np.float64)
    noise = window.noise(noise_projection(t, criterion))
    assert noise.item() == pytest.approx(np.sqrt(variance(exact, criterion).max()), rel=1e-4)
    np.testing.assert_allclose(window.mean(0, 50), exact.mean(0), rtol=1e-7)


@pytest.mark.parametrize("criterion", ["paper", "detrended"])
def test_noise_of_vectors_longer_than_a_chunk_sees_every_entry(criterion):
    n, t = 2**16 + 3, 5
    for entry in (0, 2**16 - 1, 2**16, n - 1):
        points = np.zeros((t, n))
        points[:, entry] = [0, 3, -1, 4, 1]
        noise = filled(points, t).noise(noise_projection(t, criterion))
        assert noise.item() == pytest.approx(np.sqrt(variance(points[:, [entry]], criterion)[0]))


@pytest.mark.parametrize("t", [2, 4, 5, 10])
def test_noise_free_drift_is_noise_for_the_paper_and_none_for_a_straight_line(t):
    # Steps of 1: std / |r| = sqrt((t^2 - 1) / 12).
    window = filled(np.arange(t, dtype=float)[:, None] * [1.0, 0.2], t)
    assert window.noise(noise_projection(t, "paper")).item() == pytest.approx(math.sqrt((t**2 - 1) / 12))
    if t >= 4:
        assert window.noise(noise_projection(t, "detrended")).item() == pytest.approx(0, abs=1e-12)


def drift(steps: int, **options) -> list[float]:
    """Weights under a gradient of -1 at learning rate 1, without acceleration."""
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = Anderson(torch.optim.SGD([w], lr=1.0), period=10**9, store_period=10**9, **options)
    path = []
    for _ in range(steps):
        w.grad = -torch.ones_like(w)
        optimizer.step()
        path.append(w.item())
    return path


@pytest.mark.parametrize("t", [2, 3, 5, 10])
def test_fed_back_average_slows_drift_to_2_over_t_plus_1(t):
    path = drift(40 * t, average_window=t, average_tolerance=0.0)
    assert path[-1] - path[-2] == pytest.approx(2 / (t + 1), rel=1e-6)


@pytest.mark.parametrize("t", [2, 5, 10])
def test_papers_criterion_at_its_tolerance_never_turns_itself_off(t):
    # Once averages are fed back, drift still gives std / |r| = sqrt((t - 1) / (3 (t + 1))): 0.33 to 0.58.
    path = np.array(drift(40 * t, average_window=t, average_tolerance=0.1))
    raw = path[-t - 1 : -1] + 1  # the points of the window: where the base steps ended
    assert np.std(raw) == pytest.approx(math.sqrt((t - 1) / (3 * (t + 1))), rel=1e-6)


@pytest.mark.parametrize("t", [4, 10])
def test_detrended_criterion_leaves_drift_alone(t):
    options = {"average_window": t, "average_criterion": "detrended", "average_tolerance": 1e-6}
    assert drift(3 * t, **options)[-1] == 3 * t


def test_noise_projection_on_a_constant_is_zero():
    for criterion, t in CRITERIA:
        assert noise_projection(t, criterion).sum(1).abs().max() < 1e-14
