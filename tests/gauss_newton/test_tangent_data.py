"""Regression along the tangent: data as users have them, large or noisy, in batches, with losses that have a domain."""

import logging

import pytest
import torch
from torch import nn
from torch.func import hessian
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy, huber_loss
from torch.optim import Adam

from torch_anderson import GaussNewton, Objective, Term
from torch_anderson._gauss_newton.losses import Convex


def network(inputs, width, *last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 1), *last).double()


def misfit(u, x, y):
    return u(x) - y


def with_output(u, x, y):
    return u(x), y


def train(optimizer, objective, steps):
    for _ in range(steps):
        loss = optimizer.step(objective)
    return float(loss)


# ------------------------------------------------------------------------------------------------------ their size


@pytest.mark.parametrize(("scale", "most"), [(1.0, 1e-5), (30.0, 1e-2), (100.0, 0.1), (0.01, 1e-5)])
def test_targets_may_be_large_or_small(scale, most):
    """The loss over that of the targets' scale, after 60 steps."""
    torch.manual_seed(5)
    x = torch.randn(200, 2, dtype=torch.float64)
    model = network(2, 20)
    data = x, scale * torch.sin(2 * x[:, 0]) * x[:, 1]
    optimizer = GaussNewton(Adam(model.parameters(), lr=1e-2))
    assert train(optimizer, Objective(model, fit=Term(misfit, data)), 60) / scale**2 < most


def test_with_many_samples_for_each_weight_the_first_jumps_fit_a_part_of_them():
    torch.manual_seed(1)
    x = torch.rand(2000, 2, dtype=torch.float64)
    model = network(2, 12)
    optimizer = GaussNewton(Adam(model.parameters()))
    objective = Objective(model, fit=Term(misfit, (x, torch.sin(3 * x[:, 0]) * x[:, 1])))
    optimizer.step(objective)
    assert optimizer.stats.latest.rank == 500
    assert train(optimizer, objective, 60) < 1e-6


def test_a_term_with_few_samples_among_many_of_another_is_fitted_too():
    """u'' + 36 u = 0 continues sin(6 x), which is known on a quarter of the domain, at 10,000 points."""

    def oscillation(u, x):
        return hessian(u)(x).sum() / 36 + u(x)

    torch.manual_seed(0)
    x = torch.rand(10_000, 1, dtype=torch.float64) / 2
    layers = nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
    model = nn.Sequential(*layers).double()
    objective = Objective(
        model,
        data=Term(misfit, (x, torch.sin(6 * x[:, 0]))),
        inside=Term(oscillation, lambda k: 2 * torch.rand(k, 1, dtype=torch.float64), count=100),
    )
    train(GaussNewton(Adam(model.parameters())), objective, 100)
    points = torch.linspace(0, 2, 200, dtype=torch.float64).reshape(-1, 1)
    assert (model(points) - torch.sin(6 * points)).abs().max() < 1e-2


def test_a_matrix_alone_may_be_trained():
    """Its rows are factors, and there are no others."""
    torch.manual_seed(0)
    model = nn.Linear(150, 150, bias=False)
    points = torch.randn(60, 150)
    optimizer = GaussNewton(Adam(model.parameters()))
    assert train(optimizer, Objective(model, fit=Term(lambda u, x: u(x)[0] - x[0].sin(), points)), 30) < 1e-6


# ---------------------------------------------------------------------------------------------------- other losses


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.value + 0 * x


@pytest.mark.parametrize("retain", [None, False])
def test_samples_with_a_large_loss_do_not_stay(retain):
    """A tenth of the labels is 1: with those that are hard to fit retained, the answer would be about a half."""
    torch.manual_seed(0)
    model = Constant()

    def draw(count):
        return torch.rand(count, 1), (torch.rand(count) < 0.1).float()

    term = Term(with_output, draw, count=1000, loss=binary_cross_entropy_with_logits, retain=retain)
    train(GaussNewton(Adam(model.parameters(), lr=1e-2)), Objective(model, fit=term), 30)
    assert float(model.value.detach().sigmoid()) == pytest.approx(0.1, abs=0.03)


def test_a_loss_may_refuse_outputs_that_no_weights_give():
    torch.manual_seed(0)
    x = torch.randn(200, 2, dtype=torch.float64)
    model = network(2, 10, nn.Sigmoid())
    objective = Objective(model, fit=Term(with_output, (x, (x[:, 0] > 0).double()), loss=binary_cross_entropy))
    assert train(GaussNewton(Adam(model.parameters(), lr=1e-2)), objective, 30) < 0.05


def test_straight_losses_of_several_outputs_promise_no_more_than_there_is():
    """Huber's loss far from its minimum: |r|^2 is the loss, and 2 L r its gradient, whatever the number of outputs."""
    loss = Convex(lambda z: huber_loss(z, torch.zeros_like(z), reduction="sum"), torch.Size([10]), ())
    outputs = torch.full((1, 10), 50.0, dtype=torch.float64)
    r, sums = loss.expand(outputs)
    assert float(r.square().sum()) == pytest.approx(float(loss.each(outputs)))
    torch.testing.assert_close(2 * sums[:, 0].T @ r[0], torch.ones(10, dtype=torch.float64))


def test_directions_without_influence_have_no_residual():
    """All logits of a cross-entropy may grow together: its gradient has no part there but rounding."""
    labels = torch.tensor([0, 2, 1])
    outputs = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    r, sums = Convex(cross_entropy, torch.Size([3]), (labels,)).expand(outputs)
    weak = sums.abs().amax(2) < 1e-7  # (directions, samples)
    assert weak.sum() == 3 and not r[weak.T].any()


# ----------------------------------------------------------------------------------------------------- constants


@pytest.mark.parametrize("residual", [lambda u, x: u(x) - ONE, lambda u, x: u(x) * ONE - torch.sin(x)])
def test_a_constant_in_single_precision_is_named(residual, caplog):
    model = network(1, 8).float()
    optimizer = GaussNewton(Adam(model.parameters()))
    with caplog.at_level(logging.WARNING, logger="torch_anderson"):
        train(optimizer, Objective(model, only=Term(residual, lambda k: torch.rand(k, 1), count=100)), 10)
    assert optimizer.stats.counts["accepted"] > 5
    assert "constants in the type of the sample" in caplog.text


ONE = torch.tensor([1.0])
