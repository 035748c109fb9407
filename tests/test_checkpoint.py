"""Interrupting a run and going on: the same bits as without the interruption, through every kind of checkpoint."""

import copy
import io
import pickle
import random
from functools import partial

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from training import (
    BASES,
    EAGER,
    GRADIENTS,
    assert_counters_add_up,
    assert_same,
    batch,
    counts,
    eager,
    left_alone,
    loss_of,
    make,
    make_model,
    train,
    weights,
)

from torch_anderson import Anderson, GaussNewton, MovingAverage

OPTIONS = {
    "plain": {},
    "short jumps": {"max_jump": 2.0, "period": 5},
    "pending": {"safeguard": "residual"},
    "average": {"average": MovingAverage(4, tolerance=0.0)},
    "before the first store": {"store_period": 7, "period": 14},
    "average and pending": {"average": MovingAverage(3), "safeguard": "residual", "period": 2},
    "damped, warm-up": {"relaxation": 0.5, "warmup": 2},
    "gradients": GRADIENTS,
    "gradients, any jump": {**GRADIENTS, "safeguard": None},
    "gradients, each third step, warm-up": {**GRADIENTS, "period": 3, "warmup": 2},
}
SAVABLE = [base for base in BASES if base != "list_state"]
"""A base that keeps no dictionaries leaves our entries no place."""
both = pytest.mark.parametrize("options", [EAGER, GRADIENTS], ids=["step", "gradient"])


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(model, optimizer, build):
    """Another model and optimizer, loaded from what was saved of these."""
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = build()
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    return model, optimizer


def assert_goes_on_as_without(build, interrupt, stop=5, end=30):
    model, optimizer = build()
    twin, uninterrupted = build()
    train(model, optimizer, stop)
    model, optimizer = interrupt(model, optimizer)
    losses = train(model, optimizer, end, start=stop)
    assert losses == train(twin, uninterrupted, end)[stop:]
    assert_same(weights(model), weights(twin))
    assert counts(optimizer) == counts(uninterrupted)
    found = uninterrupted.stats.as_dict()
    assert found["attempted"] > 0 or found["skipped_noisy"] > 0 or left_alone(optimizer)
    assert_counters_add_up(optimizer)


# ------------------------------------------------------------------------------------------- plain files


@pytest.mark.parametrize("stop", [1, 6])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("base", SAVABLE)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(base, options, stop):
    def build():
        return make(base, **options)

    assert_goes_on_as_without(build, lambda *run: resumed(*run, build), stop=stop)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [OPTIONS["average"], OPTIONS["pending"], OPTIONS["gradients"]], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_in_every_precision(dtype, options):
    def build():
        return make("adamw_foreach", dtype=dtype, **options)

    assert_goes_on_as_without(build, lambda *run: resumed(*run, build))


@pytest.mark.parametrize("cause, options", [("residual", OPTIONS["pending"]), ("gradient", GRADIENTS)])
def test_a_jump_that_is_pending_in_a_checkpoint_can_still_be_taken_back(cause, options):
    def build():
        return make("momentum", **options)

    taken_back = f"rejected_{cause}"
    for stop in range(3, 60):
        model, optimizer = build()
        train(model, optimizer, stop)
        flat = optimizer.stats.as_dict()
        pending = flat["attempted"] > flat["accepted"] + flat[taken_back]
        train(model, optimizer, stop + 1, start=stop)
        if pending and optimizer.stats.as_dict()[taken_back] > flat[taken_back]:
            return assert_goes_on_as_without(build, lambda *run: resumed(*run, build), stop=stop, end=stop + 30)
    pytest.fail("no jump was taken back")


