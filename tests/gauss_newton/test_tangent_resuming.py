"""Driving by the tangent: resuming from checkpoints and copies, weights written by others, and resets."""

import copy
import io
import pickle

import pytest
import torch
from tangent import Points, decay, driven, network, train
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from training import assert_same, counts, weights

from torch_anderson import Objective, Term


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
    twin, other, again = driven(dtype, directions="tangent")
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


@pytest.mark.parametrize("middle", [1, 11, 12, 13, 45])
def test_training_on_given_and_drawn_samples_goes_on_bit_for_bit(middle):
    def go_on(optimizer, objective, start, stop):
        for step in range(start, stop):
            zeros = torch.zeros(6, 1, dtype=torch.float64) + 0.01 * step
            optimizer.step(objective(start=zeros))

    run = driven()
    go_on(*run[1:], 0, middle)
    twin = through_a_file(*run, torch.float64)
    for _, optimizer, objective in (run, twin):
        torch.manual_seed(5)
        go_on(optimizer, objective, middle, 70)
    assert_same(weights(run[0]), weights(twin[0]))
    assert counts(run[1]) == counts(twin[1]) and run[1].stats.counts["attempted"] > 1


def test_a_checkpoint_of_an_objective_with_other_terms_is_refused():
    _, optimizer, objective = driven()
    optimizer.step(objective)
    other = Objective(network(), only=Term(decay, Points(), count=3))
    with pytest.raises(ValueError, match=r"another objective.*inside"):
        other.load_state_dict(objective.state_dict())


def test_a_checkpoint_made_with_the_history_is_refused_by_the_tangent():
    _, optimizer, objective = driven(directions="history")
    train(optimizer, objective, 6)
    _, other, _ = driven(directions="tangent")
    with pytest.raises(ValueError, match="another accelerator"):
        other.load_state_dict(optimizer.state_dict())


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
