"""What PyTorch expects of an optimizer: types, signatures, schedulers, scalers, compilation."""

import inspect
import warnings

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    BASES,
    GRADIENTS,
    assert_counters_add_up,
    assert_same,
    both,
    counts,
    eager,
    learning_rates,
    left_alone,
    loss_of,
    make,
    make_model,
    train,
    weights,
)

from torch_anderson import Anderson, MovingAverage

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)], milestones=[3]
    ),
}
every_base = pytest.mark.parametrize("base", BASES)


# ------------------------------------------------------------------------------------- being an optimizer


@both
@every_base
def test_it_is_an_optimizer_that_shares_groups_state_and_defaults_with_its_base(base, options):
    _, optimizer = make(base, **options)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is optimizer.base.param_groups
    assert set(optimizer.state) == set(optimizer.base.state)
    assert not any(str(name).startswith("anderson_") for state in optimizer.base.state.values() for name in state)
    assert optimizer.defaults is optimizer.base.defaults


@pytest.mark.parametrize("method", ["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"])
def test_arguments_that_tools_pass_by_name_have_the_names_of_torch(method):
    ours = inspect.signature(getattr(Anderson, method)).parameters
    theirs = inspect.signature(getattr(Optimizer, method)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    extra = list(ours.values())[len(theirs) :]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in extra)


def test_amp_support_of_a_fused_base_is_not_leaked_to_gradient_scalers():
    _, optimizer = make("adamw_fused")
    assert optimizer.base._step_supports_amp_scaling
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


def test_modes_exist_exactly_if_the_base_has_them():
    _, optimizer = make("sgd")
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "eval")
    optimizer.base.train = lambda: "training"
    assert optimizer.train() == "training"


@both
@every_base
def test_it_accelerates_and_its_counters_add_up(base, options):
    model, optimizer = make(base, **options)
    train(model, optimizer, 20)
    flat = optimizer.stats.as_dict()
    assert flat["accepted"] > 0 or left_alone(optimizer)
    assert all(type(value) is float for value in flat.values())
    assert_counters_add_up(optimizer)


@both
@every_base
def test_disabled_steps_are_those_of_the_base_bit_for_bit(base, options):
    model, optimizer = make(base, **options)
    plain = make_model()
    with optimizer.disabled():
        losses = train(model, optimizer, 8)
    assert losses == train(plain, BASES[base](plain.parameters()), 8)
    assert_same(weights(model), weights(plain))


CLOSURES = [*({"safeguard": safeguard, "period": 2} for safeguard in ("loss", "residual", None)), GRADIENTS]


@every_base
@pytest.mark.parametrize("kind", CLOSURES, ids=str)
def test_the_closure_is_called_as_often_as_by_the_base(base, kind):
    # After a jump LBFGS may need another number of calls: its last step is the first that may jump.
    steps = 20 if base != "lbfgs" else 4 if kind.get("residual") == "gradient" else 2

    def calls(make_optimizer, **step_options):
        model, called = make_model(), []
        optimizer = make_optimizer(BASES[base](model.parameters()))

        def closure():
            called.append(1)
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure, **step_options)
        return len(called)

    assert calls(lambda b: Anderson(b, **eager(**kind)), loss_fn=lambda: 1.0) == calls(lambda b: b)


@pytest.mark.parametrize("options, steps", [({"period": 10}, 9), (GRADIENTS, 3)], ids=["step", "gradient"])
@every_base
def test_steps_before_the_first_jump_are_those_of_the_base_bit_for_bit(base, options, steps):
    model, optimizer = make(base, **options)
    plain = make_model()
    assert train(model, optimizer, steps) == train(plain, BASES[base](plain.parameters()), steps)
    assert_same(weights(model), weights(plain))