@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw_foreach"])
def test_a_run_by_gradients_resumes_bit_for_bit_from_each_of_its_steps(base):
    """Among them those at which it looks, rests, and waits for the decision on a jump, a first and a shortened one."""

    def build():
        return make(base, **GRADIENTS)

    model, uninterrupted = build()
    losses, states, end = [], [], 60
    for i in range(end):
        states.append(through_a_file({"model": model.state_dict(), "optimizer": uninterrupted.state_dict()}))
        losses += train(model, uninterrupted, i + 1, start=i)
    for i, saved in enumerate(states):
        other, optimizer = build()
        optimizer.load_state_dict(saved["optimizer"])
        other.load_state_dict(saved["model"])
        assert train(other, optimizer, end, start=i) == losses[i:]
        assert_same(weights(other), weights(model))
        assert counts(optimizer) == counts(uninterrupted)
    assert uninterrupted.stats.counts["accepted"] > 0


@pytest.mark.parametrize("base", SAVABLE)
@pytest.mark.parametrize("options", [{"average": MovingAverage(2)}, GRADIENTS], ids=["step", "gradient"])
def test_saving_changes_nothing(base, options):
    def look(model, optimizer):
        optimizer.state_dict()
        return model, optimizer

    for stop in (0, 1, 7):
        assert_goes_on_as_without(lambda: make(base, **options), look, stop=stop)


@pytest.mark.parametrize("wakes", [0, 4])
@both
def test_saving_between_the_first_backward_and_the_first_step_is_harmless(wakes, options):
    """Adam makes its moments only where it finds no state at all."""
    model = Sleeper(wakes)
    optimizer = Anderson(Adam(model.parameters()), **options)
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does when it prepares an optimizer
    train(model, optimizer, wakes)
    model(torch.ones(1, 4)).sum().backward()
    assert model.sleeping.grad is not None
    optimizer.state_dict()
    optimizer.step()
    assert "exp_avg" in optimizer.state[model.sleeping]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loading_takes_copies_of_our_entries(options):
    model, optimizer = make("adamw_foreach", **options)
    train(model, optimizer, 7)
    saved = through_a_file(optimizer.state_dict())
    expected = copy.deepcopy(saved)
    train(model, optimizer, 14)
    optimizer.load_state_dict(saved)
    train(model, optimizer, 14)
    assert saved["param_groups"] == expected["param_groups"]
    for key, state in expected["state"].items():
        assert saved["state"][key].keys() == state.keys()
        ours = [name for name in state if name.startswith("anderson_")]
        assert_same([saved["state"][key][name] for name in ours], [state[name] for name in ours])


@pytest.mark.parametrize("base", SAVABLE)
@both
def test_history_is_saved_in_the_precision_it_is_kept_in(base, options):
    model, optimizer = make(base, dtype=torch.float32 if base == "lbfgs" else torch.bfloat16, **options)
    train(model, optimizer, 7)
    for state in optimizer.state_dict()["state"].values():
        assert state["anderson_point_diffs"].dtype in (torch.float32, torch.float64)


# --------------------------------------------------------------------- parameters that are not there yet


class Sleeper(torch.nn.Module):
    """A model with parameters of which some get no gradient before ``wakes``, and some never take part."""

    def __init__(self, wakes, sleeps_at=5.0):
        super().__init__()
        self.model, self.wakes, self.uses = make_model(), wakes, 0
        self.sleeping = torch.nn.Parameter(torch.full((3,), sleeps_at))
        self.opted_out = torch.nn.Parameter(torch.full((3,), 5.0))

    def forward(self, x):
        self.uses += 1
        y = self.model(x) + 0.1 * self.opted_out.square().sum()
        return y + 0.1 * self.sleeping.square().sum() if self.uses > self.wakes else y


