"""Hooks: those of PyTorch fire as without the wrapper, and acceleration hooks get records."""

from collections import Counter

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import GRADIENTS, both, counts, learning_rates, make, train


@both
def test_every_kind_of_hook_fires_once_and_with_this_optimizer(options):
    model, optimizer = make("adamw_foreach", **options)
    fired = []

    def note(kind):
        def hook(which, *_):
            assert which is optimizer
            fired.append(kind)

        return hook

    optimizer.register_step_pre_hook(note("step_pre"))
    optimizer.register_step_post_hook(note("step_post"))
    optimizer.register_state_dict_pre_hook(note("state_pre"))
    optimizer.register_state_dict_post_hook(note("state_post"))
    optimizer.register_load_state_dict_pre_hook(note("load_pre"))
    optimizer.register_load_state_dict_post_hook(note("load_post"))
    handles = [
        register_optimizer_step_pre_hook(note("global_pre")),
        register_optimizer_step_post_hook(note("global_post")),
    ]
    try:
        train(model, optimizer, 1)
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        for handle in handles:
            handle.remove()
    assert fired == [
        "global_pre",
        "step_pre",
        "step_post",
        "global_post",
        "state_pre",
        "state_post",
        "load_pre",
        "load_post",
    ]


def test_hooks_may_replace_what_is_saved_and_loaded_and_the_callers_dict_stays():
    _, optimizer = make("sgd")
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "note": 1})
    saved = optimizer.state_dict()
    assert saved["note"] == 1

    def edit(_, state_dict):
        state_dict["param_groups"] = [{**group, "lr": 0.7} for group in state_dict["param_groups"]]

    optimizer.register_load_state_dict_pre_hook(edit)
    optimizer.load_state_dict(saved)
    assert learning_rates(optimizer) == [0.7]
    assert saved["param_groups"][0]["lr"] == 0.1


def test_hooks_of_the_base_fire_too():
    model, optimizer = make("sgd")
    fired = []
    optimizer.base.register_step_post_hook(lambda *_: fired.append(1))
    train(model, optimizer, 3)
    assert fired == [1, 1, 1]


@pytest.mark.parametrize("safeguard", ["residual", None])
def test_a_record_asked_for_late_is_the_one_that_a_hook_got_at_once(safeguard):
    # Without hooks a record is worked out when asked for: here after two more stored pairs.
    records = []
    for listen in (True, False):
        model, optimizer = make("sgd", safeguard=safeguard, history_size=2)
        if listen:
            optimizer.register_acceleration_hook(records.append)
        train(model, optimizer, 14)
    assert records[-1].step == 12
    assert optimizer.stats.latest == records[-1]
    assert optimizer.stats.latest.gram == records[-1].gram


def test_an_acceleration_hook_gets_every_record_until_it_is_removed():
    model, optimizer = make("sgd")
    records = []
    handle = optimizer.register_acceleration_hook(records.append)
    train(model, optimizer, 12)
    assert [record.step for record in records] == [3, 6, 9, 12]
    assert records[-1] is optimizer.stats.latest
    assert sum(record.accepted for record in records) == optimizer.stats.as_dict()["accepted"]
    handle.remove()
    train(model, optimizer, 18, start=12)
    assert len(records) == 4


def test_a_hook_gets_a_record_of_everything_that_gradients_decide():
    model, optimizer = make("sgd", **GRADIENTS)
    records = []
    optimizer.register_acceleration_hook(records.append)
    train(model, optimizer, 40)
    causes = Counter(record.cause for record in records)
    found = counts(optimizer)
    assert records[-1] == optimizer.stats.latest
    assert causes[""] == found["accepted"] > 0
    assert causes["gradient"] == found.get("rejected_gradient", 0)
    assert all(record.step_ratio > 0 for record in records if record.cause in ("", "gradient"))
    steps = [record.step for record in records]
    assert steps == sorted(steps) and len(records) == sum(
        count for name, count in found.items() if name.startswith(("accepted", "rejected_", "skipped_"))
    )
