"""PyTorch's own tests of its optimizers, for every input of every dense optimizer in PyTorch's database, wrapped."""

import copy
import io
import itertools
import pickle
import re
import warnings

import pytest
import torch
from optim_db import (
    AGREE,
    DENSE,
    JUMPING,
    PLAIN,
    REFUSED,
    STABLE,
    VARIANTS,
    Run,
    able,
    assert_equal,
    implementations,
    inputs,
    optim_db,
    over,
    over_inputs,
    stripped,
)
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import OptimizerErrorEnum
from training import left_alone

# --------------------------------------------------------------------------------------- what is compared at all


def test_every_optimizer_of_the_database_is_wrapped_or_refused_with_a_reason():
    assert {info.name for info in optim_db} == {info.name for info in DENSE} | set(REFUSED)
    assert all(info.only_supports_sparse_grads == (info.name in REFUSED) for info in optim_db)


@pytest.mark.parametrize("wrap", [variant.wrap for variant in VARIANTS.values()], ids=VARIANTS)
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_is_refused_says_so_at_construction(name, wrap):
    (info,) = [info for info in optim_db if info.name == name]
    for given in inputs(info):
        base = info.optim_cls([Parameter(torch.ones(2, 3))], **given)
        with pytest.raises(ValueError, match=f"Invalid base: {name}"):
            wrap(base)


@over(variants=JUMPING)
def test_jumps_are_made_in_these_tests(info, variant):
    jumps = 0
    for given in inputs(info):
        run = Run(info, given, variant)
        run.train()
        counts = run.optimizer.stats.as_dict()
        jumps += counts["accepted"] + counts["rejected_residual"] + counts["rejected_gradient"]
    assert jumps > 0 or left_alone(run.optimizer)


# --------------------------------------------------------------------------------------------- the base's steps


@over_inputs()
def test_disabled_steps_are_those_of_the_base_bit_for_bit(info, variant, given):
    ours, plain = Run(info, given, variant), Run(info, given)
    with ours.optimizer.disabled():
        assert_equal(ours.train(), plain.train(variant.steps))
    assert_equal(ours.weights(), plain.weights())
    assert_equal(stripped(ours.optimizer.state_dict()), plain.optimizer.state_dict())


@over_inputs(variants={name: variant for name, variant in VARIANTS.items() if variant.plain})
def test_steps_before_the_first_jump_are_those_of_the_base_bit_for_bit(info, variant, given):
    ours, plain = Run(info, given, variant), Run(info, given)
    assert_equal(ours.train(variant.plain), plain.train(variant.plain))
    assert_equal(ours.weights(), plain.weights())


@over_inputs(infos=able("backward, then step"))
def test_a_step_with_a_closure_is_a_backward_pass_and_a_step(info, variant, given):
    with_closure, without = Run(info, given, variant), Run(info, given, variant)
    losses = with_closure.train()
    for loss in losses:
        assert_equal(without.closure().detach(), loss)
        assert without.step(None) is None
    assert_equal(with_closure.weights(), without.weights())


@over_inputs()
def test_a_closure_is_called_by_the_base_alone_with_gradients_enabled(info, variant, given):
    calls = {}
    for wrap in (variant, PLAIN):
        run, called = Run(info, given, wrap), []

        def closure(run=run, called=called):
            assert torch.is_grad_enabled()
            called.append(run.closure())
            return called[-1]

        with torch.no_grad():  # PyTorch's optimizers enable gradients for the closure
            result = run.step(closure)
        assert result is called[0] or torch.equal(torch.as_tensor(result), called[0])
        calls[wrap] = len(called)
    assert calls[variant] == calls[PLAIN]


@over_inputs(variants={k: v for k, v in VARIANTS.items() if not v.gives_outputs})
def test_maximizing_a_loss_is_minimizing_its_negative(info, variant, given):
    if not given.get("maximize"):
        return
    ours, twin = Run(info, given, variant), Run(info, {**given, "maximize": False}, variant, sign=-1.0)
    assert_equal(ours.train(), -twin.train())
    assert_equal(ours.weights(), twin.weights())


# ------------------------------------------------------------------------------------------- the right direction

