"""Checkpoints that cannot be resumed: the message names what is wrong, and the run goes on as without the attempt."""

import copy
import re

import pytest
import torch
from training import assert_same, counts, make, train, weights

from torch_anderson import MovingAverage

OPTIONS = {
    "gradient": {"residual": "gradient"},
    "step": {"residual": "step", "safeguard": "gradient", "average": MovingAverage(3)},
    "paper": {"residual": "step", "safeguard": "residual"},
}
every_kind = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def stopped(options, steps=7):
    """A run whose last jump may be pending."""
    model, optimizer = make("adamw_foreach", **options)
    train(model, optimizer, steps)
    return model, optimizer


def assert_refused(options, state_dict, match):
    """Loading raises, and everything goes on as without it."""
    (model, optimizer), (twin, undisturbed) = stopped(options), stopped(options)
    with pytest.raises(ValueError, match=match) as refused:
        optimizer.load_state_dict(state_dict)
    assert "\n" not in str(refused.value)
    assert_same(weights(model), weights(twin))
    assert train(model, optimizer, 30, start=7) == train(twin, undisturbed, 30, start=7)
    assert_same(weights(model), weights(twin))
    assert counts(optimizer) == counts(undisturbed)


def changed(options, name, change):
    """A state dict in which one entry of one parameter is another one; None: it is missing."""
    state_dict = copy.deepcopy(stopped(options)[1].state_dict())
    entries = state_dict["state"][1]
    assert f"anderson_{name}" in entries
    found = change(entries.pop(f"anderson_{name}"))
    if found is not None:
        entries[f"anderson_{name}"] = found
    return state_dict


@every_kind
def test_another_version_is_named_with_ours(options):
    def older(state):
        state[0] = 2.0
        return state

    assert_refused(options, changed(options, "state", older), r"version 2\b.*version 4\b")


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("other", OPTIONS)
def test_another_kind_of_residual_or_safeguard_is_refused(kind, other):
    if kind == other:
        return
    match = "another residual" if "gradient" in (kind, other) else "another (safeguard|average)"
    assert_refused(OPTIONS[kind], stopped(OPTIONS[other])[1].state_dict(), match)


ENTRIES = ["point_diffs", "last_residual", "last_point", "plain", "candidate", "gram", "counts", "trial", "state"]


@every_kind
@pytest.mark.parametrize("name", ENTRIES)
def test_a_missing_entry_is_named(options, name):
    assert_refused(options, changed(options, name, lambda entry: None), rf"anderson_{name}\b|\b{name}\b")


@every_kind
@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_of_another_shape_is_named(options, name):
    """Or the shape that it has instead of the parameter's, if it is of another model."""
    named = rf"anderson_{name}\b|\b{name}\b|{re.escape('another model: a parameter has shape')}"
    assert_refused(options, changed(options, name, lambda entry: torch.cat([entry, entry])), named)


@every_kind
@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_that_is_no_tensor_is_named(options, name):
    assert_refused(options, changed(options, name, lambda entry: "text"), rf"anderson_{name}\b")


@every_kind
@pytest.mark.parametrize("number", [2, 3, 4])
def test_numbers_that_are_lost_are_told(options, number):
    def spoiled(state):
        state[number] = torch.nan
        return state

    assert_refused(options, changed(options, "state", spoiled), r"anderson_state\b")
