"""What cannot work is refused in plain words; what depends on data is counted, and the plain step stays."""

import logging

import numpy as np
import pytest
import torch
from driven import EAGER, FIRST, driven, predictions, train, trained_plainly
from torch import nn
from torch.nn.functional import binary_cross_entropy, cross_entropy
from torch.optim import SGD, Adam
from training import assert_same, make_model, weights
from worlds import log_cosh

from torch_anderson import GaussNewton

# --------------------------------------------------------------------------------------------- trouble with data


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


def constant(model, i):
    return torch.ones(8, 1, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64)


def integers(model, i):
    values, targets = predictions(model, i)
    return (100 * values).long(), targets


UNUSABLE = {
    "nonfinite_outputs": not_finite,
    "outputs_changed": changing(),
    "outputs_wrote": writing,
    "outputs_wrote by .data": writing_data,
    "outputs_wrote by other memory": swapping,
    "random_outputs": random,
    "integer_outputs": integers,
    "no_outputs": None,
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_outputs_are_counted_said_once_and_cost_nothing_but_the_jump(name, caplog):
    model, optimizer = driven("momentum")
    with caplog.at_level(logging.INFO, "torch_anderson"):
        train(model, optimizer, 60, outputs=UNUSABLE[name])
    assert optimizer.stats.counts[f"skipped_{name.split()[0]}"] > 1
    assert optimizer.stats.counts["attempted"] == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "outputs" in caplog.text
    assert_same(weights(model), weights(trained_plainly(60, "momentum")))


@pytest.mark.parametrize("loss", ["residual", "mse", "cross_entropy", log_cosh])
def test_integer_outputs_are_counted_whatever_the_loss(loss):
    model, optimizer = driven(loss=loss)
    train(model, optimizer, 40, outputs=lambda model, i: (torch.arange(3), torch.arange(3)))
    assert optimizer.stats.counts["skipped_integer_outputs"] > 0 == optimizer.stats.counts["attempted"]
    assert_same(weights(model), weights(trained_plainly(40)))


def test_after_unusable_outputs_good_ones_are_used_again():
    model, optimizer = driven()
    train(model, optimizer, 20, outputs=not_finite)
    train(model, optimizer, 90, start=20)
    assert optimizer.stats.counts["accepted"] > 0


@pytest.mark.parametrize("kind", ["mse", "residual"])
@pytest.mark.parametrize("cause", ["no_outputs", "converged"])
def test_empty_and_perfect_outputs_make_plain_steps(kind, cause):
    """Perfect outputs depend on the weights, but cannot become better; empty ones are none."""
    model, optimizer = driven(loss=kind)
    shift = weights(model)[-1] * 0

    def outputs(model, i):
        if cause == "no_outputs":
            return (torch.zeros(0, 1), torch.zeros(0, 1)) if kind == "mse" else torch.zeros(0, 1)
        nonlocal shift
        values, _ = predictions(model, i)
        if optimizer.stats.counts["extra_evaluations"] == 0 or i != outputs.step:
            outputs.step, shift = i, values.detach().clone()
        return (values, shift) if kind == "mse" else values - shift

    outputs.step = -1
    train(model, optimizer, 40, outputs=outputs)
    assert optimizer.stats.counts[f"skipped_{cause}"] > 0 == optimizer.stats.counts["accepted"]
    assert_same(weights(model), weights(trained_plainly(40)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_that_are_next_to_nothing_are_left_out(dtype):
    """Logits that fit the data have gradients of 1e-42, with few digits, and a scale to unit length that overflows."""
    torch.manual_seed(0)
    x = torch.randn(64, 2, dtype=dtype)
    y = (x[:, 0] > 0).long()
    x[:, 0] += torch.sign(x[:, 0])
    model = nn.Linear(2, 2, dtype=dtype)
    steep = 48.0 if dtype == torch.float32 else 345.0
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-steep, 0.0], [steep, 0.0]]))
        model.bias.zero_()
    optimizer = GaussNewton(SGD(model.parameters(), lr=0.1, momentum=0.9), loss="cross_entropy", **EAGER)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step(outputs=lambda: (model(x), y))
    assert 0 < float(model.weight.grad.abs().max()) < torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    assert optimizer.stats.counts["attempted"] == 0
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_subnormal_direction_among_others_does_not_stop_a_jump():
    model, optimizer = driven("momentum", dtype=torch.float32)
    train(model, optimizer, FIRST - 1)
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-42)
    optimizer.step(outputs=lambda: predictions(model))
    assert optimizer.stats.counts["attempted"] == 1


