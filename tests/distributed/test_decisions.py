"""One decision on every rank, from what all of them know."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import ANY, SGD, TAME, case
from layouts import (
    ALL,
    LAYOUTS,
    Case,
    Elementwise,
    assert_bitwise_equal,
    constant,
    distance,
    full,
    in_time,
    local,
    places,
    shard_like,
)
from processes import run
from torch.distributed.fsdp import fully_shard

from torch_anderson import Anderson, MovingAverage

MANY = [layout for layout in LAYOUTS if layout != "single"]
TWO = ["ddp", "ddp on 2, history sharded", "fsdp on 2"]

# ------------------------------------------------------------------------------------------- a NaN on one rank

FRAGILE = {
    "any jump": case(SGD, constant, 45, {"period": 3, "history_size": 3}, ANY),
    "residual": case(SGD, constant, 45, {"period": 3, "history_size": 2}, TAME, {"safeguard": "residual"}),
    "gradients": case(SGD, constant, 30, {"history_size": 2}),
}
BAD_STEPS = (11, 22)
"""The first makes an acceleration where the period is 3, the second one only stores."""


class Poisoned(Elementwise):
    """One number of the model has no finite gradient at two steps; the user puts the weights back after them."""

    def step(self, step: int, **given: Any) -> None:
        kept = [local(p).clone() for p in self.net.parameters()]
        self.bad = step in BAD_STEPS
        super().step(step, **given)
        if self.bad:
            for p, value in zip(self.net.parameters(), kept, strict=True):
                local(p).copy_(value)

    def backward(self) -> None:
        """The number is the last one of the first bias: the last rank has it where parameters are sharded. Where they
        are not, only the last rank's copy is hit, which is the one that this rank multiplies."""
        super().backward()
        gradient, places = local(self.net.first.bias.grad), self.places[2]
        last = self.layout.ranks == 1 or dist.get_rank() == self.layout.ranks - 1
        if self.bad and last and gradient.numel():
            gradient[places == 42] = math.nan


def poisoned(layout: str) -> dict[str, Any]:
    return {name: Poisoned(case, layout).advance().outcome() for name, case in FRAGILE.items()}


@pytest.mark.parametrize("layout", [in_time(layout, "ddp", "tensor parallel") for layout in MANY])
def test_a_nan_on_one_rank_makes_plain_steps_on_all_and_training_goes_on(layout):
    expected = poisoned("single")
    first, *others = run(LAYOUTS[layout].ranks, poisoned, layout)
    for name in FRAGILE:
        counts = first[name]["counts"]
        assert counts.get("restarts", 0) + counts.get("skipped_noisy", 0) >= 1 and counts["accepted"] >= 2, name
        assert all(other[name]["counts"] == counts for other in others), name
        for other in others:
            assert_bitwise_equal(other[name]["weights"], first[name]["weights"])
        assert counts == expected[name]["counts"], name
        assert distance(first[name]["weights"], expected[name]["weights"]) <= 1e-12, name


# ----------------------------------------------------------------------------------- losses that differ by rank

LOSS = case(SGD, constant, 45, {"period": 3, "history_size": 2}, TAME, {"safeguard": "loss"})
"""(before, after) the jump on rank 0 and on the others, and whether it is an improvement."""
SAID = {
    "mean falls": ((1.0, 0.0), (1.0, 1.4), True),
    "mean rises": ((1.0, 0.9), (1.0, 2.0), False),
    "mean stays": ((1.0, 0.5), (1.0, 1.5), False),
    "nan after, on one rank": ((1.0, math.nan), (1.0, 0.0), False),
    "nan before, on one rank": ((1.0, 0.0), (math.nan, 0.0), False),
    "infinite before, on one rank": ((math.inf, 0.0), (1.0, 2.0), True),
    "infinite after, on one rank": ((1.0, 0.0), (1.0, math.inf), False),
}


def judged(layout: str, losses: tuple[float, float], steps: int = 45) -> Elementwise:
    """Train by losses that are said, not computed: one at the weights of the plain step, one elsewhere."""
    training = Elementwise(LOSS, layout)
    plain: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        plain[:] = [local(p).clone() for p in training.net.parameters()]

    def loss() -> torch.Tensor:
        same = all(torch.equal(local(p), kept) for p, kept in zip(training.net.parameters(), plain, strict=True))
        return torch.tensor(losses[0 if same else 1], dtype=torch.float64)

    training.optimizer.base.register_step_post_hook(keep)
    training.loss = loss  # type: ignore[method-assign]
    return training.advance(steps)


def said(layout: str) -> dict[str, Any]:
    return {name: judged(layout, losses[min(dist.get_rank(), 1)]).outcome() for name, (*losses, _) in SAID.items()}


@pytest.mark.parametrize("layout", [in_time(layout, "ddp", "fsdp on 2") for layout in TWO])
def test_the_mean_of_the_losses_decides_on_all_ranks(layout):
    one, other = run(ALL[layout].ranks, said, layout)
    for name, (*_, improves) in SAID.items():
        counts = one[name]["counts"]
        assert counts == other[name]["counts"], name
        assert counts["attempted"] >= 10
        assert counts.get("accepted", 0) == (counts["attempted"] if improves else 0), name
        assert counts.get("rejected_loss", 0) == (0 if improves else counts["attempted"]), name
        assert_bitwise_equal(one[name]["weights"], other[name]["weights"])


