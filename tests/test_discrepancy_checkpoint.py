"""Interrupting a run that its discrepancy drives, and going on: the same bits as without the interruption."""

import copy
import io
import pickle

import pytest
import torch
from driven import ASIDE, BOTH, EAGER, driven, evaluated, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Adam, AdamW
from training import BASES, assert_same, counts, make_model, weights

from torch_anderson import Anderson, Discrepancy

USES = pytest.mark.parametrize("options", [EAGER, ASIDE, BOTH], ids=["training", "evaluation", "both"])


def assert_go_on_alike(one, other, steps, **how):
    for model, optimizer in (one, other):
        train(model, optimizer, **steps, **how)
    assert_same(weights(one[0]), weights(other[0]))
    assert counts(one[1]) == counts(other[1])
    assert one[1].stats.counts["extra_evaluations"] > 0
    assert_same(evaluated(*one), evaluated(*other))


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
@USES
@pytest.mark.parametrize(("base", "dtype"), [("sgd", torch.float64), ("adamw_foreach", torch.bfloat16)])
def test_training_goes_on_bit_for_bit(how, options, base, dtype):
    options = {**options, "dtype": dtype}
    for middle in (7, 14):
        model, optimizer = driven(base, **options)
        train(model, optimizer, middle)
        twin, other = CONTINUED[how](model, optimizer, base, options)
        assert_go_on_alike((model, optimizer), (twin, other), {"start": middle, "steps": 30})


@USES
@pytest.mark.parametrize("base", ["sgd", "adamw_fused"])
def test_a_distributed_checkpoint_goes_on_bit_for_bit(options, base):
    model, optimizer = driven(base, **options)
    train(model, optimizer, 9)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    twin, other = driven(base, **options)
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, other, saved)
    assert_go_on_alike((model, optimizer), (twin, other), {"start": 9, "steps": 30})


class Sleeper(nn.Module):
    """One of its parameters gets a gradient, and has an effect, only when it is awake."""

    def __init__(self, value):
        super().__init__()
        self.model, self.awake = make_model(dtype=torch.float64), False
        self.sleeping = nn.Parameter(torch.full((3,), value, dtype=torch.float64))

    def forward(self, x):
        return self.model(x) + (0.1 * self.sleeping.square().sum() if self.awake else 0.0)


@USES
@pytest.mark.parametrize("order", [1, -1])
def test_a_parameter_that_wakes_up_after_the_checkpoint_goes_on_bit_for_bit(options, order):
    def build(value):
        model = Sleeper(value)
        groups = [{"params": list(model.model.parameters())}, {"params": [model.sleeping]}][::order]
        return model, Anderson(AdamW(groups, lr=1e-2), discrepancy=Discrepancy("mse", **options))

    model, optimizer = build(5.0)
    train(model, optimizer, 9)
    twin, other = build(0.0)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.awake = twin.awake = True
    assert_go_on_alike((model, optimizer), (twin, other), {"start": 9, "steps": 30})


OTHER = [{"history_size": 3}, {"jumps": 0}, {"use": "both"}, {"use": "evaluation"}]


@pytest.mark.parametrize("options", OTHER, ids=str)
def test_a_checkpoint_of_other_options_is_refused_and_changes_nothing(options):
    model, optimizer = driven("adamw_foreach")
    train(model, optimizer, 12)
    twin, other = driven("adamw_foreach", **options)
    train(twin, other, 12)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="another"):
        optimizer.load_state_dict(other.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("ours_drives", [True, False])
def test_a_checkpoint_of_the_other_driver_is_refused(ours_drives):
    model, optimizer = driven()
    residual = Anderson(BASES["sgd"](model.parameters()))
    train(model, optimizer, 12)
    train(model, residual, 12)
    source, target = (residual, optimizer) if ours_drives else (optimizer, residual)
    with pytest.raises(ValueError, match="another driver"):
        target.load_state_dict(source.state_dict())


def test_a_checkpoint_of_the_base_alone_can_be_loaded():
    plain = make_model(dtype=torch.float64)
    base = Adam(plain.parameters(), lr=1e-2)
    train(plain, base, 5)
    model = copy.deepcopy(plain)
    optimizer = Anderson(Adam(model.parameters(), lr=1e-2), discrepancy=Discrepancy("mse", **EAGER))
    optimizer.load_state_dict(copy.deepcopy(base.state_dict()))
    train(plain, base, 7, start=5)
    train(model, optimizer, 7, start=5)
    assert_same(weights(model), weights(plain))
    train(model, optimizer, 30, start=7)
    assert optimizer.stats.counts["accepted"] > 0
