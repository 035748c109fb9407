"""One decision on every rank, from what all of them know."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import ANY, SGD, TAME, case
from layouts import ALL, LAYOUTS, Case, Elementwise, assert_bitwise_equal, constant, distance, local
from processes import run

MANY = [layout for layout in LAYOUTS if layout != "single"]
TWO = ["ddp", "ddp on 2, history sharded", "fsdp on 2"]

# ------------------------------------------------------------------------------------------- a NaN on one rank

FRAGILE = {
    "any jump": case(SGD, constant, 45, {"period": 3, "history_size": 3}, ANY),
    "descent": case(SGD, constant, 45, {"period": 4, "history_size": 2}, TAME),
    "residual": case(SGD, constant, 45, {"period": 3, "history_size": 2}, TAME, {"safeguard": "residual"}),
    "cycles": case(SGD, constant, 45, {"period": 3, "history_size": 2, "residual": "cycle"}, ANY),
}
BAD_STEPS = (11, 22)
"""The first makes an acceleration where the period is 3 or 4, the second one only stores."""


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
        """The number is the last one of the largest matrix: the last rank has it where matrices are sharded, and
        where they are not, only the last rank's copy is hit."""
        super().backward()
        gradient, places = local(self.net.first.weight.grad), self.places[1]
        last = self.layout.ranks == 1 or dist.get_rank() == self.layout.ranks - 1
        if self.bad and last and gradient.numel():
            gradient[places == 35] = math.nan


def poisoned(layout: str) -> dict[str, Any]:
    return {name: Poisoned(case, layout).advance().outcome() for name, case in FRAGILE.items()}


@pytest.mark.parametrize("layout", MANY)
def test_a_nan_on_one_rank_makes_plain_steps_on_all_and_training_goes_on(layout):
    expected = poisoned("single")
    first, *others = run(LAYOUTS[layout].ranks, poisoned, layout)
    for name in FRAGILE:
        counts = first[name]["counts"]
        assert counts["skipped_nonfinite"] >= 1 and counts["accepted"] >= 2, name
        assert all(other[name]["counts"] == counts for other in others), name
        assert counts == expected[name]["counts"], name
        for other in others:
            assert_bitwise_equal(other[name]["weights"], first[name]["weights"])
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


@pytest.mark.parametrize("layout", TWO)
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


# --------------------------------------------------------------------------------------- everything at the edge


@pytest.mark.parametrize("layout", TWO)
def test_ranks_agree_where_rounding_decides(layout):
    """Collinear columns with next to no regularization: which are dropped is a matter of the last digit, and what
    training makes of it too. Another result than a single process has is no error, different ranks are."""
    defaults = {"sgd": (0.1, 0.2), "momentum": (0.05, 0.07), "adam": (0.01, 0.02)}
    cases = [
        Case(base, rates, steps=60, options={"period": period, "history_size": 12, "safeguard": None})
        for base, rates in defaults.items()
        for period in (1, 4)
    ]
    ranks = run(ALL[layout].ranks, lambda: [Elementwise(case, layout).advance().outcome() for case in cases])
    for one, other in zip(*ranks, strict=True):
        assert one["counts"] == other["counts"]
        assert_bitwise_equal(one["weights"], other["weights"])
    assert sum(one["counts"].get("accepted", 0) for one in ranks[0]) > 20