@pytest.mark.parametrize("order", ["same group", "group before", "group behind"])
@pytest.mark.parametrize("stop", [4, 6, 7, 8])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_parameters_that_wake_up_after_the_checkpoint_resume_bit_for_bit(order, stop, options):
    def build(sleeps_at=5.0):
        model = Sleeper(wakes=stop, sleeps_at=sleeps_at)
        awake, asleep = list(model.model.parameters()), [model.sleeping]
        groups = {"same group": [awake + asleep], "group before": [asleep, awake], "group behind": [awake, asleep]}
        groups = [{"params": params} for params in groups[order]]
        groups.append({"params": [model.opted_out], "anderson": False})
        return model, Anderson(AdamW(groups, lr=1e-2), **eager(**options))

    def interrupt(model, optimizer):
        again, other = resumed(model, optimizer, lambda: build(sleeps_at=0.0))
        again.uses = model.uses
        return again, other

    assert_goes_on_as_without(build, interrupt, stop=stop)


def test_a_base_without_dictionaries_resumes_with_an_empty_history():
    model, optimizer = make("list_state", period=50)
    train(model, optimizer, 5)
    again, other = resumed(model, optimizer, lambda: make("list_state", period=50))
    assert_same(other.state[next(again.parameters())][:1], optimizer.state[next(model.parameters())][:1])
    train(model, optimizer, 20, start=5)
    train(again, other, 20, start=5)
    assert_same(weights(again), weights(model))


# ------------------------------------------------------------------------------------------ parts that are frozen


def train_with_outputs(model, optimizer, steps, start):
    for i in range(start, steps):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step(**({"outputs": partial(predictions, model, i)} if isinstance(optimizer, GaussNewton) else {}))


def predictions(model, i):
    inputs, targets = batch(i)
    return model(inputs), targets


def freeze(model, frozen):
    for layer in (0, 1, 2):
        model[layer].requires_grad_(layer not in frozen)


@pytest.mark.parametrize("seed", range(100))
def test_a_run_resumed_with_other_parts_frozen_is_the_run_that_was_never_interrupted(seed):
    """Four resumes each. Entries of a parameter that took no part for a while are old, and must not be believed."""
    rng = random.Random(seed)
    base = rng.choice(["sgd", "momentum", "adamw_foreach", "adagrad"])
    options = rng.choice([GRADIENTS, {**EAGER, "safeguard": "residual"}, {**GRADIENTS, "period": 3}, EAGER])
    wrap = rng.choice([partial(Anderson, **options), partial(GaussNewton, loss="mse", budget=0.9)])
    split = rng.random() < 0.5

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        groups = [{"params": layer.parameters()} for layer in model] if split else model.parameters()
        return model, wrap(BASES[base](groups))

    live, expected = build()
    model, optimizer = build()
    step = 0
    for _ in range(5):
        frozen, steps = rng.sample(range(3), rng.choice([0, 0, 1, 2])), rng.choice([1, 4, 9, 21])
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        model, optimizer = build()
        freeze(model, frozen)
        freeze(live, frozen)
        optimizer.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["model"])
        train_with_outputs(model, optimizer, step + steps, start=step)
        train_with_outputs(live, expected, step + steps, start=step)
        step += steps
        assert_same(weights(model), weights(live))
        assert counts(optimizer) == counts(expected)


@pytest.mark.parametrize("wrap", [partial(Anderson, period=3), partial(GaussNewton, loss="mse", budget=0.9)])
def test_a_run_in_which_nobody_took_part_at_first_is_resumed_where_it_was(wrap):
    def build(takes_part):
        model = make_model()
        return model, wrap(SGD([{"params": model.parameters(), "anderson": takes_part}], lr=0.1))

    model, optimizer = build(takes_part=False)
    train_with_outputs(model, optimizer, 4, start=0)
    optimizer.param_groups[0]["anderson"] = True
    again, other = resumed(model, optimizer, lambda: build(takes_part=True))
    train_with_outputs(model, optimizer, 40, start=4)
    train_with_outputs(again, other, 40, start=4)
    assert_same(weights(again), weights(model))
    assert counts(other) == counts(optimizer)
    assert counts(other)["attempted"] > 0 == other.stats.counts["restarts"]


