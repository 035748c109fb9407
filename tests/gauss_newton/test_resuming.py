"""Interrupting a run of ``GaussNewton`` and going on: the same bits as without the interruption."""

import copy
import io
import pickle

import pytest
import torch
from driven import EAGER, driven, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Adam, AdamW
from training import BASES, assert_same, counts, make_model, weights

from torch_anderson import Anderson, GaussNewton
from torch_anderson._gauss_newton.state import FIXED


def assert_go_on_alike(one, other, steps):
    for model, optimizer in (one, other):
        train(model, optimizer, **steps)
    assert_same(weights(one[0]), weights(other[0]))
    assert counts(one[1]) == counts(other[1])
    assert one[1].stats.gauges() == other[1].stats.gauges()
    assert one[1].stats.counts["accepted"] > 0


def through_a_file(model, optimizer, base, options):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, optimizer = driven(base, **options)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


CONTINUED = {
    "file": through_a_file,
    "copy": lambda model, optimizer, *_: copy.deepcopy((model, optimizer)),
    "pickle": lambda model, optimizer, *_: pickle.loads(pickle.dumps((model, optimizer))),
}


@pytest.mark.parametrize("how", CONTINUED)
@pytest.mark.parametrize(("base", "dtype"), [("sgd", torch.float64), ("adamw_foreach", torch.bfloat16)])
@pytest.mark.parametrize("middle", [0, 3, 17, 33])
def test_training_goes_on_bit_for_bit(how, base, dtype, middle):
    """Interrupted before the first step, before the first jump, and between two."""
    options = {"dtype": dtype}
    model, optimizer = driven(base, **options)
    train(model, optimizer, middle)
    twin, other = CONTINUED[how](model, optimizer, base, options)
    other._driver.state.samples = FIXED  # as in ``driven``; there is no state before the first step
    assert_go_on_alike((model, optimizer), (twin, other), {"start": middle, "steps": 80})


@pytest.mark.parametrize("base", ["sgd", "adamw_fused"])
def test_a_distributed_checkpoint_goes_on_bit_for_bit(base):
    model, optimizer = driven(base)
    train(model, optimizer, 28)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    twin, other = driven(base)
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, other, saved)
    assert_go_on_alike((model, optimizer), (twin, other), {"start": 28, "steps": 60})


class Sleeper(nn.Module):
    """A model of which one parameter gets a gradient, and has an effect, only when it is awake."""

    def __init__(self, value):
        super().__init__()
        self.model, self.awake = make_model(dtype=torch.float64), False
        self.sleeping = nn.Parameter(torch.full((3,), value, dtype=torch.float64))

    def forward(self, x):
        return self.model(x) + (0.1 * self.sleeping.square().sum() if self.awake else 0.0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_parameter_that_wakes_up_after_the_checkpoint_goes_on_bit_for_bit(order):
    def build(value):
        model = Sleeper(value)
        groups = [{"params": list(model.model.parameters())}, {"params": [model.sleeping]}][::order]
        return model, GaussNewton(AdamW(groups, lr=1e-2), loss="mse", **EAGER)

    model, optimizer = build(5.0)
    train(model, optimizer, 18)
    twin, other = build(0.0)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.awake = twin.awake = True
    assert_go_on_alike((model, optimizer), (twin, other), {"start": 18, "steps": 60})


@pytest.mark.parametrize("ours_loads", [True, False])
def test_a_checkpoint_of_the_other_accelerator_is_refused_and_changes_nothing(ours_loads):
    model, optimizer = driven()
    residual = Anderson(BASES["sgd"](model.parameters()))
    train(model, optimizer, 20)
    train(model, residual, 20)
    source, target = (residual, optimizer) if ours_loads else (optimizer, residual)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match="another accelerator"):
        target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target.state_dict(), before, rtol=0, atol=0, equal_nan=True)


def test_a_checkpoint_of_the_base_alone_can_be_loaded():
    plain = make_model(dtype=torch.float64)
    base = Adam(plain.parameters(), lr=1e-2)
    train(plain, base, 5)
    model = copy.deepcopy(plain)
    optimizer = GaussNewton(Adam(model.parameters(), lr=1e-2), loss="mse", **EAGER)
    optimizer.load_state_dict(copy.deepcopy(base.state_dict()))
    train(plain, base, 15, start=5)
    train(model, optimizer, 15, start=5)
    assert_same(weights(model), weights(plain))
    train(model, optimizer, 60, start=15)
    assert optimizer.stats.counts["accepted"] > 0


def test_numbers_of_a_checkpoint_are_the_same_for_every_parameter_and_vectors_have_its_shape():
    model, optimizer = driven()
    train(model, optimizer, 40)
    entries = optimizer.state_dict()["state"]
    for index, p in enumerate(model.parameters()):
        assert entries[index]["anderson_directions"].shape == (25, *p.shape)
        assert entries[index]["anderson_stored"].shape == p.shape
        assert_same([entries[index]["anderson_state"]], [entries[0]["anderson_state"]])


def test_a_reset_starts_anew_and_keeps_the_weights():
    model, optimizer = driven()
    train(model, optimizer, 40)
    before = weights(model)
    optimizer.reset_history()
    assert_same(weights(model), before)
    attempted = optimizer.stats.counts["attempted"]
    assert optimizer.stats.gauges()["damping"] == 1e-3
    train(model, optimizer, 50, start=40)  # two points are stored: no direction yet
    assert optimizer.stats.counts["attempted"] == attempted > 0
    train(model, optimizer, 60, start=50)
    assert optimizer.stats.counts["attempted"] > attempted
    assert optimizer.stats.counts["restarts"] == 1
