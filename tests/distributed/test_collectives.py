"""What is sent, and when: one small sum for an acceleration, nothing on other steps, and no parameter ever."""

from typing import Any

import pytest
import torch
from cases import ANY, SGD, TAME, case
from layouts import ALL, Case, Elementwise, constant, in_time, local
from processes import run
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD as PlainSGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_anderson import Anderson, MovingAverage, Storage
from torch_anderson._anderson.gradient import LOOK

SMALL = 1024
"""Bytes. The model of these tests has 584, which is why sizes are measured for a larger one below."""
SPREAD = ["ddp", "ddp on 2, history sharded", "fsdp on 2", "fsdp x tp"]
STEPS = 24
COUNTED = {
    "any jump": case(SGD, constant, STEPS, {"period": 3, "history_size": 3}, ANY),
    "every step": case(SGD, constant, STEPS, {"period": 1, "history_size": 2}, ANY),
    "stored now and then": case(SGD, constant, STEPS, {"period": 4, "store_period": 2, "history_size": 3}, ANY),
    "loss": case(SGD, constant, STEPS, {"period": 3, "history_size": 2}, TAME, {"safeguard": "loss"}),
    "residual": case(SGD, constant, STEPS, {"period": 3, "history_size": 2}, TAME, {"safeguard": "residual"}),
    "average": case(SGD, constant, STEPS, {"period": 4, "history_size": 2, "average": MovingAverage(3)}, ANY),
    "gradients": case(SGD, constant, STEPS, {"history_size": 3}),
}
ONE_SUM = ("any jump", "every step", "stored now and then")
Records = list[tuple[int, dict[str, int]]]
"""The record of each step, with its number."""