# ------------------------------------------------------------------------- bases with a layout of their own


def lookahead(params):
    return pytorch_optimizer.Lookahead(SGD(params, lr=0.1, momentum=0.5))


def schedule_free(params):
    base = pytorch_optimizer.ScheduleFreeWrapper(SGD(params, lr=0.1))
    base.train()
    return base


@pytest.mark.parametrize("wrap", [partial(Anderson, **EAGER), Anderson, partial(GaussNewton, loss="mse", budget=0.9)])
@pytest.mark.parametrize("base", [lookahead, schedule_free])
def test_a_base_with_a_layout_of_its_own_resumes_bit_for_bit(base, wrap):
    def build():
        model = make_model()
        return model, wrap(base(model.parameters()))

    model, optimizer = build()
    train_with_outputs(model, optimizer, 20, start=0)
    again, other = resumed(model, optimizer, build)
    train_with_outputs(model, optimizer, 45, start=20)
    train_with_outputs(again, other, 45, start=20)
    assert_same(weights(again), weights(model))
    assert counts(other) == counts(optimizer)
    assert optimizer.stats.counts["accepted"] > 0


@pytest.mark.parametrize("base", [lookahead, schedule_free])
def test_a_checkpoint_of_a_bare_base_with_a_layout_of_its_own_starts_an_empty_history(base):
    bare = base(make_model().parameters())
    model = make_model()
    optimizer = Anderson(base(model.parameters()), **EAGER)
    optimizer.load_state_dict(bare.state_dict())
    train_with_outputs(model, optimizer, 20, start=0)
    assert optimizer.stats.counts["accepted"] > 0


@pytest.mark.parametrize("base", [lookahead, schedule_free])
def test_a_base_that_keeps_its_state_in_another_optimizer_cannot_take_back_a_jump(base):
    with pytest.raises(ValueError, match=r"Invalid safeguard: 'residual'\..*inner optimizer"):
        Anderson(base(make_model().parameters()), residual="step")


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


# ------------------------------------------------------------------------------- distributed checkpoints

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


# ------------------------------------------------------------------------------------------------ copies


def copied(model, optimizer):
    return copy.deepcopy((model, optimizer))


def pickled(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


@pytest.mark.parametrize("duplicate", [copied, pickled])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("base", [base for base in SAVABLE if base != "lbfgs"])  # torch's own cannot be copied
def test_a_copy_goes_on_as_the_original(base, options, duplicate):
    assert_goes_on_as_without(lambda: make(base, **options), duplicate, stop=6)


@pytest.mark.parametrize("duplicate", [copied, pickled])
@both
def test_a_copy_of_a_wrapping_class_goes_on_as_the_original(duplicate, options):
    def build():
        model = make_model()
        return model, Anderson.wrapping(Adam, **options)(model.parameters(), lr=1e-2)

    assert_goes_on_as_without(build, duplicate)
    assert type(duplicate(*build())[1]).__name__ == "AndersonAdam"


@pytest.mark.parametrize("duplicate", [copied, pickled])
@both
def test_a_copy_made_under_a_scheduler_moves_its_own_weights_only(duplicate, options):
    model, optimizer = make("adamw_foreach", **options)
    lr_scheduler.StepLR(optimizer, 3)
    train(model, optimizer, 7)
    before = weights(model)
    twin, other = duplicate(model, optimizer)
    train(twin, other, 14)
    assert_same(weights(model), before)
    assert not any(torch.equal(a, b) for a, b in zip(weights(twin), before, strict=True))


def test_a_copy_stays_disabled():
    _, optimizer = make("sgd")
    with optimizer.disabled():
        twin = copy.deepcopy(optimizer)
    model = make_model()
    assert twin.base is not optimizer.base
    plain = AdamW(model.parameters())
    assert repr(plain) in repr(Anderson(plain))
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    for _ in range(9):
        twin.step()
    assert counts(twin) == {}
