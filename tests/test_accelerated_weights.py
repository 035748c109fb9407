"""Weights to evaluate with: what they are, and that training does not notice them."""

import copy
from math import exp

import pytest
import torch
from driven import ASIDE, BOTH, driven, train, trained_plainly
from torch import nn
from torch.optim import SGD, Adam
from training import BASES, assert_same, make_model, weights

from torch_anderson import Anderson, Discrepancy
from torch_anderson.discrepancy import read
from torch_anderson.mixture import FLOOR, SPEED, Mixture
from torch_anderson.options import POWERS


def accelerated(model, optimizer, *given):
    with optimizer.accelerated_weights(*given):
        return weights(model)


# ------------------------------------------------------------------------------------------- what they are


def test_before_a_batch_has_judged_they_are_the_mean_of_present_weights_and_averages():
    model = nn.Linear(1, 1, bias=False).double()
    settings = Discrepancy("mse", **{**ASIDE, "forward_cost": 100.0})  # too dear to be judged soon
    optimizer = Anderson(SGD(model.parameters(), lr=1.0), discrepancy=settings)
    with torch.no_grad():
        model.weight.zero_()
    for _ in range(3):  # 1, 2, 3
        model.weight.grad = -torch.ones_like(model.weight)
        optimizer.step()
    expected = [3.0]
    for power in POWERS:
        average = 1.0
        for count, iterate in ((2, 2.0), (3, 3.0)):
            average += (power + 1) / (count + power) * (iterate - average)
        expected.append(average)
    (found,) = accelerated(model, optimizer)
    assert float(found) == pytest.approx(sum(expected) / len(expected))


def test_a_batch_moves_the_shares_towards_points_of_lower_loss():
    """Predictions 0 and 2 for the target 0: the mixture predicts 1, the slope there is 2 (1 - 0)."""
    mixture = Mixture(2)
    mixture.learn([read("mse", (torch.tensor([value]), torch.zeros(1))) for value in (0.0, 2.0)], lambda x: x)
    grown = exp(-SPEED)  # of the worse, against 1 of the better: the slopes differ by the whole spread
    assert mixture.shares == pytest.approx([1 / (1 + grown), grown / (1 + grown)])


def test_shares_stay_positive_and_add_up_to_one():
    mixture = Mixture(3)
    found = [read("mse", (torch.tensor([value]), torch.zeros(1))) for value in (0.0, 2.0, 5.0)]
    for _ in range(200):
        mixture.learn(found, lambda x: x)
    assert sum(mixture.shares) == pytest.approx(1)
    assert min(mixture.shares) >= FLOOR / 2
    assert mixture.shares[0] > 0.99


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_batch_without_finite_slopes_teaches_nothing(bad):
    mixture = Mixture(2)
    steep = lambda predictions, targets: predictions.sum() * bad  # noqa: E731
    mixture.learn([read(steep, (torch.full((1,), value), torch.zeros(1))) for value in (1.0, 2.0)], lambda x: x)
    assert mixture.numbers() == Mixture(2).numbers()


def test_noise_is_averaged_out():
    """At a constant rate the iterates of SGD scatter around the solution; the mixture is nearer."""
    torch.manual_seed(0)
    truth = torch.linspace(-1, 1, 10, dtype=torch.float64)
    model = nn.Linear(10, 1, bias=False).double()
    settings = Discrepancy("mse", use="evaluation", store_period=2, forward_cost=0.1)
    optimizer = Anderson(SGD(model.parameters(), lr=0.1), discrepancy=settings)
    distance = lambda: float((model.weight.detach()[0] - truth).norm())  # noqa: E731
    plain, ours = [], []
    for i in range(600):
        x = torch.randn(8, 10, dtype=torch.float64)
        y = x @ truth[:, None] + torch.randn(8, 1, dtype=torch.float64)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step(outputs=lambda x=x, y=y: (model(x), y))
        if i >= 300:
            plain.append(distance())
            with optimizer.accelerated_weights():
                ours.append(distance())
    assert sum(ours) < 0.5 * sum(plain)


# ---------------------------------------------------------------------------------------- training undisturbed


def restless_model():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1), nn.BatchNorm1d(1)]
    return nn.Sequential(*layers).double()


def run_restless(optimizer_of):
    """All that the model holds, and random numbers drawn in between; ours is evaluated after every step."""
    model = restless_model()
    optimizer = optimizer_of(model.parameters())
    seen = []
    for i in range(30):
        train(model, optimizer, i + 1, start=i)
        if isinstance(optimizer, Anderson):
            with optimizer.accelerated_weights(model, [inputs(0), inputs(1)]):
                model.eval()(inputs(2))
            model.train()
        seen += [torch.rand(2), *(value.clone() for value in model.state_dict().values())]
    return seen


def inputs(i):
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64)


def test_training_is_the_bases_bit_for_bit_however_often_it_is_evaluated():
    settings = Discrepancy("mse", **ASIDE)
    ours = run_restless(lambda params: Anderson(Adam(params, lr=1e-2), discrepancy=settings))
    assert_same(ours, run_restless(lambda params: Adam(params, lr=1e-2)))


def test_evaluating_draws_no_random_numbers_and_leaves_buffers_and_modes():
    model = restless_model()
    optimizer = Anderson(Adam(model.parameters(), lr=1e-2), discrepancy=Discrepancy("mse", **ASIDE))
    train(model, optimizer, 20)
    model[1].eval()  # a frozen layer
    momenta = [layer.momentum for layer in (model[1], model[5])]
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with optimizer.accelerated_weights(model, [inputs(0)]):
        assert not torch.equal(model[5].running_mean, before["5.running_mean"])
        inside = [module.training for module in model.modules()]
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(model.state_dict().values(), before.values())
    assert inside == [module.training for module in model.modules()] == [True, True, False, True, True, True, True]
    assert [layer.momentum for layer in (model[1], model[5])] == momenta


