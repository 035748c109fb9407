"""Driving by the tangent: resuming from checkpoints and copies, weights written by others, and resets."""

import copy
import io
import pickle

import pytest
import torch
from tangent import Points, decay, driven, network, train
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Adam
from training import assert_same, counts, weights

from torch_anderson import Anderson, Objective, Term


def through_a_file(model, optimizer, objective, dtype):
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), objective.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, optimizer, objective = driven(dtype)
    for part, state in zip((model, optimizer, objective), saved, strict=True):
        part.load_state_dict(state)
    return model, optimizer, objective


def through_a_distributed_checkpoint(model, optimizer, objective, dtype):
    twin, other, again = driven(dtype)
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, other, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    again.load_state_dict(copy.deepcopy(objective.state_dict()))
    return twin, other, again


CONTINUED = {
    "file": through_a_file,
    "distributed checkpoint": through_a_distributed_checkpoint,
    "copy": lambda *run: copy.deepcopy(run[:3]),
    "pickle": lambda *run: pickle.loads(pickle.dumps(run[:3])),
}


@pytest.mark.parametrize(
    ("how", "dtype", "middle"),
    [*((how, torch.float32, 7) for how in CONTINUED), ("file", torch.float64, 0), ("file", torch.float64, 4)],
)
def test_training_goes_on_bit_for_bit(how, dtype, middle):
    run = driven(dtype)
    train(*run[1:], middle)
    twin = CONTINUED[how](*run, dtype)
    assert counts(run[1]) == counts(twin[1])
    for _, optimizer, objective in (run, twin):
        torch.manual_seed(5)
        train(optimizer, objective, 12)
    assert_same(weights(run[0]), weights(twin[0]))
    assert counts(run[1]) == counts(twin[1])
    assert run[1].stats.gauges() == twin[1].stats.gauges()


def test_a_checkpoint_of_an_objective_with_other_terms_is_refused():
    _, optimizer, objective = driven()
    optimizer.step(objective)
    other = Objective(network(), only=Term(decay, Points(), count=3))
    with pytest.raises(ValueError, match=r"another objective.*inside"):
        other.load_state_dict(objective.state_dict())


def test_weights_written_by_others_are_the_new_start():
    model, optimizer, objective = driven()
    train(optimizer, objective, 5)
    torch.manual_seed(3)
    fresh = [torch.randn_like(p) for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), fresh, strict=True):
            p.copy_(value)
    twin = copy.deepcopy(model)
    loss = float(optimizer.step(objective))
    samples = {name: kept.samples for name, kept in objective.retained.items()}
    assert loss == pytest.approx(Objective(twin, **objective.terms).draw(**samples).loss().item())


def test_a_reset_starts_anew_and_keeps_the_weights():
    model, optimizer, objective = driven()
    train(optimizer, objective, 12)
    before = weights(model)
    optimizer.reset_history()
    assert_same(weights(model), before)
    assert optimizer.stats.gauges()["length"] == 0.125


# --------------------------------------------------------------------------------------------- what does not fit


def state_of(model, optimizer):
    return copy.deepcopy([weights(model), optimizer.state_dict(), counts(optimizer)])


def damaged(name, change):
    """A checkpoint in which the entry of one parameter was changed."""
    _, optimizer, objective = driven()
    train(optimizer, objective, 6)
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved["state"][0], f"anderson_{name}")
    return saved


def anderson_checkpoint():
    model, _, objective = driven()
    optimizer = Anderson(Adam(model.parameters(), lr=1e-3))
    for _ in range(6):
        optimizer.step(objective)
    return optimizer.state_dict()


def spoil(entries, name):
    entries[name] = entries[name][:-1]


def write_nan(entries, name):
    entries[name][3:] = torch.nan


def of_version_2(entries, name):
    entries[name][0] = 2.0


REFUSED = {
    "of Anderson": (anderson_checkpoint, "another accelerator"),
    "of an earlier version": (lambda: damaged("state", of_version_2), "has version 2, .* reads version 4"),
    "without state": (lambda: damaged("state", dict.pop), "damaged: the entry anderson_state"),
    "with a short state": (lambda: damaged("state", spoil), "damaged: the entry anderson_state"),
    "with a state of NaN": (lambda: damaged("state", write_nan), "damaged: the entry anderson_state"),
    "without counts": (lambda: damaged("counts", dict.pop), "damaged: the entry anderson_counts"),
    "without weights": (lambda: damaged("weights", dict.pop), "damaged: the entry anderson_weights"),
    "with other weights": (lambda: damaged("weights", spoil), "another model"),
    "with a list": (lambda: damaged("momentum", lambda x, name: x.update({name: [1.0]})), "entry anderson_momentum"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_that_is_refused_changes_nothing(name):
    make, message = REFUSED[name]
    model, optimizer, objective = driven()
    train(optimizer, objective, 5)
    saved, before = make(), state_of(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same(state_of(model, optimizer), before)
    assert train(optimizer, objective, 10)[-1] < 1e-3


def test_a_checkpoint_of_gauss_newton_is_refused_by_anderson():
    _, optimizer, objective = driven()
    train(optimizer, objective, 3)
    other = Anderson(Adam(network().parameters(), lr=1e-3))
    with pytest.raises(ValueError, match="another accelerator"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("saved", [{}, {"retained": {"inside": {"sizes": torch.ones(3)}}}])
def test_a_damaged_checkpoint_of_an_objective_is_refused_and_changes_nothing(saved):
    _, optimizer, objective = driven()
    train(optimizer, objective, 2)
    before = dict(objective.retained)
    with pytest.raises(ValueError, match="retained"):
        objective.load_state_dict(saved)
    assert objective.retained == before
