"""PyTorch's own tests of its optimizers, wrapped: hooks, errors and printing."""

import copy
import warnings

import pytest
import torch
from optim_db import DENSE, PLAIN, Run, able, assert_equal, over, over_inputs, random_gradients, steps_with_gradients
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

# ----------------------------------------------------------------------------------------------------- hooks


@over_inputs()
def test_every_step_hook_fires_once_with_the_wrapping_optimizer(info, variant, given):
    run = Run(info, given, variant)
    fired = []

    def note(kind):
        return lambda optimizer, args, kwargs: fired.append((kind, optimizer))

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
        run.optimizer.register_step_pre_hook(note("pre")),
        run.optimizer.register_step_post_hook(note("post")),
    ]
    try:
        run.train(2)
    finally:
        for handle in handles:
            handle.remove()
    run.train(1)
    assert fired == [(kind, run.optimizer) for kind in ("global pre", "pre", "post", "global post")] * 2


@over()
def test_a_step_hook_may_replace_the_closure(info, variant):
    run, called = Run(info, {}, variant), []

    def replacement():
        called.append("replacement")
        return run.closure()

    run.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, replacement), kwargs))
    run.step(lambda: called.append("original"))
    assert set(called) == {"replacement"}


@over()
def test_hooks_see_and_change_what_is_saved(info, variant):
    def before(optimizer):
        optimizer.state["test"] = 1

    def after(optimizer, state_dict):
        state_dict["found"] = state_dict["state"].pop("test", None)
        return state_dict

    run = Run(info, {}, variant)
    run.optimizer.register_state_dict_post_hook(after)
    assert run.optimizer.state_dict()["found"] is None
    handle = run.optimizer.register_state_dict_pre_hook(before)
    assert run.optimizer.state_dict()["found"] == 1
    handle.remove()
    assert "test" not in run.optimizer.state_dict()["state"]


@over()
def test_hooks_see_and_change_what_is_loaded(info, variant):
    def change(_, state_dict):
        state_dict["param_groups"][0]["lr"] = 0.002

    def replace(_, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] = 0.003
        return state_dict

    def note(optimizer):
        optimizer.state["loaded with"] = optimizer.param_groups[0]["lr"]

    def learning_rate(run):
        return run.optimizer.param_groups[0]["lr"]

    run = Run(info, {}, variant)
    run.train(2)
    run.optimizer.register_load_state_dict_pre_hook(change)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert learning_rate(run) == 0.002
    handle = run.optimizer.register_load_state_dict_pre_hook(replace, prepend=True)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert learning_rate(run) == 0.002  # ``change`` came last
    handle.remove()
    run.optimizer.register_load_state_dict_pre_hook(replace)
    run.optimizer.register_load_state_dict_post_hook(note)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert learning_rate(run) == run.optimizer.state["loaded with"] == 0.003


# --------------------------------------------------------------------------------------------- errors, printing


@over()
def test_errors_and_warnings_of_the_base_are_unchanged(info, variant):
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = error.optimizer_error_input

        def fails(error=error, given=given):
            optimizer = variant.wrap(info.optim_cls(given.params, **given.kwargs))
            if error.error_on is OptimizerErrorEnum.STEP_ERROR:
                optimizer.step()

        if issubclass(error.error_type, Warning):
            with pytest.warns(error.error_type, match=error.error_regex):
                fails()
        else:
            with pytest.raises(error.error_type, match=error.error_regex):
                fails()


@over(infos=able("groups"))
def test_a_parameter_that_a_group_has_twice_is_trained_as_by_the_base(info, variant):
    """PyTorch warns of it and steps it twice."""
    results = []
    for wrap in (variant, PLAIN):
        param = Parameter(torch.ones(2, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = wrap.wrap(info.optim_cls([param, param]))
        steps_with_gradients(optimizer, [param], random_gradients((2, 3), steps=1))
        results.append(param.detach().clone())
        steps_with_gradients(optimizer, [param], random_gradients((2, 3)))
        assert param.isfinite().all()
    assert_equal(*results)


@over_inputs()
def test_the_optimizer_can_be_printed_and_its_state_is_not_empty(info, variant, given):
    run = Run(info, given, variant)
    run.train(2)
    assert info.name in repr(run.optimizer)
    assert all(run.optimizer.state.values())


@over(infos=[info for info in DENSE if "differentiable" in info.supported_impls])
def test_a_differentiable_base_is_refused(info, variant):
    """A jump is no differentiable operation: gradients through it would be wrong."""
    base = info.optim_cls([Parameter(torch.ones(2, 3))], differentiable=True)
    with pytest.raises(ValueError, match="differentiable"):
        variant.wrap(base)