def test_statistics_are_those_of_the_accelerated_weights():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    _, optimizer = driven(model=model, **ASIDE)
    x = inputs(0)
    train(model, optimizer, 20, outputs=lambda model, i: (model(x), x[:, :3]), objective=objective_of_three)
    with optimizer.accelerated_weights(model, [x]):
        torch.testing.assert_close(model[1].running_mean, model[0](x).mean(0))
        torch.testing.assert_close(model[1].running_var, model[0](x).var(0))


def objective_of_three(model, i):
    x = inputs(i)
    return (model(x) - x[:, :3]).square().mean()


@pytest.mark.parametrize("where", ["block", "batches"])
def test_errors_bring_weights_buffers_and_modes_back(where):
    model = restless_model()
    optimizer = Anderson(Adam(model.parameters(), lr=1e-2), discrepancy=Discrepancy("mse", **ASIDE))
    train(model, optimizer, 20)
    model.eval()
    before, momentum = copy.deepcopy(model.state_dict()), model[1].momentum

    def batches():
        yield inputs(0)
        raise KeyError("mine")

    given = batches() if where == "batches" else [inputs(0)]
    with pytest.raises(KeyError, match="mine"), optimizer.accelerated_weights(model, given):
        raise KeyError("mine")
    assert_same(model.state_dict().values(), before.values())
    assert not any(module.training for module in model.modules())
    assert model[1].momentum == momentum


def test_cross_entropy_leaves_training_alone_unless_told_otherwise():
    classes = torch.arange(16) % 3
    found = lambda model, i: (model(inputs(i)), classes)  # noqa: E731
    objective = lambda model, i: nn.functional.cross_entropy(*found(model, i))  # noqa: E731
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    twin = copy.deepcopy(model)
    optimizer = Anderson(BASES["momentum"](model.parameters()), discrepancy="cross_entropy")
    train(model, optimizer, 100, outputs=found, objective=objective)
    assert optimizer.stats.counts["extra_evaluations"] > 0 == optimizer.stats.counts["attempted"]
    assert_same(weights(model), weights(trained_plainly(100, "momentum", model=twin, objective=objective)))
    assert not torch.equal(accelerated(model, optimizer)[0], model.weight)


# -------------------------------------------------------------------------------------------------- lifecycle


@pytest.mark.parametrize("discrepancy", [None, "residual", Discrepancy("cross_entropy", use="training")])
def test_where_nothing_is_kept_it_says_what_to_do(discrepancy):
    optimizer = Anderson(SGD(make_model().parameters(), lr=0.1), discrepancy=discrepancy)
    with pytest.raises(RuntimeError, match=r"use='evaluation'"), optimizer.accelerated_weights():
        pass


def test_before_the_first_step_they_are_the_present_weights_and_nothing_is_upset():
    (model, optimizer), (twin, other) = driven("adamw_foreach", **BOTH), driven("adamw_foreach", **BOTH)
    assert_same(accelerated(model, optimizer), weights(model))
    train(model, optimizer, 20)
    train(twin, other, 20)
    assert_same(weights(model), weights(twin))


def test_they_are_saved_in_the_state():
    model, optimizer = driven("adamw_foreach", **ASIDE)
    train(model, optimizer, 25)
    twin, other = driven("adamw_foreach", **ASIDE)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not torch.equal(accelerated(model, optimizer)[0], weights(model)[0])
    assert_same(accelerated(twin, other), accelerated(model, optimizer))


@pytest.mark.parametrize("how", ["frozen layer", "new group"])
def test_averages_start_anew_when_parameters_come_or_go(how):
    """After two steps they lie between the two iterates, not near averages of nothing."""
    model, optimizer = driven(**ASIDE)
    train(model, optimizer, 20)
    if how == "frozen layer":
        model[0].requires_grad_(False)
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    train(model, optimizer, 21, start=20)
    before = weights(model)
    train(model, optimizer, 22, start=21)
    for there, here, found in zip(before, weights(model), accelerated(model, optimizer), strict=True):
        assert (found - here).norm() <= (there - here).norm()


def test_averages_of_weights_that_are_no_more_are_forgotten():
    model, optimizer = driven(**ASIDE)
    train(model, optimizer, 20)
    with torch.no_grad():
        model[0].weight.add_(100.0)
    optimizer.reset_history()
    assert_same(accelerated(model, optimizer), weights(model))


def test_parameters_without_a_gradient_so_far_stay_what_they_are():
    model = make_model(dtype=torch.float64)
    unused = nn.Parameter(torch.full((3,), 5.0, dtype=torch.float64))
    settings = Discrepancy("mse", **ASIDE)
    optimizer = Anderson(SGD([*model.parameters(), unused], lr=0.1), discrepancy=settings)
    train(model, optimizer, 20)
    with optimizer.accelerated_weights():
        torch.testing.assert_close(unused.detach(), torch.full((3,), 5.0, dtype=torch.float64))


def test_without_outputs_the_mixture_is_not_learnt_and_that_is_counted():
    model, optimizer = driven(**ASIDE)
    train(model, optimizer, 20, outputs=None)
    assert optimizer.stats.counts["skipped_no_outputs"] > 0
