"""Window and criteria of the moving average against NumPy, and the drift formulas of docs/algorithm."""

import math

import numpy as np
import pytest
import torch

from torch_anderson import Anderson, MovingAverage
from torch_anderson._anderson.average import CHUNK, Window
from torch_anderson._tensors.blocks import Space


def filled(points: np.ndarray, length: int, dtype: torch.dtype = torch.float64) -> Window:
    space = Space([{"params": [torch.zeros(points.shape[1], dtype=dtype, requires_grad=True)]}], None)
    window = Window(MovingAverage(length), space)
    push(window, points)
    return window


def push(window: Window, points: np.ndarray) -> None:
    for point in torch.from_numpy(points):
        window.push([point])


def is_full(window: Window) -> bool:
    return window.average(torch.tensor(1.0), [torch.empty_like(window.newest[0])]) is not None


def average(window: Window) -> tuple[np.ndarray, float]:
    """The mean of the points, and the largest standard deviation of an entry; the points stay."""
    [points], [newest], [shares] = window.points, window.newest, window._shares
    out = torch.full_like(newest, torch.nan)
    before = points.clone()
    noise = window._mean(points, shares, out)
    assert torch.equal(points, before)
    return out.numpy(), noise.item()


WINDOWS = (1, 2, 3, 5, 10)


@pytest.mark.parametrize("pushed", [0, 1, 2, 7])
@pytest.mark.parametrize("t", WINDOWS)
def test_noise_is_the_largest_standard_deviation_whatever_the_rings_position(t, pushed):
    rng = np.random.default_rng(t)
    points = rng.standard_normal((t + pushed, 6)) + np.outer(np.arange(t + pushed), rng.standard_normal(6))
    _, noise = average(filled(points, t))
    assert noise == pytest.approx(np.std(points[-t:], axis=0).max(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("pushed", [0, 1, 2, 7])
@pytest.mark.parametrize("t", WINDOWS)
def test_window_holds_the_last_points_and_their_mean(t, pushed):
    points = np.random.default_rng(0).standard_normal((t + pushed, 5))
    window = filled(points, t)
    np.testing.assert_allclose(average(window)[0], points[-t:].mean(0), rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(window.newest[0], points[-1])
    np.testing.assert_array_equal(sorted(window.points[0].tolist()), sorted(points[-t:].tolist()))


@pytest.mark.parametrize("t", [2, 5])
def test_window_is_full_only_after_t_points_and_again_after_clear(t):
    points = np.random.default_rng(0).standard_normal((t - 1, 3))
    window = filled(points, t)
    assert not is_full(window)
    push(window, np.zeros((1, 3)))
    assert is_full(window)
    window.clear()
    assert not is_full(window)
    points = np.random.default_rng(1).standard_normal((t, 3))
    push(window, points[:-1])
    assert not is_full(window)
    push(window, points[-1:])
    assert is_full(window)
    mean, noise = average(window)
    np.testing.assert_allclose(mean, points.mean(0), rtol=1e-14, atol=1e-15)
    assert noise == pytest.approx(np.std(points, axis=0).max(), rel=1e-12)


@pytest.mark.parametrize("t", [2, 10])
def test_float32_points_far_from_zero_keep_their_variance(t):
    # Spread 1e-3 around weights of 1,000: E[w^2] - E[w]^2 in float32 would be all cancellation. Compared with what
    # float32 holds of the points, so that only the computation is judged.
    rng = np.random.default_rng(0)
    offset = 1000 * rng.standard_normal(50)
    points = (offset + 1e-3 * rng.standard_normal((t, 50))).astype(np.float32)
    exact = points.astype(np.float64)
    mean, noise = average(filled(points, t, torch.float32))
    assert noise == pytest.approx(np.std(exact, axis=0).max(), rel=1e-4)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-7)


def test_average_of_vectors_longer_than_a_chunk_sees_every_entry():
    n, t = 2 * CHUNK + 3, 5
    for entry in (0, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, n - 1):
        points = np.tile(np.linspace(-1, 1, n), (t, 1))
        points[:, entry] += [0, 3, -1, 4, 1]
        mean, noise = average(filled(points, t))
        assert noise == pytest.approx(np.std(points[:, entry]))
        np.testing.assert_allclose(mean, points.mean(0), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("t", [2, 4, 5, 10])
def test_noise_free_drift_is_noise_for_the_paper(t):
    # Steps of 1: std / |r| = sqrt((t^2 - 1) / 12).
    points = np.arange(t, dtype=float)[:, None] * [1.0, 0.2]
    assert average(filled(points, t))[1] == pytest.approx(math.sqrt((t**2 - 1) / 12))


def drift(steps: int, **options) -> list[float]:
    """Weights under a gradient of -1 at learning rate 1, without acceleration."""
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = Anderson(torch.optim.SGD([w], lr=1.0), residual="step", period=10**9, store_period=10**9, **options)
    path = []
    for _ in range(steps):
        w.grad = -torch.ones_like(w)
        optimizer.step()
        path.append(w.item())
    return path


@pytest.mark.parametrize("t", [2, 3, 5, 10])
def test_fed_back_average_slows_drift_to_2_over_t_plus_1(t):
    path = drift(40 * t, average=MovingAverage(t, tolerance=0.0))
    assert path[-1] - path[-2] == pytest.approx(2 / (t + 1), rel=1e-6)


@pytest.mark.parametrize("t", [2, 5, 10])
def test_papers_criterion_at_its_tolerance_never_turns_itself_off(t):
    # Once averages are fed back, drift still gives std / |r| = sqrt((t - 1) / (3 (t + 1))): 0.33 to 0.58.
    path = np.array(drift(40 * t, average=MovingAverage(t, tolerance=0.1)))
    raw = path[-t - 1 : -1] + 1  # the points of the window: where the base steps ended
    assert np.std(raw) == pytest.approx(math.sqrt((t - 1) / (3 * (t + 1))), rel=1e-6)


@pytest.mark.parametrize("t", WINDOWS)
def test_constant_points_are_no_noise(t):
    assert average(filled(np.full((t + 1, 3), 1e3), t))[1] == 0


@pytest.mark.parametrize(("tolerance", "averaged"), [(0.0, 17), (1e9, 0)])
def test_steps_that_were_averaged_are_counted_and_the_count_survives_a_checkpoint(tolerance, averaged):
    """20 steps through a window of 4: from the fourth on all of them with no tolerance, none with a huge one."""
    w = torch.nn.Parameter(torch.ones(3))
    options = {"residual": "step", "warmup": 100, "average": MovingAverage(4, tolerance=tolerance)}
    optimizer = Anderson(torch.optim.SGD([w], lr=0.1), **options)
    for _ in range(20):
        w.grad = w.detach().clone()
        optimizer.step()
    assert optimizer.stats.as_dict()["averaged"] == averaged
    other = Anderson(torch.optim.SGD([w], lr=0.1), **options)
    other.load_state_dict(optimizer.state_dict())
    assert other.stats.as_dict()["averaged"] == averaged
