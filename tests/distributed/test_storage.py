"""Where the history is kept: in half precision, on another device, sharded."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import build
from layouts import distance
from processes import run
from torch import nn
from torch.optim import SGD, Adam

from experiments.benchmarks.problems import PROBLEMS
from torch_anderson import Anderson, Storage

ROWS = ("anderson_point_diffs", "anderson_residual_diffs")
LONG = (128, 160)
"""20,640 numbers: beyond the length up to which residuals are kept in float64."""


def model(shape: tuple[int, int] = LONG) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(*shape)


STEPPING = {"residual": "step", "period": 4, "history_size": 6, "safeguard": None, "regularization": 1e-3}


def driven(net: nn.Module, steps: int = 20, **options: Any) -> Anderson:
    """Train with the gradients of squares, where each number has another curvature."""
    given = options if options.get("residual") == "gradient" else STEPPING | options
    optimizer = Anderson(SGD(net.parameters(), lr=0.3), **given)
    for _ in range(steps):
        for seed, p in enumerate(net.parameters()):
            curvature = 0.1 + torch.rand(p.shape, generator=torch.Generator().manual_seed(seed))
            p.grad = curvature * p.detach()
        optimizer.step()
    return optimizer


def row_bytes(optimizer: Anderson) -> int:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return sum(state[name].nbytes for state in states for name in ROWS)


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


# ------------------------------------------------------------------------------------------------------ precision


def test_rows_in_half_precision_take_half_the_bytes():
    full, half = driven(model()), driven(model(), storage=Storage(dtype=torch.bfloat16))
    assert row_bytes(half) * 2 == row_bytes(full) == 2 * 6 * 4 * 20_640
    assert full.stats.history_bytes - half.stats.history_bytes >= row_bytes(half)
    assert half.stats.as_dict()["accepted"] == full.stats.as_dict()["accepted"] >= 3


def test_short_rows_in_half_precision_are_no_longer_than_asked_for():
    half = driven(model((10, 10)), storage=Storage(dtype=torch.bfloat16))
    assert row_bytes(half) == 2 * 6 * 2 * 110


def test_half_precision_is_near_full_precision_and_not_it():
    exact, rounded, plain = model(), model(), model()
    driven(exact)
    driven(rounded, storage=Storage(dtype=torch.bfloat16))
    driven(plain, period=1000)
    differences = [(a - b).norm() for a, b in zip(weights(exact), weights(rounded), strict=True)]
    gains = [(a - b).norm() for a, b in zip(weights(exact), weights(plain), strict=True)]
    assert all(0 < difference < 0.2 * gain for difference, gain in zip(differences, gains, strict=True))


@pytest.mark.parametrize("options", [STEPPING, {"residual": "gradient"}], ids=["step", "gradient"])
def test_a_run_with_rows_in_half_precision_resumes_bit_for_bit(options):
    given = {**options, "storage": Storage(dtype=torch.bfloat16)}
    net, twin = model((10, 10)), model((10, 10))
    driven(twin, 23, **given)
    saved = driven(net, 10, **given).state_dict()
    again = Anderson(SGD(net.parameters(), lr=0.3), **given)
    again.load_state_dict(saved)
    for _ in range(13):
        for seed, p in enumerate(net.parameters()):
            p.grad = (0.1 + torch.rand(p.shape, generator=torch.Generator().manual_seed(seed))) * p.detach()
        again.step()
    assert all(map(torch.equal, weights(net), weights(twin)))


RATES = {
    ("least_squares", "sgd"): 1.0,
    ("least_squares", "momentum"): 0.3,
    ("least_squares", "adam"): 0.003,
    ("rosenbrock", "sgd"): 0.5,
    ("rosenbrock", "momentum"): 0.1,
    ("diabetes", "sgd"): 0.1,
    ("diabetes", "momentum"): 0.02,
    ("diabetes", "adam"): 0.002,
}
BASES = {"sgd": SGD, "momentum": partial(SGD, momentum=0.9), "adam": Adam}
NEGLIGIBLE = 0.01
"""A share of the base's own loss. SGD with jumps solves the least-squares problem to 1e-9 of it, and to 1e-7 where
rows are rounded: both have solved it."""


def final_loss(problem: str, base: str, seed: int, **options: Any) -> tuple[float, float]:
    """After 150 steps on all data, and how many jumps there were."""
    task = PROBLEMS[problem](seed)
    optimizer = Anderson(BASES[base](task.parameters, lr=RATES[problem, base]), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = task.exact_loss()
        loss.backward()
        return loss.detach()

    for _ in range(150):
        optimizer.step(closure)
    return task.full_loss(), optimizer.stats.as_dict()["accepted"]


@pytest.mark.slow
def test_half_precision_ends_two_percent_above_full_precision_at_most():
    """In the mean over the suite: single runs differ by their jumps, to either side; but none ends above the base."""
    ratios, jumps = [], 0.0
    for (problem, base), seed in product(RATES, range(2)):
        plain, _ = final_loss(problem, base, seed, warmup=10**6)
        exact, _ = final_loss(problem, base, seed)
        rounded, accepted = final_loss(problem, base, seed, storage=Storage(dtype=torch.bfloat16))
        least = NEGLIGIBLE * plain
        ratios.append(math.log(max(rounded, least) / max(exact, least)))
        jumps += accepted
        assert rounded <= 1.02 * plain, (problem, base, seed)
    assert jumps >= 20
    assert math.exp(sum(ratios) / len(ratios)) <= 1.02


# ---------------------------------------------------------------------------------------------------------- placement


@pytest.mark.parametrize("storage", [Storage(), Storage(device="cpu"), Storage(shard=True)], ids=str)
@pytest.mark.parametrize("options", [{}, {"residual": "gradient"}], ids=["step", "gradient"])
def test_other_places_give_the_same_bits_in_a_single_process(storage, options):
    ours, theirs = model((10, 10)), model((10, 10))
    kept, expected = driven(ours, storage=storage, **options), driven(theirs, **options)
    assert all(map(torch.equal, weights(ours), weights(theirs)))
    assert kept.stats.as_dict()["accepted"] == expected.stats.as_dict()["accepted"] >= 3


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("device", "nowhere"),
        ("dtype", torch.int8),
        ("dtype", "bfloat16"),
        ("shard", "yes"),
    ],
)
def test_bad_options_are_named(option, value):
    with pytest.raises((ValueError, TypeError), match=option):
        Anderson(SGD(model().parameters(), lr=0.1), storage=Storage(**{option: value}))


def test_a_process_group_is_none_or_one_of_torch():
    with pytest.raises(ValueError, match="process_group"):
        Anderson(SGD(model().parameters(), lr=0.1), process_group=3)


def test_a_storage_is_no_dictionary():
    with pytest.raises((ValueError, TypeError), match="storage"):
        Anderson(SGD(model().parameters(), lr=0.1), storage={"shard": True})


# -------------------------------------------------------------------------------------------------------- many ranks

SPREAD = {"ddp": Storage(dtype=torch.bfloat16, shard=True), "fsdp on 2": Storage(dtype=torch.bfloat16)}


def trained(layout: str, storage: Storage) -> dict[str, Any]:
    return build("p = 5, q = 2, momentum", layout, storage=storage).advance().outcome()


@pytest.mark.parametrize("layout", SPREAD)
def test_rows_in_half_precision_are_the_same_on_many_ranks(layout):
    expected = trained("single", Storage(dtype=torch.bfloat16))
    assert distance(expected["weights"], trained("single", Storage())["weights"]) > 1e-6  # rounding shows
    for rank in run(2, trained, layout, SPREAD[layout]):
        assert rank["counts"] == expected["counts"]
        assert distance(rank["weights"], expected["weights"]) <= 1e-12