# Jumps without safeguard promise nothing; the residual that the paper's safeguard compares is not the loss.
DESCENDING = {name: variant for name, variant in VARIANTS.items() if name not in ("every_step", "residual")}


@over_inputs(variants=DESCENDING)
def test_the_loss_goes_in_the_right_direction(info, variant, given):
    if given.get("maximize") and variant.gives_outputs:
        return  # Gauss-Newton jumps lower the loss of the outputs
    run = Run(info, given, variant)
    first = run.train(20)[0]
    assert run.loss() > first if given.get("maximize") else run.loss() < first


@over(variants=DESCENDING)
def test_the_loss_goes_in_the_right_direction_with_the_schedulers_of_the_database(info, variant):
    for constructors in info.scheduler_inputs:
        ours, plain = Run(info, {}, variant), Run(info, {})
        schedulers = [[make(run.optimizer) for make in constructors] for run in (ours, plain)]
        first = ours.loss().item()
        for _ in range(20):
            loss = ours.train(1)[0]
            plain.train(1)
            for scheduler in itertools.chain(*schedulers):
                scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
            assert ours.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
        assert ours.loss().item() < first


# ------------------------------------------------------------------------------------- learning rates and groups


@over_inputs(variants=STABLE)
def test_a_learning_rate_in_a_tensor_is_one_in_a_number(info, variant, given):
    rate = 1.0 if info.step_requires_closure else 1e-2
    for tensor in (torch.tensor(rate, dtype=torch.float64), torch.tensor([rate], dtype=torch.float64)):
        try:
            ours = Run(info, {**given, "lr": tensor}, variant, dtype=torch.float64)
        except ValueError as error:  # the base's own
            assert re.search("lr as a Tensor is not supported", str(error))
            return
        twin = Run(info, {**given, "lr": rate}, variant, dtype=torch.float64)
        for run in (ours, twin):
            # LBFGS keeps the tensor itself in its state, where schedulers change it.
            scheduler = StepLR(run.optimizer, step_size=4, gamma=1.0 if info.step_requires_closure else 0.5)
            for _ in range(variant.steps):
                run.train(1)
                scheduler.step()
        torch.testing.assert_close(ours.weights(), twin.weights(), **AGREE)


@over_inputs(infos=able("groups"), variants=STABLE)
def test_two_equal_groups_are_one_group(info, variant, given):
    ours = Run(info, given, variant, dtype=torch.float64, groups=lambda params: [{"params": [p]} for p in params])
    twin = Run(info, given, variant, dtype=torch.float64)
    torch.testing.assert_close(ours.train(), twin.train(), **AGREE)
    torch.testing.assert_close(ours.weights(), twin.weights(), **AGREE)


@over_inputs(infos=able("groups"), variants=DESCENDING)
def test_groups_may_differ_in_weight_decay(info, variant, given):
    if given.get("maximize") or info.name == "Rprop":  # Rprop has no weight decay
        return
    decays = [given.get("weight_decay", 0.1), 0.0]
    run = Run(
        info,
        given,
        variant,
        groups=lambda params: [{"params": [p], "weight_decay": d} for p, d in zip(params, decays, strict=True)],
    )
    assert run.train(20)[0] > run.loss()
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == decays


@over_inputs(infos=able("groups"))
def test_a_group_whose_learning_rate_is_next_to_nothing_stays_where_it_is(info, variant, given):
    still = Parameter(torch.randn(2, 2, generator=torch.Generator().manual_seed(1)))
    start = still.detach().clone()
    rate = {"lr": 1e-28, **({"step_sizes": (0, 50)} if info.name == "Rprop" else {})}
    run = Run(info, given, variant, groups=lambda params: [{"params": params}, {"params": [still], **rate}])
    moving = run.weights()
    generator = torch.Generator().manual_seed(2)
    for _ in range(variant.steps):
        run.closure()
        still.grad = torch.randn(2, 2, generator=generator)
        run.step(None)
    assert_equal(still.detach(), start)
    assert not any(map(torch.equal, moving, run.weights()))


# ------------------------------------------------------------------------------- parameters of every kind


