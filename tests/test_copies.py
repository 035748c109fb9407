"""Deep and pickled copies of an optimizer."""

import copy
import pickle

import pytest
import torch
from resuming import OPTIONS, SAVABLE, assert_goes_on_as_without
from torch.optim import Adam, AdamW, lr_scheduler
from training import assert_same, both, counts, make, make_model, train, weights

from torch_anderson import Anderson


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
