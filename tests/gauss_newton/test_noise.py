"""Data with noise, in small batches: jumps are proposals that other samples decide about, and the base goes on."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import Adam
from training import assert_same, weights

from torch_anderson import GaussNewton, Objective, Term
from torch_anderson._gauss_newton.batch import Batch, Squares
from torch_anderson._gauss_newton.state import CHANGING, FIXED
from torch_anderson._gauss_newton.tangent_state import FIRST_REST, TangentState


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1)).double()


def pure_noise(step):
    """Inputs and targets without any relation."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(12, 5, generator=generator).double(), torch.randn(12, generator=generator).double())


def smooth(step):
    """Inputs and a smooth function of them."""
    x = torch.randn(600, 5, generator=torch.Generator().manual_seed(step)).double()
    return x, torch.sin(x[:, 0] + 0.3 * x[:, 1])


def residual(u, x, y):
    return u(x) - y


def run(data, kind, steps=300, model=None, optimizer=None, start=0):
    model = model or network()
    optimizer = optimizer or GaussNewton(Adam(model.parameters(), lr=1e-2), loss="residual")
    objective = Objective(model, only=Term(residual, (torch.zeros(1, 5).double(), torch.zeros(1).double())))
    for step in range(start, steps):
        x, y = data(step)
        if kind == "tangent":
            optimizer.step(objective(only=(x, y)))
        else:
            optimizer.zero_grad()
            (model(x)[:, 0] - y).square().mean().backward()
            optimizer.step(outputs=lambda x=x, y=y: model(x)[:, 0] - y)
    return model, optimizer


def plainly(data, steps=300):
    model = network()
    base = Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = data(step)
        base.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        base.step()
    return model


@pytest.mark.parametrize("kind", ["tangent", "history"])
def test_on_pure_noise_training_is_nearly_or_exactly_that_of_the_base(kind):
    """An accepted jump would change all later weights; the loss of other samples then tells whether it was harmful."""
    model, optimizer = run(pure_noise, kind)
    expected = plainly(pure_noise)
    assert optimizer.stats.counts["attempted"] > 2
    if not optimizer.stats.counts["accepted"]:
        torch.testing.assert_close(weights(model), weights(expected), rtol=1e-9, atol=1e-9)
    x, y = (torch.cat(part) for part in zip(*map(pure_noise, range(1000, 1100)), strict=True))
    found, base = ((net(x)[:, 0] - y).square().mean().item() for net in (model, expected))
    assert found < 1.05 * base


def test_proposals_that_are_refused_leave_the_trajectory_of_the_base():
    model, optimizer = run(pure_noise, "tangent", 100)
    assert optimizer.stats.counts["attempted"] > 1 and not optimizer.stats.counts["accepted"]
    torch.testing.assert_close(weights(model), weights(plainly(pure_noise, 100)), rtol=1e-9, atol=1e-9)


def test_jumps_on_changing_samples_of_a_smooth_function_pay():
    model, optimizer = run(smooth, "tangent", 400)
    assert optimizer.stats.counts["accepted"] > 10
    x, y = (torch.cat(part) for part in zip(*map(smooth, range(1000, 1100)), strict=True))
    found, base = ((net(x)[:, 0] - y).square().mean().item() for net in (model, plainly(smooth, 400)))
    assert found < base


@pytest.mark.parametrize(("data", "samples"), [(pure_noise, CHANGING), (lambda _: pure_noise(0), FIXED)])
def test_the_history_notices_whether_samples_change(data, samples):
    _, optimizer = run(data, "history", 40)
    assert optimizer._driver.state.samples == samples
    assert bool(optimizer.stats.counts["accepted"]) == (samples == FIXED)


@pytest.mark.parametrize("kind", ["tangent", "history"])
@pytest.mark.parametrize("data", [pure_noise, smooth])
def test_a_run_interrupted_with_a_proposal_goes_on_bit_for_bit(kind, data):
    def waits(optimizer):
        return bool(optimizer._driver.state.pending if kind == "tangent" else optimizer._driver.state.proposed)

    middle, (model, optimizer) = 12, run(data, kind, 12)
    while not waits(optimizer) and middle < 100:
        middle += 1
        run(data, kind, middle, model, optimizer, start=middle - 1)
    assert waits(optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file)
    twin = network()
    other = GaussNewton(Adam(twin.parameters(), lr=1e-2), loss="residual")
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for one in ((model, optimizer), (twin, other)):
        torch.manual_seed(7)
        run(data, kind, middle + 60, *one, start=middle)
    assert_same(weights(model), weights(twin))


def test_a_copy_with_a_proposal_decides_alike():
    model, optimizer = run(smooth, "tangent", 11)
    assert optimizer._driver.state.pending
    twin, other = copy.deepcopy((model, optimizer))
    for one in ((model, optimizer), (twin, other)):
        torch.manual_seed(7)
        run(smooth, "tangent", 40, *one, start=11)
    assert_same(weights(model), weights(twin))


def test_the_variance_of_a_change_is_that_of_its_mean():
    """Two terms: weights times the standard errors of means, added as squares."""
    torch.manual_seed(0)
    one = {"a": torch.randn(50, 1).double(), "b": torch.randn(20, 2).double()}
    other = {name: x + 0.1 * torch.randn_like(x) for name, x in one.items()}
    batch = Batch({}, {}, {"a": 3.0, "b": 0.5}, {"a": Squares(), "b": Squares()})
    expected = 0.0
    for name, weight in batch.factors.items():
        change = other[name].square().sum(1) - one[name].square().sum(1)
        expected += weight**2 * float(change.var()) / len(change)
    assert float(batch.doubt(one, other)) == pytest.approx(expected)


def test_rests_double_and_proposals_must_gain_more_than_base_steps():
    state = TangentState(share=0.3, cost=5.0)
    assert not state.judge(1.0, falls=True)  # no base step is known
    assert (state.wait, state.trusted, state.rest) == (40, False, 2 * FIRST_REST)
    state.since = 40
    state.book_base(0.4, noisy=True)
    assert not state.judge(0.04, falls=True) and state.wait == 80
    assert state.judge(0.06, falls=True)
    assert state.trusted and state.wait == 0
