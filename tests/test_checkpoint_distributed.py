"""Distributed checkpoints: a resumed run has the same bits as an uninterrupted one."""

import pytest
from resuming import OPTIONS, assert_goes_on_as_without
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from training import GRADIENTS, assert_same, both, counts, make, through_a_file, train, weights

FORMS = {
    "nested": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "full on cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw_foreach", "adamw_fused", "adagrad"])
@pytest.mark.parametrize("options", [OPTIONS["pending"], OPTIONS["average"], OPTIONS["gradients"]], ids=str)
def test_a_distributed_checkpoint_resumes_bit_for_bit(base, form, options):
    def build():
        return make(base, **options)

    def interrupt(model, optimizer):
        state = get_optimizer_state_dict(model, optimizer, options=FORMS[form])
        saved = through_a_file({"model": get_model_state_dict(model), "optimizer": state})
        model, optimizer = build()
        set_model_state_dict(model, saved["model"])
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=FORMS[form])
        return model, optimizer

    assert_goes_on_as_without(build, interrupt, stop=6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw_foreach", "adamw_fused", "adagrad"])
@pytest.mark.parametrize("options", [OPTIONS["pending"], GRADIENTS], ids=["step", "gradient"])
def test_distributed_checkpoints_at_any_time_change_nothing(base, form, options):
    model, optimizer = make(base, **options)
    twin, undisturbed = make(base, **options)
    get_optimizer_state_dict(twin, undisturbed, options=FORMS[form])  # makes Adam count a step
    for i in range(20):
        get_optimizer_state_dict(model, optimizer, options=FORMS[form])
        train(model, optimizer, i + 1, start=i)
    train(twin, undisturbed, 20)
    assert_same(weights(model), weights(twin))
    assert counts(optimizer) == counts(undisturbed)


@pytest.mark.parametrize("form", FORMS)
@both
def test_a_distributed_checkpoint_made_before_the_first_step_loads(form, options):
    model, optimizer = make("adamw_foreach", **options)
    saved = through_a_file(get_optimizer_state_dict(model, optimizer, options=FORMS[form]))
    assert counts(optimizer) == {}
    other, fresh = make("adamw_foreach", **options)
    set_optimizer_state_dict(other, fresh, saved, options=FORMS[form])
    train(model, optimizer, 10)
    train(other, fresh, 10)
    assert_same(weights(model), weights(other))
