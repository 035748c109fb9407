"""Driving by the tangent: who makes the steps, and which samples stay."""

import pytest
import torch
from tangent import Points, decay, driven, equation, network, train
from torch import nn
from torch.optim import SGD, Adam
from training import assert_same, weights

from torch_anderson import GaussNewton, Objective, Term
from torch_anderson._gauss_newton.control import State, plan_samples

# ------------------------------------------------------------------------------------------------- who makes the steps


def test_jumps_need_no_gradient_and_no_base_step():
    model, optimizer, objective = driven()
    losses = train(optimizer, objective, 3)
    assert optimizer.stats.counts["accepted"] == 3
    assert all(p.grad is None for p in model.parameters()) and not optimizer.base.state
    assert losses[2] < losses[0]


def test_the_loss_returned_is_that_before_the_step_on_its_samples():
    model, optimizer, _ = driven()
    points = torch.rand(20, 1, dtype=torch.float64)
    objective = equation(model, inside=Term(decay, points))
    for _ in range(6):  # a base step is compared on the way
        expected = objective.draw().loss().item()
        assert float(optimizer.step(objective)) == pytest.approx(expected)


def test_the_base_makes_a_step_now_and_then_which_is_undone_if_it_is_worse():
    model, optimizer, objective = driven(base=lambda p: SGD(p, lr=1e3))
    losses = train(optimizer, objective, 20)
    assert any(p.grad is not None for p in model.parameters())
    assert losses[-1] < 1e-3 * losses[0]


def test_an_objective_given_ahead_serves_a_step_without_closure():
    _, optimizer, objective = driven()
    for _ in range(60):
        optimizer.set_batch(objective)
        loss = objective()
        optimizer.step()
    assert optimizer.stats.counts["accepted"] > 5 and loss < 1e-3


def test_within_disabled_steps_are_the_bases():
    (model, optimizer, objective), (twin, _, other) = driven(), driven()
    base = Adam(twin.parameters(), lr=1e-3)
    with optimizer.disabled():
        torch.manual_seed(2)
        train(optimizer, objective, 3)
    torch.manual_seed(2)
    for _ in range(3):
        base.step(other)
    assert_same(weights(model), weights(twin))
    train(optimizer, objective, 1)
    assert optimizer.stats.counts["accepted"] == 1


def test_hooks_see_a_record_of_each_jump():
    _, optimizer, objective = driven()
    records = []
    optimizer.register_acceleration_hook(records.append)
    train(optimizer, objective, 3)
    assert [record.accepted for record in records] == [True] * 3
    assert records[0].rank == 24 and 0 <= records[0].gain < 1  # about one row a weight, of 25: 23 drawn, one fixed


def test_a_group_may_be_added_on_the_way():
    model = network()
    optimizer, objective = GaussNewton(Adam(model[0].parameters(), lr=1e-3)), equation(model)
    kept = model[2].weight.clone()
    train(optimizer, objective, 3)
    assert torch.equal(model[2].weight, kept)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert train(optimizer, objective, 10)[-1] < 1e-3
    assert not torch.equal(model[2].weight, kept)


def test_an_objective_given_during_the_base_step_serves_a_jump_after_it():
    """As with Lightning, whose closure runs the training step."""
    _, optimizer, objective = driven()

    def closure():
        optimizer.set_batch(objective)
        return objective()

    for _ in range(60):
        loss = optimizer.step(closure)
    assert optimizer.stats.counts["accepted"] > 5 and loss < 1e-3


# ------------------------------------------------------------------------------------------------------- the samples


def test_samples_above_the_mean_stay_and_others_are_drawn_anew():
    model, sampler = network(), Points()
    objective = equation(model, inside=Term(decay, sampler, count=30, retain=True))
    closure = objective.draw()
    with torch.no_grad():
        sizes = torch.vmap(lambda t: decay(objective.u, t))(closure.bound["inside"][0]).abs()
    closure()
    kept = set(closure.bound["inside"][0][sizes > sizes.mean(), 0].tolist())
    assert 0 < len(kept) < 30
    again = objective.draw().bound["inside"][0]
    fresh = sampler.drawn[-1]
    assert len(again) == 30 and kept < set(again[:, 0].tolist()) <= kept | set(fresh[:, 0].tolist())


