"""Where the history is kept: in half precision, elsewhere, sharded, or in as much memory as there is."""

import logging
import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import attempt, failures, run
from torch import nn
from torch.optim import SGD, Adam

from benchmarks.problems import PROBLEMS
from torch_anderson import Anderson, Storage

ROWS = ("anderson_map_diffs", "anderson_residual_diffs")
LONG = (128, 160)
"""20,640 numbers: beyond the length up to which residuals are kept in float64."""


def model(shape: tuple[int, int] = LONG) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(*shape)


def driven(net: nn.Module, steps: int = 20, **options: Any) -> Anderson:
    """With gradients that are made up: of squares, each number with a curvature of its own."""
    given = {"period": 4, "history_size": 6, "safeguard": None, "regularization": 1e-3, **options}
    optimizer = Anderson(SGD(net.parameters(), lr=0.3), **given)
    for _ in range(steps):
        for seed, p in enumerate(net.parameters()):
            curvature = 0.1 + torch.rand(p.shape, generator=torch.Generator().manual_seed(seed))
            p.grad = curvature * p.detach()
        optimizer.step()
    optimizer.state_dict()
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


def test_a_run_with_rows_in_half_precision_resumes_bit_for_bit():
    storage = Storage(dtype=torch.bfloat16)
    net, twin = model((10, 10)), model((10, 10))
    driven(twin, 23, storage=storage)
    saved = driven(net, 10, storage=storage).state_dict()
    again = Anderson(SGD(net.parameters(), lr=0.3), period=4, history_size=6, safeguard=None, regularization=1e-3,
                     storage=storage)  # fmt: skip
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
"""Of the base's own loss. SGD with jumps solves the least-squares problem to 1e-9 of it, and to 1e-7 where rows are
rounded: both have solved it."""


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
    """In the mean over the suite: single runs differ by a jump more or less, to either side."""
    ratios, jumps = [], 0.0
    for (problem, base), seed in product(RATES, range(2)):
        plain, _ = final_loss(problem, base, seed, period=10**6)
        exact, _ = final_loss(problem, base, seed)
        rounded, accepted = final_loss(problem, base, seed, storage=Storage(dtype=torch.bfloat16))
        least = NEGLIGIBLE * plain
        ratios.append(math.log(max(rounded, least) / max(exact, least)))
        jumps += accepted
    assert jumps >= 20
    assert math.exp(sum(ratios) / len(ratios)) <= 1.02
    assert math.exp(max(ratios)) <= 1.1


# ---------------------------------------------------------------------------------------------------------- placement


@pytest.mark.parametrize("storage", [Storage(), Storage(device="cpu"), Storage(shard=True)], ids=str)
def test_other_places_give_the_same_bits_in_a_single_process(storage):
    ours, theirs = model((10, 10)), model((10, 10))
    kept, expected = driven(ours, storage=storage), driven(theirs)
    assert all(map(torch.equal, weights(ours), weights(theirs)))
    assert kept.stats.as_dict()["accepted"] == expected.stats.as_dict()["accepted"] >= 3


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("device", "nowhere"),
        ("dtype", torch.int8),
        ("dtype", "bfloat16"),
        ("shard", "yes"),
        ("budget", 0),
        ("budget", -5),
        ("budget", "1GB"),
        ("process_group", 3),
    ],
)
def test_bad_options_are_named(option, value):
    with pytest.raises((ValueError, TypeError), match=option):
        Anderson(SGD(model().parameters(), lr=0.1), storage=Storage(**{option: value}))


def test_a_storage_is_no_dictionary():
    with pytest.raises((ValueError, TypeError), match="storage"):
        Anderson(SGD(model().parameters(), lr=0.1), storage={"shard": True})


# ------------------------------------------------------------------------------------------------------------- budget


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kept: list[str] = []
        logger = logging.getLogger("torch_anderson")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def within_budget(budget: int | None) -> dict[str, Any]:
    messages = Messages()
    net = model()
    optimizer = driven(net, history_size=20, storage=Storage(budget=budget))
    logging.getLogger("torch_anderson").removeHandler(messages)
    columns = optimizer.stats.as_dict()["history_len"]
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    depth = {len(state["anderson_map_diffs"]) for state in states}
    found = {"bytes": optimizer.stats.history_bytes, "messages": messages.kept, "depth": depth, "columns": columns}
    return found | {"weights": weights(net)}


WHOLE = 2 * 20 * 4 * 20_640
"""Bytes of all rows of 20 columns in float32."""


def test_a_budget_that_is_large_enough_changes_nothing():
    free, wide = within_budget(None), within_budget(10 * WHOLE)
    assert wide["depth"] == free["depth"] == {20}
    assert wide["bytes"] == free["bytes"]
    assert all(map(torch.equal, wide["weights"], free["weights"]))


def test_a_small_budget_is_kept_and_what_was_chosen_is_said_once():
    found = within_budget(WHOLE // 4)
    assert found["bytes"] <= WHOLE // 4
    (depth,) = found["depth"]
    assert 2 <= depth < 20
    assert found["columns"] <= depth
    (message,) = [text for text in found["messages"] if "bytes" in text]
    assert f"{depth} columns" in message and str(WHOLE // 4) in message


def test_the_smaller_of_two_budgets_keeps_less():
    depths = [max(within_budget(WHOLE // part)["depth"]) for part in (3, 4, 6)]
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[-1]


def test_a_budget_for_less_than_a_column_is_refused():
    with pytest.raises(ValueError, match="budget"):
        within_budget(1000)


def test_all_ranks_choose_alike_within_the_smallest_budget():
    """Of budgets that differ, which is refused, or the same, which is not."""
    one, other = run(2, within_budget, WHOLE // 4)
    assert one["depth"] == other["depth"] and one["bytes"] == other["bytes"] <= WHOLE // 4
    assert all(map(torch.equal, one["weights"], other["weights"]))


def different_budgets() -> str | None:
    return attempt(lambda: within_budget(WHOLE // (4 + 4 * dist.get_rank())), ValueError, RuntimeError)


def test_ranks_with_different_budgets_say_so():
    for message in failures(run(2, different_budgets)):
        assert "budget" in message or "history_size" in message  # which the budget has chosen
