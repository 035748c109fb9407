"""Evaluations leave no trace, whatever the user's function does, and bad options are refused."""

import logging

import numpy as np
import pytest
import torch
from driven import BOTH, EAGER, Cone, driven, predictions, train, trained_plainly
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Adam
from training import assert_same, batch, weights

from torch_anderson import Anderson, Discrepancy

# ------------------------------------------------------------------------------------------------- no trace


def restless_model():
    """Batch statistics and singular vectors in buffers, and random masks."""
    torch.manual_seed(0)
    layers = [spectral_norm(nn.Linear(4, 8)), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def run_restless(optimizer_of):
    """Losses, random numbers drawn in between, and all that model and base hold."""
    model = restless_model()
    optimizer = optimizer_of(model.parameters())
    outputs = Cone(optimizer) if isinstance(optimizer, Anderson) else None
    seen = []
    for i in range(30):
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


@pytest.mark.parametrize("options", [EAGER, BOTH], ids=["training", "both"])
def test_a_rejected_jump_leaves_weights_state_gradients_buffers_and_random_numbers(options):
    settings = Discrepancy("mse", **options)
    seen, optimizer = run_restless(lambda params: Anderson(Adam(params, lr=1e-2), discrepancy=settings))
    expected, _ = run_restless(lambda params: Adam(params, lr=1e-2))
    assert optimizer.stats.counts["rejected_loss"] > 0 == optimizer.stats.counts["accepted"]
    assert_same(seen, expected)


def test_all_evaluations_of_a_step_have_the_same_random_numbers():
    model, optimizer = driven()
    drawn = {}

    def outputs(model, i):
        drawn.setdefault(i, []).append(torch.rand(3))
        return predictions(model, i)

    train(model, optimizer, 12, outputs=outputs)
    assert drawn and all(len(numbers) > 5 for numbers in drawn.values())
    for numbers in drawn.values():
        assert_same(numbers, [numbers[0]] * len(numbers))


def test_dropout_does_not_count_as_random_outputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1)).double()
    _, optimizer = driven(model=model)
    train(model, optimizer, 20)
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

    train(model, optimizer, 12, outputs=outputs, objective=lambda model, i: equation(model, i).square().mean())
    assert optimizer.stats.counts["accepted"] > 0


@pytest.mark.parametrize("loss", ["mse", nn.functional.mse_loss])
def test_a_model_may_use_the_memory_of_its_outputs_again(loss):
    (model, optimizer), (twin, expected) = driven(loss=loss), driven(loss=loss)
    memory = torch.empty(32, 1, dtype=torch.float64)
    train(
        model,
        optimizer,
        12,
        outputs=lambda model, i: (memory.copy_(predictions(model, i)[0]), batch(i, memory.dtype)[1]),
    )
    train(twin, expected, 12)
    assert expected.stats.counts["accepted"] > 0
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("use", ["training", "both"])
def test_an_error_in_the_function_reaches_the_user_with_the_weights_of_the_plain_step(call, use):
    model, optimizer = driven(**(BOTH if use == "both" else EAGER))
    calls = []

    def outputs(model, i):
        calls.append(i)
        if len(calls) == call:
            raise KeyError("mine")
        return predictions(model, i)

    with pytest.raises(KeyError, match="mine"):
        train(model, optimizer, 20, outputs=outputs)
    before_the_step = optimizer.stats.counts["attempted"] == 0 and use == "both"
    plain = trained_plainly(calls[-1] + (0 if before_the_step else 1))
    assert_same(weights(model), weights(plain))
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    train(model, optimizer, 20, start=calls[-1] + 1)
    assert optimizer.stats.counts["accepted"] > 0


# ---------------------------------------------------------------------------------- what cannot be worked with


def not_finite(model, i):
    values, targets = predictions(model, i)
    return values * float("nan"), targets


def changing(calls=[0]):  # noqa: B006
    def outputs(model, i):
        calls[0] += 1
        values, targets = predictions(model, i)
        return values[: 20 + calls[0] % 2], targets[: 20 + calls[0] % 2]

    return outputs


def writing(model, i):
    found = predictions(model, i)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    return found


def writing_data(model, i):
    found = predictions(model, i)
    next(model.parameters()).data.mul_(1.0001)
    return found


def swapping(model, i):
    found = predictions(model, i)
    first = next(model.parameters())
    first.data = first.data * 1.0001
    return found