def test_said_losses_decide_in_a_single_process():
    """The test above is one of ranks only if this holds."""
    assert judged("single", (1.0, 0.0)).counts()["accepted"] >= 10
    assert judged("single", (1.0, 2.0)).counts()["rejected_loss"] >= 10


# ----------------------------------------------------------------------------------------- ranks with nothing to do

QUIET = {
    "any jump": case(("no decay", (0.3, 0.4)), constant, 40, {"period": 3, "history_size": 3}, ANY),
    "average": case(
        ("no decay", (0.3, 0.4)), constant, 40, {"period": 4, "history_size": 2, "average": MovingAverage(2)}, ANY
    ),
    "residual": case(
        *(("no decay", (0.3, 0.4)), constant, 40, {"period": 3, "history_size": 2}, TAME, {"safeguard": "residual"})
    ),
    "gradients": case(("no decay", (0.3, 0.4)), constant, 20, {"history_size": 2}),
}


class Quiet(Elementwise):
    """Some numbers have gradients of zero, always or in one half of the steps."""

    def __init__(self, case: Case, layout: str, still: torch.Tensor, always: bool) -> None:
        super().__init__(case, layout)
        self.still, self.always = still, always

    def step(self, step: int, **given: Any) -> None:
        self.resting = self.always or step % 10 < 5
        super().step(step, **given)

    def backward(self) -> None:
        super().backward()
        for p, numbers in zip(self.net.parameters(), self.places, strict=True):
            local(p.grad).masked_fill_(torch.isin(numbers, self.still) & self.resting, 0.0)


def quiet(layout: str, still: torch.Tensor) -> list[dict[str, Any]]:
    runs = [(case, always) for case in QUIET.values() for always in (True, False)]
    return [Quiet(case, layout, still, always).advance().outcome() for case, always in runs]


def test_a_rank_whose_numbers_stand_still_goes_along_with_the_others():
    """It must not take its own standstill for that of all: they would wait for it."""
    still = run(2, lambda: torch.cat([part.flatten() for part in places("fsdp on 2")]))[1]  # all that rank 1 has
    expected = quiet("single", still)
    one, other = run(2, quiet, "fsdp on 2", still)
    for ours, theirs, alone in zip(one, other, expected, strict=True):
        assert ours["counts"] == theirs["counts"] == alone["counts"]
        assert ours["counts"]["accepted"] >= 1
        assert distance(ours["weights"], alone["weights"]) <= 1e-12


def trained_line(options: dict[str, Any], mesh: Any = None) -> dict[str, Any]:
    """A model of one row: all but the first rank have nothing at all."""
    torch.manual_seed(0)
    line = torch.nn.Linear(40, 1).double()
    net = fully_shard(line) if mesh else line
    base = torch.optim.SGD(net.parameters(), lr=0.2)
    optimizer = Anderson(base, **options)
    curvatures = torch.linspace(0.1, 1.0, 40, dtype=torch.float64)
    for step in range(30 if options["residual"] == "step" else 16):
        for p in net.parameters():
            part = local(p)
            p.grad = shard_like(p, curvatures[: part.shape[-1]] * (part - math.sin(step / 5)))
        optimizer.step()
    counts = {name: int(count) for name, count in optimizer.stats.counts.items() if count}
    return {"weights": {name: full(p) for name, p in net.named_parameters()}, "counts": counts}


AVERAGED = {"period": 3, "history_size": 3, "average": MovingAverage(2), "safeguard": None, "regularization": 1e-2}


@pytest.mark.parametrize("options", [{"residual": "step", **AVERAGED}, {"residual": "gradient", "history_size": 2}])
def test_ranks_without_a_single_number_go_along(options):
    expected = trained_line(options)
    for rank in run(3, trained_line, options, True):
        assert rank["counts"] == expected["counts"]
        assert rank["counts"]["accepted"] >= 3
        assert distance(rank["weights"], expected["weights"]) <= 1e-12


# --------------------------------------------------------------------------------------- everything at the edge


@pytest.mark.slow
@pytest.mark.parametrize("layout", TWO)
def test_ranks_agree_where_rounding_decides(layout):
    """Collinear columns with next to no regularization: which are dropped is a matter of the last digit, and what
    training makes of it too. Another result than a single process has is no error, different ranks are."""
    stepping = {"residual": "step", "history_size": 12, "safeguard": None}
    defaults = {"sgd": (0.1, 0.2), "momentum": (0.05, 0.07), "adam": (0.01, 0.02)}
    cases = [
        Case(base, rates, steps=60, options=options)
        for base, rates in defaults.items()
        for options in (*({**stepping, "period": period} for period in (1, 4)), {}, {"safeguard": None})
    ]
    ranks = run(ALL[layout].ranks, lambda: [Elementwise(case, layout).advance().outcome() for case in cases])
    for one, other in zip(*ranks, strict=True):
        assert one["counts"] == other["counts"]
        assert_bitwise_equal(one["weights"], other["weights"])
    assert sum(one["counts"].get("accepted", 0) for one in ranks[0]) > 20
