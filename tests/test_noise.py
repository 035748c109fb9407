"""What is read off the Gram matrix about noise, and what pairs of several steps make of it."""

import numpy as np
import pytest
import torch
from torch import optim

from torch_anderson import Anderson
from torch_anderson._anderson.gram import noise_share, smoothness

N = 4000


def differences_gram(residuals: np.ndarray) -> list[list[float]]:
    """Lower triangle of the products of consecutive differences, newest first, from residuals, oldest first."""
    d = np.diff(residuals, axis=0)[::-1]
    return [row[: i + 1].tolist() for i, row in enumerate(d @ d.T)]


@pytest.mark.parametrize("level", [0.0, 0.1, 0.3, 1.0])
def test_share_is_that_of_the_noise_added_to_a_steady_change(level):
    # Steps of length 1 in one direction, and noise of mean square level^2: 2 level^2 of 1 + 2 level^2.
    rng = np.random.default_rng(0)
    steady = np.arange(12)[:, None] * np.full(N, N**-0.5)
    residuals = steady + level * N**-0.5 * rng.standard_normal((12, N))
    assert noise_share(differences_gram(residuals)) == pytest.approx(2 * level**2 / (1 + 2 * level**2), abs=0.03)


def test_share_stays_between_0_and_1():
    back_and_forth = np.array([[0.0], [1.0], [0.0], [1.0]])
    assert smoothness(differences_gram(back_and_forth), 3) == -1
    assert noise_share(differences_gram(back_and_forth)) == 1
    assert noise_share([]) == noise_share([[0.0], [0.0, 0.0]]) == 0


def least_squares_error(noise: float, momentum: float, **options) -> float:
    """Distance from the solution after 600 noisy gradients, over the start's; 100 unknowns, condition 900."""
    randn = torch.Generator().manual_seed(3)
    curvatures = torch.logspace(0, np.log10(1 / 900), 100, dtype=torch.float64)
    x = torch.ones(100, dtype=torch.float64, requires_grad=True)
    rate = 0.3 if momentum else 1.0
    optimizer = optim.SGD([x], lr=rate, momentum=momentum, nesterov=momentum > 0)
    if options:
        optimizer = Anderson(optimizer, **options)
    for _ in range(600):
        x.grad = curvatures * x.detach() + noise * torch.randn(100, dtype=torch.float64, generator=randn)
        optimizer.step()
    return (x.detach().norm() / 10).item()


@pytest.mark.parametrize("period", [10, 25])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_long_pairs_end_nearer_to_the_solution_than_the_base(noise, momentum, period):
    base = least_squares_error(noise, momentum)
    assert least_squares_error(noise, momentum, residual_steps=period, period=period) < base


def test_momentum_is_why_long_pairs_are_regularised_without_noise_too():
    pairs = {"residual_steps": 10, "period": 10}
    adaptive = least_squares_error(0.0, 0.9, **pairs)
    assert adaptive < 0.1 * least_squares_error(0.0, 0.9, **pairs, regularization=1e-12)


def test_pure_noise_is_left_to_the_base():
    # No signal at all: the best that a jump could do is to take back what the noise did.
    def end(wrap) -> torch.Tensor:
        randn = torch.Generator().manual_seed(0)
        x = torch.zeros(500, requires_grad=True)
        optimizer = wrap(optim.SGD([x], lr=0.1))
        for _ in range(250):
            x.grad = torch.randn(500, generator=randn)
            optimizer.step()
        return x.detach()

    pairs = {"residual_steps": 25, "period": 25}
    assert torch.equal(end(lambda base: base), end(lambda base: Anderson(base, **pairs)))
