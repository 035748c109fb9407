"""Interrupting a run and going on, and the options with which that is tested."""

import torch
from training import (
    BASES,
    GRADIENTS,
    assert_counters_add_up,
    assert_same,
    batch,
    counts,
    left_alone,
    loss_of,
    through_a_file,
    train,
    weights,
)

from torch_anderson import GaussNewton, MovingAverage, Objective, Term

OPTIONS = {
    "plain": {},
    "short jumps": {"max_jump": 2.0, "period": 5},
    "pending": {"safeguard": "residual"},
    "average": {"average": MovingAverage(4, tolerance=0.0)},
    "before the first store": {"store_period": 7, "period": 14},
    "average and pending": {"average": MovingAverage(3), "safeguard": "residual", "period": 2},
    "pending by gradient": {"safeguard": "gradient"},
    "average and pending by gradient": {
        "average": MovingAverage(3, tolerance=0.0),
        "safeguard": "gradient",
        "period": 2,
    },
    "damped, warm-up": {"relaxation": 0.5, "warmup": 2},
    "gradients": GRADIENTS,
    "gradients, any jump": {**GRADIENTS, "safeguard": None},
    "gradients, each third step, warm-up": {**GRADIENTS, "period": 3, "warmup": 2},
}
SAVABLE = [base for base in BASES if base != "list_state"]
"""A base that keeps no dictionaries leaves our entries no place."""


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


def train_any(model, optimizer, steps, start):
    """Steps with gradients of batches; with ``GaussNewton``, on an objective with one of them."""
    objective = Objective(model, fit=Term(difference, batch(0)))
    for i in range(start, steps):
        if isinstance(optimizer, GaussNewton):
            torch.manual_seed(i)  # it shuffles samples
            optimizer.step(objective)
        else:
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()


def difference(u, point, value):
    return u(point) - value.squeeze()
