"""Driving by the tangent: frozen parameters, groups, buffers, and residual functions that cannot be used."""

import pytest
import torch
from tangent import Points, decay, driven, equation, network, train
from torch import nn
from torch.func import grad
from torch.optim import SGD, Adam
from training import assert_same, weights

from torch_anderson import GaussNewton, Objective, Term

# ------------------------------------------------------------------------------------------------ parameters, buffers


def test_frozen_layers_and_groups_that_take_no_part_stay():
    model = network()
    model[0].weight.requires_grad_(False)
    groups = [{"params": [model[2].weight, *model[0].parameters()]}, {"params": [model[2].bias], "anderson": False}]
    optimizer, objective = GaussNewton(SGD(groups, lr=0.0 + 1e-9)), equation(model)
    kept = model[0].weight.clone(), model[2].bias.clone()
    losses = train(optimizer, objective, 3)
    assert losses[-1] < losses[0]
    assert torch.equal(model[0].weight, kept[0]) and torch.equal(model[2].bias, kept[1])


@pytest.mark.parametrize("late", [False, True])
def test_a_group_of_learning_rate_zero_stays_and_moves_again_from_where_it_is(late):
    model = network()
    optimizer = GaussNewton(SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=1e-3))
    objective = equation(model)
    train(optimizer, objective, 3 if late else 0)
    optimizer.param_groups[1]["lr"] = 0.0
    kept, accepted = weights(model[2]), optimizer.stats.counts["accepted"]
    losses = train(optimizer, objective, 6)
    assert optimizer.stats.counts["accepted"] > accepted and losses[-1] < losses[0]
    assert_same(weights(model[2]), kept)
    optimizer.param_groups[1]["lr"] = 1e-3
    assert train(optimizer, objective, 6)[-1] < losses[-1]
    assert not any(torch.equal(now, before) for now, before in zip(weights(model[2]), kept, strict=True))


def test_the_memory_has_the_weights_of_all_parameters_whatever_their_rates():
    """Otherwise a group whose rate was 0 at the last jump could be taken back to zeros."""
    model = network()
    optimizer = GaussNewton(SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=1e-3))
    optimizer.param_groups[1]["lr"] = 0.0
    train(optimizer, equation(model), 1)
    saved = optimizer.state
    for p in model.parameters():
        assert torch.equal(saved[p]["anderson_weights"].reshape(p.shape), p.detach())


def test_a_write_to_frozen_parameters_is_noticed():
    model = network()
    model[0].requires_grad_(False)
    points = torch.rand(20, 1, dtype=torch.float64)
    optimizer, objective = GaussNewton(SGD(model.parameters(), lr=1e-3)), equation(model, inside=Term(decay, points))
    train(optimizer, objective, 2)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    expected = objective.draw().loss().item()
    assert float(optimizer.step(objective)) == pytest.approx(expected)


def test_a_layer_may_be_frozen_on_the_way():
    model, optimizer, objective = driven()
    train(optimizer, objective, 3)
    model[0].requires_grad_(False)
    kept = model[0].weight.clone()
    assert train(optimizer, objective, 5)[-1] < 0.5
    assert torch.equal(model[0].weight, kept)


class Decaying(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()
        self.rate = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x):
        return self.inner(x)


def test_an_unknown_coefficient_of_the_model_is_found():
    """u' = -k u with data of k = 2."""
    model = Decaying()
    t = torch.linspace(0, 1, 20, dtype=torch.float64).reshape(-1, 1)
    objective = Objective(
        model,
        inside=Term(lambda u, t: grad(u)(t).sum() + model.rate * u(t), Points(), count=60),
        data=Term(lambda u, t, y: u(t) - y, (t, torch.exp(-2 * t[:, 0]))),
    )
    train(GaussNewton(Adam(model.parameters())), objective, 60)
    assert model.rate.item() == pytest.approx(2.0, abs=1e-4)


def test_parameters_outside_the_model_make_plain_steps(caplog):
    model, factor = network(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = GaussNewton(SGD([*model.parameters(), factor], lr=1e-2))
    objective = equation(model, start=Term(lambda u, t: factor * u(t) - 1, torch.zeros(1, 1).double()))
    train(optimizer, objective, 5)
    assert optimizer.stats.counts["skipped_outside_parameters"] > 0
    assert "make them part of it" in caplog.text and factor.item() != 1.0


def test_dropout_makes_plain_steps_and_says_what_to_do(caplog):
    model = network(torch.float64, nn.Dropout(0.5))
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    train(optimizer, equation(model), 5)
    assert optimizer.stats.counts["skipped_random_outputs"] > 0
    assert "model.eval()" in caplog.text and any(p.grad is not None for p in model.parameters())


def test_buffers_are_used_and_never_changed():
    model = network(torch.float64, nn.BatchNorm1d(8)).eval()
    with torch.no_grad():
        model[2].running_mean.uniform_()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    losses = train(optimizer, equation(model), 8)
    assert losses[-1] < losses[0] and optimizer.stats.counts["accepted"] > 4
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())


