"""The cost of a step on a device that is not the processor: operations, views and waits of the host, counted.

The device is pretended (``pretended.py``).
"""

from collections import Counter
from functools import partial
from itertools import chain, pairwise
from operator import sub
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
from pretended import NAME as DEVICE
from pretended import counted, on_device
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from training import FEW_BASES, batch

from torch_anderson import Anderson
from torch_anderson._anderson.gradient import FIRST_REST, LONGEST_REST


class Limit(NamedTuple):
    """The most that a step may cost beyond the base's own."""

    operations: float
    views: float
    waits: float


LIMITS = {
    "defaults, at rest": Limit(0, 0, 0),
    "defaults, a gradient is stored": Limit(5, 0, 0),
    "defaults, noise is found": Limit(8, 1, 1),
    "defaults, each step jumps": Limit(16, 3, 1),
    "defaults, a jump is refused": Limit(18, 3, 2),
    "p = q = 1, residual of steps, mean": Limit(14, 12, 1.5),
    "p = 10, residual of steps, ordinary step": Limit(11, 0, 0),
    "p = 10, residual of steps, each tenth": Limit(24, 8, 2),
}


def network(*widths):
    """The parameters of a perceptron, and a function that computes their gradients on data that are one batch."""
    torch.manual_seed(0)
    layers = [(nn.Linear(*pair), nn.Tanh()) for pair in pairwise((4, *widths, 1))]
    model = nn.Sequential(*chain.from_iterable(layers))[:-1].to(DEVICE)
    x, y = (tensor.to(DEVICE) for tensor in batch(0))
    return [*model.parameters()], lambda: mse_loss(model(x), y).backward()


def noisy_network(*widths):
    """The same, with gradients that are nothing but noise."""
    params, _ = network(*widths)
    generator = torch.Generator().manual_seed(0)

    def backward():
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(DEVICE)

    return params, backward


def quadratic(size):
    """As many parameters of one number, and a function that computes their gradients."""
    params = [nn.Parameter(torch.ones(1, device=DEVICE)) for _ in range(size)]
    slopes = [(i + 1) / size for i in range(size)]

    def backward():
        for param, gradient in zip(params, torch._foreach_mul([p.detach() for p in params], slopes), strict=True):
            param.grad = gradient

    return params, backward


MODELS = {"4 tensors": (8,), "8 tensors": (16, 16, 16)}


def costs(problem, base, steps, **options):
    """The cost of each step beyond that of the base alone."""
    ours = _costs(problem, lambda params: Anderson(base(params), **options), steps)
    return list(map(sub, ours, _costs(problem, base, steps)))


def _costs(problem, optimizer_of, steps):
    params, backward = problem()
    optimizer, found = optimizer_of(params), []
    for _ in range(steps):
        optimizer.zero_grad()
        backward()
        with counted() as cost:
            optimizer.step()
        found.append(cost)
    return found


def assert_within(limit, steps, summary=max):
    """Compare with a row of the table; a failure lists the operations."""
    for name, allowed in LIMITS[limit]._asdict().items():
        found = summary(getattr(cost, name) for cost in steps)
        assert found <= allowed, f"{found} {name}, limit {allowed}: {sum((cost.names for cost in steps), Counter())}"


EVERY_STEP = {"residual": "step"}


@pytest.mark.slow
@on_device
def test_the_mean_cost_of_an_acceleration_in_each_step_is_limited():
    cases = [(partial(network, *widths), base) for widths in MODELS.values() for base in FEW_BASES.values()]
    found = [cost for problem, base in cases for cost in costs(problem, base, 50, **EVERY_STEP)[9:]]
    assert_within("p = q = 1, residual of steps, mean", found, fmean)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("base", FEW_BASES)
