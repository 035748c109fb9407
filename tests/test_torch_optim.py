"""PyTorch's own tests of its optimizers, for every input of every dense optimizer in PyTorch's database, wrapped.

This file has the tests of steps, learning rates and groups.
"""

import itertools
import re

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
    inputs,
    optim_db,
    over,
    over_inputs,
    stripped,
)
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
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
        jumps += counts["skipped_no_descent"]  # a step's jump, judged before it is made
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


@over_inputs()
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
    first, *_, before_last, last = Run(info, given, variant).train(21)
    # One of the last two may be the loss of a jump that the next gradient takes back.
    assert max(before_last, last) > first if given.get("maximize") else min(before_last, last) < first


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
    losses = run.train(21)
    assert losses[0] > min(losses[-2:])  # one of these may be that of a jump that is then taken back
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