def probabilities():
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
    return model, x, (x[:, :1] > 0).float()


def test_a_loss_with_a_domain_is_damped_until_modelled_outputs_are_inside():
    model, x, y = probabilities()
    optimizer = GaussNewton(Adam(model.parameters(), lr=0.01), loss=binary_cross_entropy, **EAGER)
    for _ in range(100):
        optimizer.zero_grad()
        loss = binary_cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(outputs=lambda: (model(x), y))
    plain, x, y = probabilities()
    base = Adam(plain.parameters(), lr=0.01)
    for _ in range(100):
        base.zero_grad()
        expected = binary_cross_entropy(plain(x), y)
        expected.backward()
        base.step()
    assert optimizer.stats.counts["accepted"] > 0
    assert loss.item() < expected.item()


@pytest.mark.parametrize("outside", [float("nan"), float("inf"), RuntimeError("outside")], ids=str)
def test_a_loss_that_is_defined_at_the_outputs_alone_makes_plain_steps(outside, caplog):
    known = []

    def loss(values, targets):
        inside = any(torch.equal(values.detach(), x.to(values)) for x in known)
        if not inside and isinstance(outside, Exception):
            raise outside
        return (values - targets).square().mean() + (0.0 if inside else outside)

    def outputs(model, i):
        found = predictions(model, i)
        known.append(found[0].detach())
        return found

    model, optimizer = driven(loss=torch.compiler.disable(loss))
    train(model, optimizer, 40, outputs=outputs)
    assert optimizer.stats.counts["skipped_loss_domain"] > 0 == optimizer.stats.counts["attempted"]
    assert "domain" in caplog.text
    assert_same(weights(model), weights(trained_plainly(40)))


# ------------------------------------------------------------------------------------------------ wrong programs

NUMBER, ROW = torch.tensor(1.0), torch.zeros(2)
WRONG = {
    "a number": ("mse", 1.0, "must return tensors"),
    "nothing": ("mse", None, "must return tensors"),
    "a dictionary": ("mse", {"logits": ROW}, "must return tensors"),
    "no tensor": ("mse", (), "must return tensors"),
    "a tensor and a number": ("mse", (ROW, 1.0), "must return tensors"),
    "predictions alone": ("mse", ROW, "predictions, targets"),
    "logits alone": ("cross_entropy", ROW, "predictions, targets"),
    "three tensors": ("mse", (ROW, ROW, ROW), "predictions, targets"),
    "other shapes": ("mse", (ROW, torch.ones(2, 1)), "same shape"),
    "a loss": ("residual", NUMBER, "one entry for each sample"),
    "losses": ("residual", (NUMBER, NUMBER), "one entry for each sample"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_output_at_all_raises_and_leaves_the_plain_step(name):
    loss, found, message = WRONG[name]
    model, optimizer = driven(loss=loss)
    with pytest.raises(TypeError, match=f"outputs.*{message}"):
        train(model, optimizer, 20, outputs=lambda model, i: found)
    assert_same(weights(model), weights(trained_plainly(FIRST)))


def test_outputs_that_do_not_depend_on_the_weights_are_refused():
    other = make_model(seed=1, dtype=torch.float64)
    for outputs in (constant, lambda model, i: predictions(other, i)):
        model, optimizer = driven()
        with pytest.raises(TypeError, match="do not depend on the weights"):
            train(model, optimizer, 20, outputs=outputs)
        assert_same(weights(model), weights(trained_plainly(FIRST)))


def frozen(model, optimizer):
    model[0].requires_grad_(False)


def opted_out(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "anderson": False})


def without_gradient(model, optimizer):
    def zero(*_):
        for param in model.parameters():
            param.grad.zero_()

    optimizer.base.register_step_pre_hook(zero)
    optimizer.param_groups[0]["weight_decay"] = 0.1


def at_rate_zero(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.0})