class Bytes(TorchDispatchMode):
    """Adds up what goes into collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.sent += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return function(*args, **(kwargs or {}))


def recorded(case: Case, layout: str) -> list[dict[str, int]]:
    """For each step: collectives by kind, and how the counters changed."""
    training, steps = Elementwise(case, layout), []
    training.loss = lambda: local(training.net.first.bias).square().sum()  # type: ignore[method-assign]
    for _ in range(case.steps):
        before = training.counts()
        training.backward()
        with CommDebugMode() as mode:
            training.optimizer.step(loss_fn=training.loss)
        record = {str(op).split(".")[-1].strip("_"): count for op, count in mode.get_comm_counts().items()}
        counts = {name: count - before.get(name, 0) for name, count in training.counts().items()}
        steps.append({**counts, **{f"sent_{name}": count for name, count in record.items()}})
    return steps


def all_recorded(layout: str) -> dict[str, list[dict[str, int]]]:
    return {name: recorded(case, layout) for name, case in COUNTED.items()}


def sums(record: dict[str, int]) -> int:
    return sum(count for name, count in record.items() if name.startswith("sent_all") and "reduce" in name)


def gathers(record: dict[str, int]) -> int:
    return sum(count for name, count in record.items() if name.startswith("sent_") and "gather" in name)


def others(record: dict[str, int]) -> int:
    return sum(count for name, count in record.items() if name.startswith("sent_")) - sums(record) - gathers(record)


def assert_one_sum_for_an_acceleration(name: str, records: Records) -> None:
    """Other steps send nothing, except for the comparison of ranks at the first step."""
    period = COUNTED[name].options["period"]
    first = max(period, 2)  # which has two pairs
    expected = [int(k >= first and k % period == 0) for k in range(2, STEPS + 1)]
    assert [sums(record) for _, record in records] == expected, name


def assert_one_more_for_the_loss(records: Records) -> None:
    for k, record in records:
        assert sums(record) == (k % 3 == 0) + (record.get("extra_evaluations", 0) > 0), k
    assert sum(record.get("extra_evaluations", 0) for _, record in records) >= 6


def assert_one_more_at_the_step_after_a_jump(records: Records) -> None:
    """Where the residual decides; and one where it refuses."""
    pending, settled = False, 0
    for k, record in records:
        assert sums(record) == (k % 3 == 0) + pending + record.get("rejected_residual", 0), k
        settled += pending
        rejected_now = record.get("rejected_too_long", 0) + record.get("rejected_nonfinite", 0)
        pending = bool(record.get("attempted", 0) and not rejected_now)
    assert settled >= 5


def assert_one_sum_for_a_gradient_that_decides_or_makes_a_jump(records: Records) -> None:
    """None at the first three, which are only stored, nor at rest; and one where it refuses."""
    for k, record in records:
        refused = record.get("rejected_gradient", 0)
        assert sums(record) <= (k >= LOOK) + refused, k
        decides = {name for name, count in record.items() if count and name.startswith(("att", "acc", "rej", "skip"))}
        assert sums(record) == 1 + refused or not decides, k
    assert sum(record.get("accepted", 0) for _, record in records) >= 5


def assert_one_sum_a_step_for_averages(records: Records) -> None:
    for k, record in records[2:]:  # the window is full after three steps, and three steps after a jump
        full = k % 4 in (3, 0) and not record.get("accepted", 0)
        assert sums(record) <= (k % 4 == 0) + 1, k
        assert sums(record) == (k % 4 == 0) + 1 or not full, k
    assert sum(record.get("averaged", 0) for _, record in records) > 0


def assert_gathers_for_jumps_alone(layout: str, found: dict[str, Records]) -> None:
    """Gathers happen only where the history of whole parameters is sharded."""
    sharded = layout == "ddp on 2, history sharded"
    for name, records in found.items():
        for k, record in records:
            assert others(record) == 0, (name, k)
            assert gathers(record) <= sharded, (name, k)
            if name in ONE_SUM:
                assert gathers(record) == (sharded and record.get("accepted", 0)), (name, k)


@pytest.mark.parametrize("layout", [in_time(layout, "ddp") for layout in SPREAD])
def test_ranks_send_no_more_than_they_must(layout):
    ranks = run(ALL[layout].ranks, all_recorded, layout)
    assert all(rank == ranks[0] for rank in ranks)
    found = {name: list(enumerate(records, start=1))[1:] for name, records in ranks[0].items()}
    for name in ONE_SUM:
        assert_one_sum_for_an_acceleration(name, found[name])
    assert_one_more_for_the_loss(found["loss"])
    assert_one_more_at_the_step_after_a_jump(found["residual"])
    assert_one_sum_a_step_for_averages(found["average"])
    assert_one_sum_for_a_gradient_that_decides_or_makes_a_jump(found["gradients"])
    assert_gathers_for_jumps_alone(layout, found)


# ---------------------------------------------------------------------------------------------- bytes that are sent


def wide_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)
    )


STEPPING = {"residual": "step", "period": 3, "safeguard": None}
GRADIENTS = {"residual": "gradient", "period": 1}


def drive(model: torch.nn.Module, steps: int, **options: Any) -> Anderson:
    """Train with gradients that are made up."""
    optimizer = Anderson(PlainSGD(model.parameters(), lr=0.1), **{**STEPPING, **options})
    for _ in range(steps):
        for p in model.parameters():
            p.grad = p.detach().sin()
        optimizer.step()
    return optimizer


def sent_by_ddp(options: dict[str, Any]) -> int:
    optimizer = drive(DistributedDataParallel(wide_model()), 8, history_size=5, **options)
    with Bytes() as mode:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.detach().sin()
        optimizer.step()
    return mode.sent


@pytest.mark.parametrize("options", [STEPPING, GRADIENTS], ids=["step", "gradient"])
def test_the_sum_is_small(options):
    """Five rows of 6,794 numbers: 136 kB in float32. Their products are some hundred bytes."""
    assert all(0 < sent <= SMALL for sent in run(2, sent_by_ddp, options))


# ------------------------------------------------------------------------------------------------ bytes that are kept


ROWS = ("point_diffs", "residual_diffs", "last_point", "last_residual")


def kept_bytes(shard: bool, options: dict[str, Any]) -> dict[str, float]:
    net = DistributedDataParallel(wide_model())
    optimizer = drive(net, 10, history_size=20, storage=Storage(shard=shard), **options)
    entries = [
        local(optimizer.state[p]["anderson_" + name]) for p in optimizer.param_groups[0]["params"] for name in ROWS
    ]
    return {
        "said": float(optimizer.stats.history_bytes),
        "seen": float(sum(value.nbytes for value in entries)),
        "accepted": optimizer.stats.as_dict()["accepted"],
    }


@pytest.mark.parametrize("options", [STEPPING, GRADIENTS], ids=["step", "gradient"])
def test_the_fullest_of_four_ranks_keeps_a_quarter_of_the_history(options):
    whole = run(4, kept_bytes, False, options)
    sharded = run(4, kept_bytes, True, options)
    assert all(rank["accepted"] > 0 for rank in whole + sharded)
    for measure in ("said", "seen"):
        assert max(rank[measure] for rank in sharded) <= 1.1 * whole[0][measure] / 4
        assert sum(rank[measure] for rank in sharded) >= 0.95 * whole[0][measure]  # nothing is left out