def test_samples_are_drawn_anew_where_none_shall_stay():
    sampler = Points()
    objective = equation(network(), inside=Term(decay, sampler, count=30, retain=False))
    objective()
    assert torch.equal(objective.draw().bound["inside"][0], sampler.drawn[-1])


@pytest.mark.parametrize("retain, kept", [(True, {"inside"}), (None, set()), (False, set())])
def test_samples_stay_with_other_optimizers_if_asked_to(retain, kept):
    model, sampler = network(), Points()
    objective = equation(model, inside=Term(decay, sampler, count=30, retain=retain))
    Adam(model.parameters()).step(objective)
    assert set(objective.retained) == kept  # fixed samples stay anyway


def test_more_samples_are_drawn_while_jumps_fit_only_their_own():
    _, optimizer, objective = driven()
    train(optimizer, objective, 2)
    assert len(objective.retained["inside"].samples[0]) == 69  # 23 fitted
    optimizer._driver.state.blocks = 4.0
    train(optimizer, objective, 1)
    assert len(objective.retained["inside"].samples[0]) == 138  # 92 fitted


@pytest.mark.parametrize(("width", "rows"), [(8, 25), (100, 301), (200, 500)])
@pytest.mark.parametrize("count", [6, 60])
def test_few_samples_in_a_gradient_do_not_make_few_rows(width, rows, count):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    optimizer = GaussNewton(Adam(model.parameters()))
    optimizer.step(Objective(model, inside=Term(decay, Points(), count=count)))
    assert abs(optimizer.stats.latest.history_len - rows) <= 1


@pytest.mark.parametrize(
    ("width", "count", "fitted"), [(8, 40, 80), (8, 600, 500), (200, 600, 1200), (8, 250_000, 500)]
)
def test_fixed_samples_are_all_fitted_at_once_where_they_are_few_for_the_weights(width, count, fitted):
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()

    def fit(u, t):
        return u(t), 2 * u(t) - t.sum()  # two residuals a sample: the first plan does not know of them

    optimizer = GaussNewton(Adam(model.parameters()))
    optimizer.step(Objective(model, fit=Term(fit, torch.rand(count, 1, dtype=torch.float64))))
    plan = plan_samples(optimizer._driver.traces[0], optimizer._driver.state.whole_blocks)
    assert 2 * plan.fitted["fit"] == fitted


def test_a_lucky_base_step_does_not_outlive_many_that_gain_nothing():
    """Jumps that gain a little go on as soon as a stretch of base steps has shown that these gain nothing."""
    state = State(jump_rate=0.01, since=1)
    state.record_base_gain(0.8)
    state.record_jump_gain(0.05, cost=5.0)
    assert state.wait > 5
    state.since = state.wait
    state.record_base_gain(0.0)
    state.record_jump_gain(0.05, cost=5.0)
    assert state.wait == 0


# ------------------------------------------------------------------------------------- samples for one step


@pytest.mark.parametrize("closure", [lambda objective, x: objective(inside=x), lambda objective, _: objective.draw()])
def test_steps_on_samples_of_their_own_are_the_bases_and_that_is_said_once(closure, caplog):
    """Each sees its own samples only: a jump would fit their noise."""
    (model, optimizer, objective), (twin, _, other) = driven(), driven()
    base = Adam(twin.parameters(), lr=1e-3)
    for step in range(20):
        x = torch.rand(30, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for one, wanted in ((optimizer, objective), (base, other)):
            torch.manual_seed(step)
            one.step(closure(wanted, x))
    assert_same(weights(model), weights(twin))
    assert optimizer.stats.counts["skipped_given_samples"] == 20
    assert caplog.text.count("given for this step alone") == 1


def test_jumps_go_on_after_steps_on_samples_of_their_own():
    _, optimizer, objective = driven()
    for _ in range(5):
        optimizer.step(objective(inside=torch.rand(30, 1, dtype=torch.float64)))
    assert train(optimizer, objective, 20)[-1] < 1e-4
    assert optimizer.stats.counts["accepted"] > 10
