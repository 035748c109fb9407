"""Checkpoints of bases with an unusual layout of their state, and checkpoints with and without the wrapper."""

from functools import partial

import pytest
import pytorch_optimizer
import torch
from resuming import resumed, train_any
from torch.optim import SGD
from training import (
    BASES,
    EAGER,
    GRADIENTS,
    assert_same,
    both,
    counts,
    make,
    make_model,
    through_a_file,
    train,
    weights,
)

from torch_anderson import Anderson, GaussNewton

# ------------------------------------------------------------------------- bases with a layout of their own


def lookahead(params):
    return pytorch_optimizer.Lookahead(SGD(params, lr=0.1, momentum=0.5))


def schedule_free(params):
    base = pytorch_optimizer.ScheduleFreeWrapper(SGD(params, lr=0.1))
    base.train()
    return base


@pytest.mark.parametrize("wrap", [partial(Anderson, **EAGER), Anderson, GaussNewton])
@pytest.mark.parametrize("base", [lookahead, schedule_free])
def test_a_base_with_a_layout_of_its_own_resumes_bit_for_bit(base, wrap):
    def build():
        model = make_model()
        return model, wrap(base(model.parameters()))

    model, optimizer = build()
    train_any(model, optimizer, 20, start=0)
    again, other = resumed(model, optimizer, build)
    train_any(model, optimizer, 45, start=20)
    train_any(again, other, 45, start=20)
    assert_same(weights(again), weights(model))
    assert counts(other) == counts(optimizer)
    assert optimizer.stats.counts["accepted"] > 0


@pytest.mark.parametrize("base", [lookahead, schedule_free])
def test_a_checkpoint_of_a_bare_base_with_a_layout_of_its_own_starts_an_empty_history(base):
    bare = base(make_model().parameters())
    model = make_model()
    optimizer = Anderson(base(model.parameters()), **EAGER)
    optimizer.load_state_dict(bare.state_dict())
    train_any(model, optimizer, 20, start=0)
    assert optimizer.stats.counts["accepted"] > 0


@pytest.mark.parametrize("base", [lookahead, schedule_free])
def test_a_base_that_keeps_its_state_in_another_optimizer_cannot_take_back_a_jump(base):
    with pytest.raises(ValueError, match=r"Invalid safeguard: 'residual'\..*inner optimizer"):
        Anderson(base(make_model().parameters()), residual="step", safeguard="residual")


@pytest.mark.parametrize("base", [lookahead, schedule_free])
def test_its_steps_are_judged_by_gradients(base):
    model = make_model()
    optimizer = Anderson(base(model.parameters()), residual="step")
    train(model, optimizer, 20, start=0)
    found = optimizer.stats.counts
    assert found["accepted"] + found["rejected_gradient"] + found["skipped_no_descent"] > 0


# ------------------------------------------------------------------------------- wrapped and unwrapped


LATE = pytest.mark.parametrize("options", [{"period": 50}, {**GRADIENTS, "period": 50}], ids=["step", "gradient"])


@LATE
@pytest.mark.parametrize("base", BASES)
def test_a_checkpoint_of_the_bare_base_starts_an_empty_history(base, options):
    plain = make_model()
    bare = BASES[base](plain.parameters())
    train(plain, bare, 5)
    model, optimizer = make(base, **options)
    train(model, optimizer, 3)
    optimizer.load_state_dict(through_a_file(bare.state_dict()))
    model.load_state_dict(plain.state_dict())
    assert counts(optimizer) == {}
    train(model, optimizer, 20, start=5)
    train(plain, bare, 20, start=5)
    assert_same(weights(model), weights(plain))
    assert optimizer.options.period == 50


@both
@pytest.mark.parametrize("base", BASES)
def test_the_bare_base_trains_on_from_our_checkpoint(base, options):
    model, optimizer = make(base, **options)
    train(model, optimizer, 7)
    plain = make_model()
    bare = BASES[base](plain.parameters())
    plain.load_state_dict(model.state_dict())
    bare.load_state_dict(through_a_file(optimizer.state_dict()))
    with optimizer.disabled():
        train(model, optimizer, 12, start=7)
    train(plain, bare, 12, start=7)
    assert_same(weights(model), weights(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [EAGER | {"safeguard": "residual"}, GRADIENTS], ids=["step", "gradient"])
def test_entries_that_the_bare_base_has_loaded_and_cast_are_not_believed(dtype, options):
    model, optimizer = make("adamw_foreach", dtype=dtype, **options)
    train(model, optimizer, 6)
    bare = BASES["adamw_foreach"](model.parameters())
    bare.load_state_dict(optimizer.state_dict())
    again = Anderson(bare, **options)
    train(model, again, 1)
    assert counts(again) == {}


def test_a_group_that_opted_out_stays_out_when_a_checkpoint_of_the_bare_base_is_loaded():
    model, plain = make_model(), make_model()
    groups = [{"params": model[0].parameters(), "anderson": False}, {"params": model[2].parameters()}]
    optimizer = Anderson(SGD(groups, lr=0.1), **EAGER)
    bare = SGD([{"params": plain[0].parameters()}, {"params": plain[2].parameters()}], lr=0.1)
    optimizer.load_state_dict(bare.state_dict())
    assert [group.get("anderson", True) for group in optimizer.param_groups] == [False, True]
