"""What may go wrong around jumps by gradients: scalers that skip steps, closures that are not called, other groups."""

import copy
import pickle

import pytest
import torch
from torch import nn

from torch_anderson import Anderson, MovingAverage, Storage

KINDS = {"gradient": {}, "step": {"residual": "step"}}


def quadratic(size=6, seed=0):
    """A parameter, and a convex function of it that is not a fixed point at once."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    matrix = matrix @ matrix.T / size + 0.05 * torch.eye(size, dtype=torch.float64)
    target = torch.randn(size, generator=generator, dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    return weight, lambda: 0.5 * (weight - target) @ matrix @ (weight - target)


class ScalerLike:
    """Leaves out every step whose gradients are not finite, as torch's gradient scalers do."""

    def step(self, optimizer, parameter):
        if parameter.grad.isfinite().all():
            optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_jump_to_gradients_without_numbers_is_taken_back_although_a_scaler_leaves_the_step_out(kind):
    """A function that ends at 0: every jump across it has a gradient of NaN, and no step is made there."""
    weight = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))
    options = {"gradient": {}, "step": {"residual": "step", "safeguard": "residual"}}[kind]
    optimizer, scaler = Anderson(torch.optim.SGD([weight], lr=0.1), **options), ScalerLike()
    skipped = 0
    for _ in range(400):
        optimizer.zero_grad()
        loss = weight - 2 * torch.log(torch.sqrt(weight))  # the minimum is at 1
        loss.backward()
        skipped += not weight.grad.isfinite()
        scaler.step(optimizer, weight)
    assert skipped <= 300  # three gradients for each refused jump, then a plain step
    assert weight.item() == pytest.approx(1, abs=1e-2)


def test_clearing_gradients_twice_leaves_a_pending_jump_alone():
    weight, function = quadratic()
    optimizer = Anderson(torch.optim.SGD([weight], lr=0.1))
    reference, same = quadratic()
    once = Anderson(torch.optim.SGD([reference], lr=0.1))
    for _ in range(15):
        optimizer.zero_grad()
        optimizer.zero_grad()
        function().backward()
        optimizer.step()
        once.zero_grad()
        same().backward()
        once.step()
        assert torch.equal(weight, reference)
    assert optimizer.stats.counts["accepted"] > 3


class EverySecond(torch.optim.SGD):
    """Calls its closure at every second step, and uses the gradient twice."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 2:
            loss = closure()
            super().step()
            return loss
        return super().step()


def test_a_step_without_a_new_gradient_makes_no_jump():
    weight, function = quadratic()
    optimizer = Anderson(EverySecond([weight], lr=0.05))

    def closure():
        optimizer.zero_grad()
        loss = function()
        loss.backward()
        return loss

    for step in range(40):
        before = optimizer.stats.counts["attempted"]
        optimizer.step(closure)
        if step % 2:
            assert optimizer.stats.counts["attempted"] == before
    counts = optimizer.stats.counts
    assert counts["attempted"] == counts["accepted"] + sum(n for k, n in counts.items() if k.startswith("rejected")) + (
        optimizer._driver.pending
    )


@pytest.mark.parametrize("changed", [{"lr": 1e3}, {"weight_decay": 0.5}])
def test_a_group_that_takes_no_part_has_no_say(changed):
    """Neither its learning rate, on whatever schedule, nor its decay changes what happens to the others."""

    def trained(other):
        weight, function = quadratic()
        out = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        groups = [{"params": [weight]}, {"params": [out], "anderson": False, **other}]
        optimizer = Anderson(torch.optim.SGD(groups, lr=0.1))
        for k in range(25):
            optimizer.zero_grad()
            (function() + 0.0 * out.sum()).backward()
            if other.get("lr"):
                optimizer.param_groups[1]["lr"] = 1e3 / (1 + k)
            optimizer.step()
        return weight.detach(), optimizer.stats.counts["accepted"]

    alone, jumps = trained({})
    found, as_many = trained(changed)
    assert jumps > 5
    assert as_many == jumps
    assert torch.equal(alone, found)


def test_a_group_whose_rate_is_next_to_nothing_is_moved_by_the_base_alone():
    def trained(wrap):
        weight, function = quadratic()
        still = nn.Parameter(torch.ones(2, dtype=torch.float64))
        groups = [{"params": [weight]}, {"params": [still], "lr": 1e-8}]
        optimizer = wrap(torch.optim.SGD(groups, lr=0.1))
        path = []
        for _ in range(12):
            optimizer.zero_grad()
            (function() + 3.0 * still.sum()).backward()
            optimizer.step()
            path.append(still.detach().clone())
        return torch.stack(path), optimizer

    path, optimizer = trained(Anderson)
    assert optimizer.stats.counts["accepted"] > 3
    moves = path.diff(dim=0)
    # A refused jump takes the place of a step; otherwise every step is the base's, 3e-8 down.
    assert ((moves + 3e-8).abs() < 1e-15).logical_or(moves.abs() < 1e-15).all()


def test_another_weight_decay_starts_the_history_anew():
    weight, function = quadratic()
    optimizer = Anderson(torch.optim.SGD([weight], lr=0.1))
    for k in range(20):
        if k == 10:
            optimizer.param_groups[0]["weight_decay"] = 0.3
        optimizer.zero_grad()
        function().backward()
        optimizer.step()
    assert optimizer.stats.counts["restarts"] == 1


def test_a_step_at_rate_zero_counts_as_rest_in_a_copy_too():
    """A copy compares notes with other ranks first, and so makes its first step another way."""
    weight, function = quadratic()
    optimizer = Anderson(torch.optim.SGD([weight], lr=0.1), warmup=6)

    def step():
        optimizer.zero_grad()
        function().backward()
        optimizer.step()

    for _ in range(3):
        step()
    other = copy.deepcopy(optimizer)
    for each in (optimizer, other):
        each.param_groups[0]["lr"] = 0.0
        each.step()
    assert optimizer._driver.resting == other._driver.resting == 2


def test_one_pair_is_not_enough_to_tell_noise():
    weight, _ = quadratic()
    with pytest.raises(ValueError, match="history_size"):
        Anderson(torch.optim.SGD([weight], lr=0.1), history_size=1)
    Anderson(torch.optim.SGD([weight], lr=0.1), history_size=1, residual="step")


class KeepsGradients(torch.optim.SGD):
    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_reset_as_asked(set_to_none):
    weight, function = quadratic()
    optimizer = Anderson(KeepsGradients([weight], lr=0.1))
    function().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert (weight.grad is None) == set_to_none


def test_a_copy_of_a_made_class_is_of_that_class():
    made = Anderson.wrapping(torch.optim.SGD, residual="step", average=MovingAverage(3), storage=Storage())
    optimizer = made([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert type(copy.deepcopy(optimizer)) is made
    assert type(pickle.loads(pickle.dumps(optimizer))) is made