@over_inputs(variants=STABLE)
def test_implementations_agree(info, variant, given):
    forloop, *others = (
        Run(info, {**given, **implementation}, variant, dtype=torch.float64) for implementation in implementations(info)
    )
    losses = forloop.train()
    for run in others:
        torch.testing.assert_close(run.train(), losses, **AGREE)
        torch.testing.assert_close(run.weights(), forloop.weights(), **AGREE)


@over_inputs(infos=able("not dense"))
def test_parameters_that_are_not_dense_in_memory_are_refused(info, variant, given):
    for param in (torch.randn(3, 4, 2)[..., 0], torch.randn(3, 2)[..., 0]):
        base = info.optim_cls([Parameter(param)], **given)
        with pytest.raises(ValueError, match="not dense in memory"):
            variant.wrap(base)


def steps_with_gradients(optimizer, params, gradients):
    """One step for each list of gradients; a closure that a base calls several times gives the same ones again."""
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step(lambda: torch.tensor(1.0))


def random_gradients(*shapes, steps=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes] for _ in range(steps)]


@over_inputs(infos=able("transposed"), variants=STABLE)
def test_a_transposed_parameter_is_trained_as_its_contiguous_twin(info, variant, given):
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    contiguous, transposed = Parameter(start.clone()), Parameter(start.t().contiguous().t())
    gradients = random_gradients((3, 4), steps=variant.steps, dtype=torch.float64)
    for param in (contiguous, transposed):
        optimizer = variant.wrap(info.optim_cls([param], **copy.deepcopy(given)))
        steps_with_gradients(optimizer, [param], [[torch.empty_like(param).copy_(g)] for (g,) in gradients])
    assert not transposed.is_contiguous()
    torch.testing.assert_close(transposed.detach(), contiguous.detach(), **AGREE)


@over_inputs(variants=STABLE)
def test_gradients_that_are_not_contiguous_count_as_contiguous_ones(info, variant, given):
    if given.get("fused"):
        return  # the fused kernels read gradients in the order of memory
    shapes = [(3, 4), (3, 1)]
    results = []
    for spread in (False, True):
        params = [Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))
        gradients = random_gradients(*shapes, steps=variant.steps, dtype=torch.float64)
        if spread:
            gradients = [[torch.stack([g, g], -1)[..., 0] for g in grads] for grads in gradients]
        steps_with_gradients(optimizer, params, gradients)
        results.append([p.detach() for p in params])
    torch.testing.assert_close(*results, **AGREE)


@over_inputs(infos=able("complex"))
def test_complex_parameters_are_trained_as_their_real_views(info, variant, given):
    if given.get("fused"):
        return  # the fused kernels have no complex form
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.complex64)
    number, real = Parameter(start.clone()), Parameter(torch.ones(5))
    number_view, real_twin = Parameter(torch.view_as_real(start).clone()), Parameter(torch.ones(5))
    gradients = random_gradients((3, 4, 2), (5,), steps=variant.steps)
    as_complex = [[torch.view_as_complex(a), b] for a, b in gradients]
    for params, grads in (((number, real), as_complex), ((number_view, real_twin), gradients)):
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))
        steps_with_gradients(optimizer, params, grads)
    torch.testing.assert_close(torch.view_as_real(number.detach()), number_view.detach())
    torch.testing.assert_close(real.detach(), real_twin.detach())


@over_inputs(infos=able("complex"), variants=STABLE)
def test_complex_parameters_are_trained_as_their_real_and_imaginary_parts(info, variant, given):
    if given.get("fused"):
        return  # the fused kernels have no complex form

    def train(params, number):
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))

        def closure():
            optimizer.zero_grad()
            x, y = number()
            loss = ((1 - x) ** 2 + 100 * (y - x**2) ** 2).abs()
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)

    start = torch.randn(2, generator=torch.Generator().manual_seed(1), dtype=torch.complex128)
    whole, a, b = Parameter(start.clone()), Parameter(start.real.clone()), Parameter(start.imag.clone())
    train([whole], lambda: whole)
    train([a, b], lambda: torch.complex(a, b))
    torch.testing.assert_close(torch.complex(a, b).detach(), whole.detach(), **AGREE)