# ------------------------------------------------------------------------------------------------------- what is wrong


def test_residuals_that_become_nan_make_plain_steps_and_nothing_is_lost(caplog):
    model, bad = network(), torch.zeros((), dtype=torch.float64)
    objective = equation(model, start=Term(lambda u, t: u(t) - 1 + bad, torch.zeros(1, 1).double()))
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    train(optimizer, objective, 3)
    bad.fill_(float("nan"))
    before = weights(model)
    assert optimizer._driver.accelerate(objective.bind()) is None
    assert_same(weights(model), before)
    assert optimizer.stats.counts["skipped_nonfinite_outputs"] == 1 and "not finite" in caplog.text
    bad.fill_(0.0)
    assert train(optimizer, objective, 6)[-1] < 0.1


def gradient_by_autograd(u, t):
    x = t.clone()
    return torch.autograd.grad(u(x), x, create_graph=True)[0].sum()


WRONG = {
    "nothing": (lambda u, t: None, TypeError, "returned NoneType"),
    "a number": (lambda u, t: 1.0, TypeError, "returned float"),
    "no dependence": (lambda u, t: t.sum(), ValueError, "does not depend on the model's weights"),
    "not finite": (lambda u, t: u(t) / 0, ValueError, "is not finite"),
    "autograd": (gradient_by_autograd, RuntimeError, "torch.func"),
    "a choice by if": (lambda u, t: u(t) if u(t) > 0 else t.sum(), RuntimeError, "torch.where"),
    "the user's error": (lambda u, t: {}["missing"], KeyError, "missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_is_no_residual_is_refused_and_nothing_changes(name):
    function, error, message = WRONG[name]
    model = network()
    before = weights(model)
    optimizer = GaussNewton(SGD(model.parameters(), lr=0.1))
    with pytest.raises(error, match=f"(?s){message}"):
        optimizer.step(equation(model, inside=Term(function, Points(), count=5)))
    assert_same(weights(model), before)


def test_a_sampler_that_changes_its_mind_is_refused_by_name():
    calls = []

    def sampler(count):
        calls.append(count)
        return torch.rand(count if len(calls) < 4 else count - 1, 1, dtype=torch.float64)

    model = network()
    optimizer, objective = GaussNewton(SGD(model.parameters(), lr=0.1)), equation(model, sampler)
    with pytest.raises(ValueError, match="sampler of 'inside'"):
        train(optimizer, objective, 6)


def test_a_function_that_writes_to_the_weights_makes_plain_steps(caplog):
    model = network()

    def writes(u, t):
        model[2].bias.data.mul_(1.5)
        return u(t) - 1

    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    train(optimizer, Objective(model, only=Term(writes, Points(), count=5)), 3)
    assert optimizer.stats.counts["skipped_outputs_wrote"] > 0 and "must only evaluate" in caplog.text
    assert optimizer.stats.counts["accepted"] == 0


def test_an_objective_of_another_model_is_refused_at_the_first_step():
    """A copy, or a model that was built anew: nothing would ever be trained."""
    model, other = network(), network()
    optimizer, before = GaussNewton(SGD(model.parameters(), lr=1e-3)), weights(model)
    for objective in (equation(other), equation(other)(inside=torch.rand(5, 1, dtype=torch.float64))):
        with pytest.raises(ValueError, match="depends on none of the optimizer's parameters"):
            optimizer.step(objective)
    assert_same(weights(model), before)


def test_an_objective_may_depend_on_the_optimizers_parameters_by_its_functions_alone():
    factor = nn.Parameter(torch.zeros((), dtype=torch.float64))
    model = network()
    objective = equation(model, start=Term(lambda u, t: factor * u(t).detach() - 1, torch.zeros(1, 1).double()))
    before = objective.draw().loss().item()
    optimizer = GaussNewton(SGD([factor], lr=1e-2))
    train(optimizer, objective, 5)
    assert objective.draw().loss().item() < before


def test_a_page_of_an_error_becomes_one_line(caplog):
    """torch names all its dispatch keys for an operation that sparse tensors do not have."""

    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)

        def forward(self, i):
            return self.layer(torch.tanh(self.embedding(i)))

    model = Embedded()
    optimizer = GaussNewton(SGD(model.parameters(), lr=0.1))
    with caplog.at_level("INFO", "torch_anderson"):
        train(optimizer, Objective(model, a=Term(lambda u, i: u(i), torch.arange(10))), 3)
    assert caplog.records
    for record in caplog.records:
        assert "\n" not in record.getMessage() and len(record.getMessage()) < 500