def random(model, i, generator=np.random.default_rng(0)):  # noqa: B008
    values, targets = predictions(model, i)
    return values + torch.from_numpy(generator.standard_normal(values.shape)), targets


BAD = {
    "nonfinite_outputs": not_finite,
    "outputs_changed": changing(),
    "outputs_wrote": writing,
    "outputs_wrote by .data": writing_data,
    "outputs_wrote by other memory": swapping,
    "random_outputs": random,
    "no_outputs": None,
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_outputs_are_counted_said_once_and_cost_nothing_but_the_jump(name, caplog):
    model, optimizer = driven("momentum")
    with caplog.at_level(logging.INFO, "torch_anderson"):
        train(model, optimizer, 20, outputs=BAD[name])
    assert optimizer.stats.counts[f"skipped_{name.split()[0]}"] > 1
    assert optimizer.stats.counts["attempted"] == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "outputs" in caplog.text
    assert_same(weights(model), weights(trained_plainly(20, "momentum")))


def test_after_unusable_outputs_good_ones_are_used_again():
    model, optimizer = driven()
    train(model, optimizer, 6, outputs=not_finite)
    train(model, optimizer, 40, start=6)
    assert optimizer.stats.counts["accepted"] > 0


@pytest.mark.parametrize(
    "found",
    [1.0, None, {"logits": torch.zeros(2)}, (), (torch.zeros(2), 1.0), torch.zeros(2), (torch.zeros(2), torch.ones(3))],
    ids=str,
)
def test_what_is_no_output_at_all_raises_and_leaves_the_plain_step(found):
    model, optimizer = driven()
    with pytest.raises(TypeError, match="outputs"):
        train(model, optimizer, 20, outputs=lambda model, i: found)
    steps = optimizer._accelerator.k
    assert 0 < steps < 20
    assert_same(weights(model), weights(trained_plainly(steps)))


@pytest.mark.parametrize("kind", ["mse", "residual"])
def test_empty_and_perfect_outputs_make_plain_steps(kind):
    for found in (torch.zeros(0, 1), torch.zeros(5, 1)):
        model, optimizer = driven(loss=kind)
        train(model, optimizer, 12, outputs=lambda model, i, found=found: (found, found))
        assert optimizer.stats.counts["accepted"] == 0
        assert_same(weights(model), weights(trained_plainly(12)))


# -------------------------------------------------------------------------------------------------- options

INVALID = [
    {"loss": "huber"}, {"loss": 3}, {"use": "testing"}, {"probe": "jvp"}, {"history_size": 0}, {"history_size": 2.0},
    {"store_period": 0}, {"jumps": -1}, {"period": True}, {"warmup": -1}, {"budget": 0.0}, {"budget": 1.0},
    {"forward_cost": 0.0}, {"forward_cost": float("inf")}, {"damping": -1.0}, {"damping": "auto"}, {"held_out": "half"},
]  # fmt: skip


@pytest.mark.parametrize("option", INVALID, ids=str)
def test_invalid_options_are_refused_by_name(option):
    with pytest.raises(ValueError, match=f"Invalid {next(iter(option))} .*Allowed"):
        Discrepancy(**{"loss": "mse", **option})


@pytest.mark.parametrize("option", [{"safeguard": "loss"}, {"period": 5}, {"residual": "cycle"}, {"history_size": 3}])
def test_options_of_the_other_driver_are_refused(option):
    with pytest.raises(ValueError, match=f"Invalid {next(iter(option))}.*no effect with discrepancy"):
        Anderson(SGD([nn.Parameter(torch.zeros(2))], lr=0.1), discrepancy="mse", **option)


@pytest.mark.parametrize("given", ["huber", 3, ["mse"]])
def test_an_unknown_discrepancy_is_refused(given):
    with pytest.raises(ValueError, match="Invalid loss"):
        Anderson(SGD([nn.Parameter(torch.zeros(2))], lr=0.1), discrepancy=given)


def test_outputs_given_to_the_residual_driver_are_never_called():
    model = nn.Linear(4, 1)
    optimizer = Anderson(SGD(model.parameters(), lr=0.1))
    for i in range(25):
        optimizer.zero_grad()
        model(batch(i)[0]).square().mean().backward()
        optimizer.step(outputs=lambda: pytest.fail("called"))