@over_inputs(infos=able("several types"))
def test_parameters_of_several_types_are_trained_together(info, variant, given):
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    params = [Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in dtypes]
    optimizer = variant.wrap(info.optim_cls(params, **given))
    for grads in random_gradients(*[(2, 3)] * len(params), steps=variant.steps):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step(lambda: torch.tensor(1.0))
    assert [param.dtype for param in params] == list(dtypes)
    assert all(param.isfinite().all() and param.count_nonzero() == 6 for param in params)


@over_inputs(infos=able("zero-dimensional"))
def test_a_parameter_without_dimensions_is_trained_as_one_of_length_one(info, variant, given):
    results = []
    for shape in ((), (1,)):
        params = [Parameter(torch.ones(4)), Parameter(torch.ones(shape))]
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))
        steps_with_gradients(
            optimizer, params, [[a, b.reshape(shape)] for a, b in random_gradients((4,), (1,), steps=variant.steps)]
        )
        results.append([param.detach().reshape(-1) for param in params])
    assert_equal(*results)


@over_inputs(infos=able("empty"))
def test_an_empty_parameter_changes_nothing(info, variant, given):
    results = []
    for shapes in (((4,), ()), ((4,), (), (0,), (0, 3))):
        params = [Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))
        gradients = random_gradients((4,), (), steps=variant.steps)
        steps_with_gradients(optimizer, params, [[*some, *map(torch.zeros, shapes[2:])] for some in gradients])
        results.append([param.detach() for param in params[:2]])
    assert_equal(*results)


# ------------------------------------------------------------------------------- gradients that are zero or None


def steps_without_gradients(info, variant, given, trainable):
    params = [Parameter(torch.ones(2, 3), requires_grad=trainable) for _ in range(2)]
    optimizer = variant.wrap(info.optim_cls(params, **given))
    for _ in range(3):
        assert optimizer.step(lambda: torch.tensor([1.0])) == 1.0
    assert_equal([param.detach() for param in params], [torch.ones(2, 3)] * 2)
    assert optimizer.stats.as_dict()["attempted"] == 0


@over_inputs()
def test_without_gradients_a_step_does_nothing(info, variant, given):
    steps_without_gradients(info, variant, given, trainable=True)


@over_inputs()
def test_with_all_parameters_frozen_a_step_does_nothing(info, variant, given):
    steps_without_gradients(info, variant, given, trainable=False)


@over_inputs()
def test_gradients_of_zero_move_nothing_that_the_base_leaves_alone(info, variant, given):
    moved = []
    for wrap in (PLAIN, variant):
        param = Parameter(torch.ones(5, 1))
        optimizer = wrap.wrap(info.optim_cls([param], **copy.deepcopy(given)))
        steps_with_gradients(optimizer, [param], [[torch.zeros(5, 1)]] * 3)
        moved.append(not torch.equal(param.detach(), torch.ones(5, 1)))
    assert moved[0] or not moved[1]


@over_inputs()
def test_a_parameter_without_gradient_stays_where_it_is_while_others_are_trained(info, variant, given):
    idle = Parameter(torch.ones(2, 2))
    run = Run(info, given, variant, groups=lambda params: [*params, idle])
    before = run.weights()
    run.train()
    assert_equal(idle.detach(), torch.ones(2, 2))
    assert not any(map(torch.equal, before, run.weights()))


@over_inputs(infos=able("frozen"))
def test_a_parameter_frozen_for_a_while_stays_where_it_is(info, variant, given):
    """Trained, then frozen without gradient, as PyTorch's comparison of implementations does it, then trained again."""
    run = Run(info, given, variant, dtype=torch.float64)
    weight, bias = run.params
    run.train()
    bias.requires_grad_(False)
    bias.grad = None
    before, moving = bias.detach().clone(), weight.detach().clone()
    run.train(3)
    assert_equal(bias.detach(), before)
    bias.requires_grad_(True)
    run.train(3)
    assert not torch.equal(bias.detach(), before)
    assert not torch.equal(weight.detach(), moving)


# ----------------------------------------------------------------------------------------------- checkpoints


def through_a_file(state_dict):
    """Saved, and loaded with nothing allowed but weights."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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
    run, twin = Run(info, given, variant), Run(info, given, variant)
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
