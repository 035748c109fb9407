"""Evaluations leave no trace, whatever the user's function does."""

import copy

import pytest
import torch
from driven import EAGER, FIRST, Cone, driven, predictions, train, trained_plainly
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import Adam
from training import assert_same, batch, weights

from torch_anderson import GaussNewton


def restless_model():
    """A model with batch statistics and singular vectors in buffers, and random masks."""
    torch.manual_seed(0)
    layers = [spectral_norm(nn.Linear(4, 8)), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def run_restless(optimizer_of):
    """Losses, random numbers drawn in between, and all that model and base hold."""
    model = restless_model()
    optimizer = optimizer_of(model.parameters())
    outputs = Cone(optimizer) if isinstance(optimizer, GaussNewton) else None
    seen = []
    for i in range(50):
        optimizer.zero_grad()
        values, targets = predictions(model, i)
        loss = (values - targets).square().mean()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        optimizer.step(**({"outputs": lambda i=i: outputs(model, i)} if outputs else {}))
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        assert all(p.requires_grad for p in model.parameters())
        seen += [loss.detach(), torch.rand(2), *(g.clone() for g in gradients)]
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq", "step")]
    return [*seen, *moments, *model.state_dict().values()], optimizer


def test_a_rejected_jump_leaves_weights_state_gradients_buffers_and_random_numbers():
    seen, optimizer = run_restless(lambda params: GaussNewton(Adam(params, lr=1e-2), loss="mse", **EAGER))
    expected, _ = run_restless(lambda params: Adam(params, lr=1e-2))
    assert optimizer.stats.counts["rejected_loss"] > 0 == optimizer.stats.counts["accepted"]
    assert_same(seen, expected)


def test_all_evaluations_of_a_step_have_the_same_random_numbers():
    model, optimizer = driven()
    drawn = {}

    def outputs(model, i):
        drawn.setdefault(i, []).append(torch.rand(3))
        return predictions(model, i)

    train(model, optimizer, 30, outputs=outputs)
    assert drawn and all(len(numbers) > 5 for numbers in drawn.values())
    for numbers in drawn.values():
        assert_same(numbers, [numbers[0]] * len(numbers))


def test_dropout_does_not_count_as_random_outputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1)).double()
    _, optimizer = driven(model=model)
    train(model, optimizer, 60)
    assert optimizer.stats.counts["accepted"] > 0
    assert optimizer.stats.counts["skipped_random_outputs"] == 0


def test_no_graph_reaches_the_parameters_but_inputs_can_be_differentiated():
    model, optimizer = driven(loss="residual")
    x = torch.linspace(0, 1, 32, dtype=torch.float64).view(8, 4).requires_grad_()

    def equation(model, i):
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return slope.sum(1) - u[:, 0]

    def outputs(model, i):
        assert not any(p.requires_grad for p in model.parameters())
        return equation(model, i)

    train(model, optimizer, 40, outputs=outputs, objective=lambda model, i: equation(model, i).square().mean())
    assert optimizer.stats.counts["accepted"] > 0


@pytest.mark.parametrize("loss", ["mse", nn.functional.mse_loss])
def test_a_model_may_use_the_memory_of_its_outputs_again(loss):
    (model, optimizer), (twin, expected) = driven(loss=loss), driven(loss=loss)
    memory = torch.empty(32, 1, dtype=torch.float64)

    def outputs(model, i):
        values, targets = predictions(model, i)
        return memory.copy_(values), targets

    train(model, optimizer, 40, outputs=outputs)
    train(twin, expected, 40)
    assert expected.stats.counts["accepted"] > 0
    assert_same(weights(model), weights(twin))


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_an_error_in_the_function_reaches_the_user_with_the_weights_of_the_plain_step(call):
    """Calls: at the start, for repeatability, along a direction, and at the jump."""
    model, optimizer = driven()
    calls = []

    def outputs(model, i):
        calls.append(i)
        if len(calls) == call:
            raise Interrupted
        return predictions(model, i)

    torch.manual_seed(7)
    with pytest.raises(Interrupted):
        train(model, optimizer, 30, outputs=outputs)
    assert calls[-1] == FIRST - 1
    assert_same([torch.rand(2)], [torch.rand(2, generator=torch.Generator().manual_seed(7))])
    assert_same(weights(model), weights(trained_plainly(FIRST)))
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    train(model, optimizer, 40, start=FIRST)
    assert optimizer.stats.counts["accepted"] > 0


def test_an_error_in_the_loss_at_real_outputs_reaches_the_user():
    def loss(predictions, targets):
        raise Interrupted

    model, optimizer = driven(loss=loss)
    with pytest.raises(Interrupted):
        train(model, optimizer, 30)
    assert_same(weights(model), weights(trained_plainly(FIRST)))


def test_looking_at_the_state_in_inference_mode_before_the_first_step_does_no_harm():
    """Adagrad has state from the start, so that ours is built at the first look."""
    (model, optimizer), (twin, expected) = driven("adagrad"), driven("adagrad")
    with torch.inference_mode():
        model(batch(0, torch.float64)[0])
        assert optimizer.state_dict()["state"]
        copy.deepcopy(optimizer.stats)
    train(model, optimizer, 40)
    train(twin, expected, 40)
    assert expected.stats.counts["accepted"] > 0
    assert_same(weights(model), weights(twin))