@pytest.mark.parametrize("reason", [frozen, opted_out, without_gradient, at_rate_zero])
def test_a_model_whose_outputs_may_well_be_constant_makes_plain_steps(reason, caplog):
    model, optimizer = driven()
    reason(model, optimizer)
    train(model, optimizer, 40, outputs=constant)
    assert optimizer.stats.counts["skipped_constant_outputs"] > 0 == optimizer.stats.counts["attempted"]
    assert caplog.text.count("do not depend on the weights") == 1


def test_a_model_whose_outputs_become_constant_goes_on_with_plain_steps():
    model, optimizer = driven()
    train(model, optimizer, 20)
    assert optimizer.stats.counts["attempted"] > 0
    train(model, optimizer, 80, start=20, outputs=constant)
    assert optimizer.stats.counts["skipped_constant_outputs"] > 0


def test_predictions_and_targets_given_as_residuals_are_refused():
    model, optimizer = driven(loss="residual")
    with pytest.raises(TypeError, match=r"predictions - targets, or .*loss='mse'"):
        train(model, optimizer, 20)
    assert_same(weights(model), weights(trained_plainly(FIRST)))


def test_two_residuals_of_one_shape_are_not_taken_for_predictions_and_targets():
    model, optimizer = driven(loss="residual")
    train(model, optimizer, 40, outputs=lambda model, i: (predictions(model, i)[0], 1 - predictions(model, i)[0]))
    assert optimizer.stats.counts["attempted"] > 0


@pytest.mark.parametrize("given", [torch.zeros(3), (torch.zeros(3), torch.zeros(3)), 1.0], ids=["tensor", "tuple", "1"])
@pytest.mark.parametrize("ahead", [True, False])
def test_tensors_instead_of_a_function_are_refused_at_once_and_no_step_is_made(given, ahead):
    model, optimizer = driven()
    before = weights(model)
    with pytest.raises(TypeError, match=r"Invalid outputs.*a function.*outputs=lambda: \(model\(x\), y\)"):
        optimizer.set_batch(outputs=given) if ahead else optimizer.step(outputs=given)
    assert_same(weights(model), before)


# -------------------------------------------------------------------------------------------------------- options

INVALID = [
    {"loss": "huber"}, {"loss": 3}, {"loss": None}, {"directions": "tangents"}, {"directions": 1}, {"budget": 0.0},
    {"budget": 1.0}, {"budget": "auto"}, {"budget": True}, {"forward_cost": 0.0}, {"forward_cost": float("inf")},
    {"forward_cost": float("nan")}, {"process_group": "world"},
]  # fmt: skip


@pytest.mark.parametrize("option", INVALID, ids=str)
def test_invalid_options_are_refused_by_name(option):
    with pytest.raises(ValueError, match=f"Invalid {next(iter(option))}: .*Allowed"):
        GaussNewton(SGD([nn.Parameter(torch.zeros(2))], lr=0.1), **option)


@pytest.mark.parametrize("option", ["safeguard", "period", "history_size", "storage", "use", "held_out"])
def test_options_of_the_other_accelerator_are_unknown(option):
    with pytest.raises(TypeError, match=option):
        GaussNewton(SGD([nn.Parameter(torch.zeros(2))], lr=0.1), **{option: 1})


def test_numbers_may_come_from_numpy():
    options = driven(budget=np.float64(0.5), forward_cost=np.float32(0.25))[1].options
    assert (options.budget, options.forward_cost) == (0.5, 0.25)
    assert type(options.budget) is type(options.forward_cost) is float