@pytest.mark.parametrize("options", [{"safeguard": "residual"}, GRADIENTS], ids=["step", "gradient"])
def test_after_disabled_it_accelerates_again(options):
    model, optimizer = make("sgd", **options)
    train(model, optimizer, 9)
    with optimizer.disabled():
        train(model, optimizer, 2)
        assert optimizer.stats.as_dict()["rejected_outside_write"] == 1
    before = optimizer.stats.as_dict()["attempted"]
    train(model, optimizer, 9)
    assert optimizer.stats.as_dict()["attempted"] > before
    assert_counters_add_up(optimizer)


@both
def test_a_class_for_tools_that_want_one_builds_and_wraps(options):
    model, plain = make_model(), make_model()
    cls = Anderson.wrapping(torch.optim.AdamW, **options)
    optimizer = cls(model.parameters(), lr=1e-2)
    assert issubclass(cls, Anderson) and isinstance(optimizer.base, torch.optim.AdamW)
    train(model, optimizer, 10)
    train(plain, Anderson(torch.optim.AdamW(plain.parameters(), lr=1e-2), **options), 10)
    assert_same(weights(model), weights(plain))
    positional = Anderson.wrapping(torch.optim.SGD)(model.parameters(), 0.5)
    assert learning_rates(positional) == [0.5]


@both
def test_an_empty_first_group_is_no_obstacle(options):
    model = make_model()
    groups = [{"params": []}, {"params": list(model.parameters())}]
    train(model, Anderson(torch.optim.SGD(groups, lr=0.1), **options), 5)


# ---------------------------------------------------------------------------------------------- schedulers


@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("base", ["momentum", "adamw_fused"])
@both
def test_schedules_are_those_of_the_base_without_a_warning(base, kind, wrapped_first, options):
    model, plain = make_model(), make_model()
    reference = BASES[base](plain.parameters())
    optimizer = BASES[base](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = SCHEDULERS[kind](reference)
        if wrapped_first:
            optimizer = Anderson(optimizer, **options)
            scheduler = SCHEDULERS[kind](optimizer)
        else:
            scheduler = SCHEDULERS[kind](optimizer)
            optimizer = Anderson(optimizer, **options)
        for i in range(12):
            train(plain, reference, i + 1, start=i)
            (loss,) = train(model, optimizer, i + 1, start=i)
            for each in (scheduler, expected):
                each.step(loss) if kind == "plateau" else each.step()
            assert learning_rates(optimizer) == learning_rates(reference)
    # At small rates the changes of the gradient are those of the batches: noise.
    assert counts(optimizer).keys() & {"accepted", "skipped_noisy" if options is GRADIENTS else "accepted"}


@pytest.mark.parametrize("options", [{"average": MovingAverage(3)}, GRADIENTS], ids=["step", "gradient"])
def test_a_step_of_learning_rate_zero_counts_for_nothing(options):
    (model, optimizer), (twin, without) = make("sgd", **options), make("sgd", **options)
    train(model, optimizer, 7)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, 16, start=7)
    train(twin, without, 16)
    assert_same(weights(model), weights(twin))
    assert optimizer.stats.counts == without.stats.counts


def test_a_step_of_gradient_zero_leaves_a_pending_jump_pending():
    (model, optimizer), (twin, without) = make("sgd", safeguard="residual"), make("sgd", safeguard="residual")
    train(model, optimizer, 6)
    assert optimizer.stats.as_dict()["attempted"] == 2
    assert sum(counts(optimizer).values()) == 3  # one of them is settled
    for p in model.parameters():
        p.grad.zero_()
    optimizer.step()
    train(model, optimizer, 12, start=6)
    train(twin, without, 12)
    assert_same(weights(model), weights(twin))
    assert optimizer.stats.counts == without.stats.counts


# --------------------------------------------------------------------------------------- gradient scaling


