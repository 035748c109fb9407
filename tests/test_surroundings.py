"""What the world around a step may do: swap memory, cast, schedule strangely, keep odd state, drop groups."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from torch_anderson import Anderson, MovingAverage, fixed_point


class SwappingSGD(torch.optim.Optimizer):
    """Gives the parameters other memory at every step, as some optimizers and offloaders do."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


STEP = {"residual": "step", "period": 2}


def two_groups(seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    make = lambda n: nn.Parameter(torch.randn(n, generator=generator, dtype=torch.float64))  # noqa: E731
    return [{"params": [make(30)]}, {"params": [make(40)]}]


def run(optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in params:
            p.grad = p.detach() * torch.linspace(0.01, 1, p.numel(), dtype=p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("options", [{}, STEP, {**STEP, "average": MovingAverage(4)}], ids=str)
def test_a_base_that_swaps_the_parameters_memory_is_read_where_they_are(options: dict[str, Any]) -> None:
    swapped = run(Anderson(SwappingSGD(two_groups(), lr=0.5), **options), 40)
    in_place = run(Anderson(torch.optim.SGD(two_groups(), lr=0.5), **options), 40)
    for a, b in zip(swapped, in_place, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


ANY_JUMP = {**STEP, "safeguard": None}
AT_ONCE = {"residual": "step", "period": 5, "history_size": 5, "safeguard": None}
"""Several rows are multiplied together."""


@pytest.mark.parametrize("noise", [0.0, 0.3])  # without it, products are exact, which autocast leaves alone
@pytest.mark.parametrize("options", [{**STEP, "average": MovingAverage(4)}, ANY_JUMP, AT_ONCE, {}], ids=str)
def test_a_step_inside_autocast_keeps_full_precision(options: dict[str, Any], noise: float) -> None:
    def train(cast: bool) -> torch.Tensor:
        weights, generator = nn.Parameter(torch.linspace(-1, 1, 20_000)), torch.Generator().manual_seed(0)
        optimizer = Anderson(torch.optim.SGD([weights], lr=0.5), **options)
        for _ in range(20):
            errors = noise * torch.randn(20_000, generator=generator)
            weights.grad = weights.detach() * torch.linspace(0.01, 1, 20_000) + errors
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                optimizer.step()
        return weights.detach()

    assert torch.equal(train(cast=True), train(cast=False))


def test_fixed_point_inside_autocast_keeps_full_precision() -> None:
    x0 = torch.ones(20_000)
    with torch.autocast("cpu", torch.bfloat16):
        inside = fixed_point(torch.cos, x0)
    assert torch.equal(inside.x, fixed_point(torch.cos, x0).x)


def test_a_base_without_a_learning_rate_of_its_own_is_accelerated() -> None:
    base = torch.optim.SGD(two_groups(), lr=0.5)
    optimizer = Anderson(base, residual="step", period=10, safeguard=None)
    run(optimizer, 5)
    for group in base.param_groups:
        group["lr"] = None
    base.step = lambda closure=None: [p.data.mul_(0.9) for group in base.param_groups for p in group["params"]]
    run(optimizer, 15)
    assert optimizer.stats.as_dict()["history_len"] == 10


@pytest.mark.parametrize("options", [{}, STEP], ids=str)
def test_a_learning_rate_of_zero_for_one_group_does_not_poison_the_history(options: dict[str, Any]) -> None:
    optimizer = Anderson(torch.optim.SGD(two_groups(), lr=0.5), **options)
    run(optimizer, 16)
    optimizer.param_groups[1]["lr"] = 0.0
    run(optimizer, 2)  # the first may take back a jump
    optimizer.param_groups[1]["lr"] = 0.5
    run(optimizer, 2)
    assert optimizer.stats.counts["restarts"] == 2  # rows across the gap would be differences from nothing


def test_state_that_is_no_dictionary_survives_construction_and_copies() -> None:
    base = torch.optim.SGD(two_groups(), lr=0.5)
    for group in base.param_groups:
        for p in group["params"]:
            base.state[p] = torch.zeros(1)
    optimizer = Anderson(base)
    run(optimizer, 12)
    run(copy.deepcopy(optimizer), 3)


class WithoutArguments(torch.optim.SGD):
    """Neither ``step`` nor ``zero_grad`` takes one."""

    def step(self) -> None:  # type: ignore[override]
        super().step()

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


class Freeing(torch.optim.SGD):
    """Sets all gradients to None at the end of a step, to save memory."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def train_plainly() -> list[torch.Tensor]:
    return run(torch.optim.SGD(two_groups(), lr=0.5), 40)


ACCELERATORS = [
    Anderson,
    partial(Anderson, residual="step"),
    partial(Anderson, residual="step", period=5, safeguard=None),
]


@pytest.mark.parametrize("accelerate", ACCELERATORS)
@pytest.mark.parametrize("base", [WithoutArguments, Freeing])
def test_a_base_without_arguments_or_that_frees_gradients_is_accelerated_as_any_other(base: Any, accelerate: Any):
    def train(kind: Any) -> tuple[list[torch.Tensor], Any]:
        params = [p for group in two_groups() for p in group["params"]]
        idle = nn.Parameter(torch.ones(3))
        optimizer = accelerate(kind([*params, idle], lr=0.5))
        slopes = [torch.linspace(0.01, 1, p.numel(), dtype=p.dtype) for p in params]

        for _ in range(40):
            optimizer.zero_grad()
            for p, slope in zip(params, slopes, strict=True):
                p.grad = p.detach() * slope
            optimizer.step()
        assert torch.equal(idle.detach(), torch.ones(3))
        return [p.detach() for p in params], optimizer

    (ours, optimizer), (expected, twin) = train(base), train(torch.optim.SGD)
    assert optimizer.stats.counts["accepted"] == twin.stats.counts["accepted"] > 0
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("accelerate", ACCELERATORS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_group_that_is_removed_is_left_alone_and_the_others_go_on(which: int, accelerate: Any) -> None:
    optimizer = accelerate(torch.optim.SGD(two_groups(), lr=0.5))
    run(optimizer, 6)
    removed = optimizer.param_groups.pop(which)["params"][0]
    before = removed.detach().clone()
    run(optimizer, 30)
    assert torch.equal(removed.detach(), before)
    assert len(optimizer.state_dict()["param_groups"]) == 1
    copy.deepcopy(optimizer)


@pytest.mark.parametrize("options", [{}, {**STEP, "average": MovingAverage(3)}], ids=str)
def test_looking_at_the_state_in_inference_mode_before_the_first_step_does_no_harm(options: dict[str, Any]) -> None:
    """Adagrad has state from the start, so that ours is built at the first look."""
    results = []
    for looks in (True, False):
        optimizer = Anderson(torch.optim.Adagrad(two_groups(), lr=0.5), **options)
        if looks:
            with torch.inference_mode():
                assert optimizer.state_dict()["state"]
                dict(optimizer.state)
        results.append(run(optimizer, 30))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("options", [{}, STEP], ids=str)
def test_a_group_taken_out_from_before_others_does_not_shift_their_rates(options: dict[str, Any]) -> None:
    groups = two_groups()
    groups[0]["anderson"] = False
    optimizer = Anderson(torch.optim.SGD(groups, lr=0.5), **options)
    run(optimizer, 3)
    optimizer.param_groups.pop(0)
    run(optimizer, 20)
    assert optimizer.stats.as_dict()["history_len"] > 0
