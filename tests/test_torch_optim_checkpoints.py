"""PyTorch's own tests of its optimizers, wrapped: checkpoints and copies."""

import copy
import itertools
import pickle

import torch
from optim_db import PLAIN, VARIANTS, Run, able, assert_equal, over, over_inputs, stripped
from training import through_a_file

# ----------------------------------------------------------------------------------------------- checkpoints


@over_inputs()
def test_a_run_resumed_from_a_file_continues_bit_for_bit(info, variant, given):
    run, resumed = Run(info, given, variant), Run(info, given, variant)
    run.train()
    saved = through_a_file(run.optimizer.state_dict())
    assert_equal(saved, copy.deepcopy(run.optimizer.state_dict()))
    loaded = copy.deepcopy(saved)
    resumed.take_weights(run)
    resumed.optimizer.load_state_dict(loaded)
    assert_equal(loaded, saved)
    assert_equal(resumed.train(), run.train())
    assert_equal(resumed.weights(), run.weights())
    assert_equal(resumed.optimizer.state_dict(), run.optimizer.state_dict())


@over()
def test_names_of_parameters_are_saved_and_may_be_missing_on_either_side(info, variant):
    def named(params):
        return list(zip(("weight", "bias"), params, strict=True))

    for before, after in itertools.product((list, named), repeat=2):
        run, resumed = Run(info, {}, variant, groups=before), Run(info, {}, variant, groups=after)
        run.train()
        resumed.take_weights(run)
        resumed.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        assert_equal(resumed.train(3), run.train(3))
        if named in (before, after):
            assert resumed.optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@over()
def test_a_repeated_group_is_represented_by_the_same_numbers(info, variant):
    run = Run(info, {}, variant)
    run.train(3)
    saved = run.optimizer.state_dict()["param_groups"][-1]
    run.optimizer.param_groups.extend(run.optimizer.param_groups)
    assert_equal(run.optimizer.state_dict()["param_groups"][-1], saved)


@over_inputs()
def test_checkpoints_without_newer_flags_and_with_steps_as_numbers_can_be_loaded(info, variant, given):
    # Without its flags ASGD rounds in another way, which jumps amplify: in float64, to far below the tolerance.
    precision = {"dtype": torch.float64} if info.name == "ASGD" else {}
    run, twin = (Run(info, given, variant, **precision) for _ in range(2))
    run.train()
    twin.train()
    old = copy.deepcopy(run.optimizer.state_dict())
    for group, flag in itertools.product(old["param_groups"], info.not_og_supported_flags):
        group.pop(flag, None)
    for entries in old["state"].values():
        if isinstance(entries.get("step"), torch.Tensor):
            entries["step"] = entries["step"].item()
    run.optimizer.load_state_dict(old)
    run.train(2)
    if not given.get("maximize") and not given.get("fused"):  # the flags come back with their defaults
        twin.train(2)
        torch.testing.assert_close(run.weights(), twin.weights())


@over_inputs()
def test_a_checkpoint_of_the_base_alone_can_be_loaded(info, variant, given):
    plain, ours = Run(info, given), Run(info, given, variant)
    plain.train(variant.steps)
    ours.take_weights(plain)
    ours.optimizer.load_state_dict(through_a_file(plain.optimizer.state_dict()))
    assert_equal(stripped(ours.optimizer.state_dict()), plain.optimizer.state_dict())
    with ours.optimizer.disabled():
        assert_equal(ours.train(2), plain.train(2))
    ours.train()


@over_inputs()
def test_without_our_entries_a_checkpoint_is_one_of_the_base(info, variant, given):
    ours, plain = Run(info, given, variant), Run(info, given)
    ours.train()
    with ours.optimizer.disabled():  # takes back a jump that was not decided yet
        pass
    plain.take_weights(ours)
    plain.optimizer.load_state_dict(stripped(through_a_file(ours.optimizer.state_dict())))
    assert_equal(plain.optimizer.state_dict(), stripped(ours.optimizer.state_dict()))
    with ours.optimizer.disabled():
        assert_equal(ours.train(3), plain.train(3))
    assert_equal(ours.weights(), plain.weights())


@over_inputs(infos=able("another type"))
def test_a_checkpoint_can_be_loaded_for_parameters_of_another_type(info, variant, given):
    narrow, wide = Run(info, given, variant), Run(info, given, variant, dtype=torch.float64)
    narrow.train()
    wide.take_weights(narrow)
    wide.optimizer.load_state_dict(narrow.optimizer.state_dict())
    before = wide.weights()
    wide.train()
    assert all(param.dtype == torch.float64 for param in wide.params)
    assert not any(map(torch.equal, before, wide.weights()))


# ---------------------------------------------------------------------------------------------------- copies


def public(optimizer):
    return {name for name in vars(optimizer) if not name.startswith("_")}


@over_inputs(infos=able("copies"))
def test_deep_and_pickled_copies_continue_bit_for_bit_without_touching_the_original(info, variant, given):
    run = Run(info, given, variant)
    run.train()
    copies = [copy.deepcopy(run), pickle.loads(pickle.dumps(run))]
    before, expected = run.weights(), copy.deepcopy(run)
    losses = expected.train()
    for each in copies:
        assert public(each.optimizer) == public(run.optimizer)
        assert_equal(each.optimizer.state_dict(), run.optimizer.state_dict())
        assert_equal(each.train(), losses)
        assert_equal(each.weights(), expected.weights())
    assert_equal(run.weights(), before)
    assert_equal(run.train(), losses)


@over_inputs(infos=able("copies"), variants={"plain": PLAIN, **VARIANTS})
def test_a_shallow_copy_shares_everything_with_the_original(info, variant, given):
    run, twin = Run(info, given, variant), Run(info, given, variant)
    run.train(3)
    optimizers = itertools.cycle([copy.copy(run.optimizer), run.optimizer])
    twin.train(3)
    for loss in twin.train(variant.steps):
        run.optimizer = next(optimizers)
        assert_equal(run.train(1)[0], loss)
    assert_equal(run.weights(), twin.weights())