@pytest.mark.parametrize("base", ["momentum", "adamw_foreach", "adamw_fused"])
@both
def test_a_step_skipped_by_the_gradient_scaler_leaves_no_trace(base, options):
    (model, optimizer), (twin, without) = make(base, **options), make(base, **options)
    for run, opt, overflows in ((model, optimizer, {2, 5, 6}), (twin, without, ())):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, backoff_factor=0.5, growth_interval=1000)
        for i in range(12):
            for inf in [True] * (i in overflows) + [False]:
                opt.zero_grad()
                scaler.scale(loss_of(run, i) * (float("inf") if inf else 1.0)).backward()
                scaler.step(opt)
                scaler.update()
    assert_same(weights(model), weights(twin))
    assert optimizer.stats.counts == without.stats.counts
    assert optimizer.stats.as_dict()["accepted"] > 0


def test_the_gradient_scaler_forwards_the_loss_function():
    model, optimizer = make("sgd", safeguard="loss")
    scaler = torch.amp.GradScaler("cpu")
    for i in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, i)).backward()
        scaler.step(optimizer, loss_fn=lambda i=i: loss_of(model, i))
        scaler.update()
    assert optimizer.stats.as_dict()["extra_evaluations"] > 0


# -------------------------------------------------------------------------------- compilation, host reads


@pytest.mark.slow
@pytest.mark.parametrize("base", ["momentum", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("options", [{"average": MovingAverage(2)}, GRADIENTS], ids=str)
def test_a_compiled_training_step_is_the_eager_one(base, options):
    torch._dynamo.reset()
    (model, optimizer), (twin, eager) = make(base, **options), make(base, **options)

    def step(run, opt, i):
        opt.zero_grad()
        loss = loss_of(run, i)
        loss.backward()
        opt.step()

    compiled = torch.compile(step, backend="eager")
    for i in range(12):
        compiled(model, optimizer, i)
        step(twin, eager, i)
    torch.testing.assert_close(weights(model), weights(twin))
    assert optimizer.stats.counts == eager.stats.counts
    assert optimizer.stats.as_dict()["accepted"] > 0


def test_importing_the_library_does_not_import_the_compiler():
    import subprocess
    import sys

    code = "import torch, sys; before = 'torch._dynamo' in sys.modules; import torch_anderson; "
    code += "sys.exit(not before and 'torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in self.WAITS
        return func(*args, **(kwargs or {}))


def host_reads(model, optimizer, i):
    optimizer.zero_grad()
    loss_of(model, i).backward()
    with HostReads() as reads:
        optimizer.step()
    return reads.count


@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw_foreach", "adamw_fused", "adagrad"])
@pytest.mark.parametrize("options", [{}, {"average": MovingAverage(3)}], ids=str)
def test_no_step_but_an_accelerating_one_waits_for_the_device(base, options):
    model, optimizer = make(base, period=4, **options)
    plain = make_model()
    reference = BASES[base](plain.parameters())
    for i in range(15):
        extra = host_reads(model, optimizer, i) - host_reads(plain, reference, i)
        assert extra == 0 or (i + 1) % 4 == 0, f"step {i + 1} reads {extra} numbers"


@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw_foreach", "adamw_fused", "adagrad"])
def test_a_step_by_gradients_waits_at_most_once_and_not_before_it_can_jump(base):
    model, optimizer = make(base, **GRADIENTS)
    plain = make_model()
    reference = BASES[base](plain.parameters())
    for i in range(30):
        resting = optimizer._driver.resting
        extra = host_reads(model, optimizer, i) - host_reads(plain, reference, i)
        assert extra <= (0 if i < 3 or resting else 1), f"step {i + 1} reads {extra} numbers"


@both
def test_a_cleared_state_is_that_of_a_new_optimizer(options):
    """Clearing removes what the base keeps and what we have measured, and returns; the weights stay."""
    model, optimizer = make("adamw_foreach", **options)
    train(model, optimizer, 9)
    other, fresh = make("adamw_foreach", **options)
    other.load_state_dict(model.state_dict())
    optimizer.state.clear()
    assert len(optimizer.state) == 0
    assert counts(optimizer) == {}
    assert train(model, optimizer, 25) == train(other, fresh, 25)
    assert_same(weights(model), weights(other))
    assert counts(optimizer) == counts(fresh)
