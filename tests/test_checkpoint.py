"""Interrupting a run and going on: the same bits as without the interruption, through every kind of checkpoint."""

import copy
import random
from functools import partial

import pytest
import torch
from resuming import OPTIONS, SAVABLE, assert_goes_on_as_without, resumed, train_any
from torch import nn
from torch.optim import SGD, Adam, AdamW
from training import (
    BASES,
    EAGER,
    GRADIENTS,
    assert_same,
    both,
    counts,
    eager,
    make,
    make_model,
    through_a_file,
    train,
    weights,
)

from torch_anderson import Anderson, GaussNewton, MovingAverage

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


@pytest.mark.parametrize(
    "cause, options",
    [("residual", OPTIONS["pending"]), ("gradient", OPTIONS["pending by gradient"]), ("gradient", GRADIENTS)],
)
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


def freeze(model, frozen):
    for layer in (0, 1, 2):
        model[layer].requires_grad_(layer not in frozen)


@pytest.mark.parametrize("seed", range(100))
def test_a_run_resumed_with_other_parts_frozen_is_the_run_that_was_never_interrupted(seed):
    """Four resumes each. Entries of a parameter that took no part for a while are old, and must not be believed."""
    rng = random.Random(seed)
    base = rng.choice(["sgd", "momentum", "adamw_foreach", "adagrad"])
    options = rng.choice([GRADIENTS, {**EAGER, "safeguard": "residual"}, {**GRADIENTS, "period": 3}, EAGER])
    wrap = partial(Anderson, **options)
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
        train_any(model, optimizer, step + steps, start=step)
        train_any(live, expected, step + steps, start=step)
        step += steps
        assert_same(weights(model), weights(live))
        assert counts(optimizer) == counts(expected)


@pytest.mark.parametrize("wrap", [partial(Anderson, period=3), GaussNewton])
def test_a_run_in_which_nobody_took_part_at_first_is_resumed_where_it_was(wrap):
    def build(takes_part):
        model = make_model()
        return model, wrap(SGD([{"params": model.parameters(), "anderson": takes_part}], lr=0.1))

    model, optimizer = build(takes_part=False)
    train_any(model, optimizer, 4, start=0)
    optimizer.param_groups[0]["anderson"] = True
    again, other = resumed(model, optimizer, lambda: build(takes_part=True))
    train_any(model, optimizer, 40, start=4)
    train_any(again, other, 40, start=4)
    assert_same(weights(again), weights(model))
    assert counts(other) == counts(optimizer)
    assert counts(other)["attempted"] > 0 == other.stats.counts["restarts"]