@on_device
@pytest.mark.parametrize("safeguard", ["gradient", "residual"])
def test_an_acceleration_waits_once_and_a_decision_on_it_once(base, model, safeguard):
    """Two waits in a step where all jumps are accepted: the next acceleration is made in the step that decides.

    One more where a jump does not stay, and where the slope in its direction is measured.
    """
    params, backward = network(*MODELS[model])
    optimizer = Anderson(FEW_BASES[base](params), **EVERY_STEP, safeguard=safeguard)
    for _ in range(50):
        before = optimizer.stats.counts.copy()
        optimizer.zero_grad()
        backward()
        with counted() as cost:
            optimizer.step()
        made = optimizer.stats.counts - before
        refused = made["rejected_residual"] + made["rejected_gradient"]
        accelerations = made["attempted"] + sum(n for name, n in made.items() if name.startswith("skipped_"))
        slopes = made["attempted"] + made["skipped_no_descent"] if safeguard == "gradient" else 0
        assert cost.waits <= made["accepted"] + 2 * refused + accelerations + slopes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("base", FEW_BASES)
@on_device
def test_the_cost_of_a_step_of_the_paper_is_limited(base, model):
    options = {"residual": "step", "period": 10, "safeguard": None}
    found = costs(partial(network, *MODELS[model]), FEW_BASES[base], 100, **options)[20:]
    assert_within("p = 10, residual of steps, each tenth", found[9::10])
    del found[9::10]
    assert_within("p = 10, residual of steps, ordinary step", found)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("base", FEW_BASES)
@on_device
def test_under_noise_a_step_costs_nothing_but_when_it_looks(base, model):
    """It looks at some gradients, rests, looks again, and each rest is longer. The first step makes room.

    A look that leaves it in doubt goes on, and judges once more.
    """
    plain = _costs(partial(noisy_network, *MODELS[model]), FEW_BASES[base], 100)
    params, backward = noisy_network(*MODELS[model])
    optimizer = Anderson(FEW_BASES[base](params))
    judged, stored, rested = [], [], []
    for i in range(100):
        resting, judges = optimizer._driver.resting, optimizer._driver.state.look == 1
        optimizer.zero_grad()
        backward()
        with counted() as cost:
            optimizer.step()
        if i:
            (rested if resting else judged if judges else stored).append(cost - plain[i])
    assert optimizer.stats.counts["skipped_noisy"] >= 4
    assert len(rested) >= FIRST_REST + 2 * FIRST_REST + 4 * FIRST_REST + LONGEST_REST
    assert_within("defaults, noise is found", judged)
    assert_within("defaults, a gradient is stored", stored)
    assert_within("defaults, at rest", rested)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("base", FEW_BASES)
@on_device
def test_the_cost_of_a_step_that_jumps_by_gradients_is_limited(base, model):
    params, backward = network(*MODELS[model])
    plain = _costs(partial(network, *MODELS[model]), FEW_BASES[base], 60)
    optimizer, jumps, refused = Anderson(FEW_BASES[base](params)), [], []
    for i in range(60):
        before = optimizer.stats.counts.copy()
        optimizer.zero_grad()
        backward()
        with counted() as cost:
            optimizer.step()
        made = optimizer.stats.counts - before
        if i >= 10 and (made["attempted"] or made["rejected_gradient"]):
            (refused if made["rejected_gradient"] else jumps).append(cost - plain[i])
    assert len(jumps) > 10
    assert_within("defaults, each step jumps", jumps)
    assert_within("defaults, a jump is refused", refused or jumps)


@pytest.mark.parametrize("options", [{}, {"residual": "step"}], ids=["gradient", "step"])
@on_device
def test_a_thousand_groups_cost_as_many_operations_as_one(options):
    problem, steps = partial(quadratic, 1000), 6
    together = costs(problem, lambda params: SGD(params, lr=0.1), steps, **options)
    apart = costs(problem, lambda params: SGD([{"params": [param]} for param in params], lr=0.1), steps, **options)
    found, expected = ([(cost.operations, cost.waits) for cost in each] for each in (apart, together))
    assert found == expected, f"{found} instead of {expected} operations and waits"
