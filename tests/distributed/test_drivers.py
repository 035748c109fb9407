"""``GaussNewton`` where parameters are spread over ranks, and evaluations that could see stale weights."""

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import entries, load, save
from layouts import ALL, Case, Net, Training, assert_bitwise_equal, batch, constant, distance
from processes import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from torch_anderson import GaussNewton

SPREAD = ["ddp", "fsdp on 2"]

DRIVEN = {
    "residual": Case("sgd", (0.1, 0.2), constant, 48, {"loss": "residual", "budget": 0.9}),
    "cross-entropy": Case("adam", (0.01, 0.02), constant, 48, {"loss": "cross_entropy", "budget": 0.9}),
}
TOLERANCE = 1e-5
"""Columns are differences of outputs over steps of 5e-7 of the weights, which makes 1e-9 of a rounding error of 1e-16,
and a jump in few directions some more of it."""


class Driven(Training):
    """The network, trained with its outputs given."""

    def wrap(self, base: Optimizer, options: dict[str, Any]) -> Optimizer:
        """The optimizer that makes the steps."""
        return GaussNewton(base, **options)

    def logits(self) -> Tensor:
        """Three of them, made of the one output."""
        return self.model(self.inputs) * torch.tensor([2.0, 0.0, -2.0], dtype=torch.float64)

    def outputs(self) -> Any:
        """The outputs of this rank's part of the batch."""
        if self.case.options["loss"] == "residual":
            return self.model(self.inputs) - self.drift * self.targets
        return self.logits(), self.classes

    @property
    def classes(self) -> Tensor:
        """The classes of this rank's samples."""
        return (self.targets[:, 0] > 0).long() + (self.targets[:, 0] > 0.5).long()

    def loss(self) -> Tensor:
        """The loss that the outputs stand for."""
        if self.case.options["loss"] == "residual":
            return super().loss()
        return nn.functional.cross_entropy(self.logits(), self.classes)

    def given(self) -> dict[str, Any]:
        """What a step gets."""
        return {"outputs": self.outputs}


def all_driven(layout: str, names: Sequence[str] = tuple(DRIVEN)) -> dict[str, dict[str, Any]]:
    return {name: Driven(DRIVEN[name], layout).advance().outcome() for name in names}


@cache
def alone() -> dict[str, dict[str, Any]]:
    return all_driven("single")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*SPREAD, "fsdp x tp"])
def test_driven_training_is_that_of_a_single_process(layout):
    names = tuple(DRIVEN) if layout in SPREAD else ("residual",)
    first, *others = run(ALL[layout].ranks, all_driven, layout, names)
    for name in names:
        expected = alone()[name]
        for other in others:
            assert other[name]["counts"] == first[name]["counts"], name
            assert_bitwise_equal(other[name]["weights"], first[name]["weights"])
        apart = distance(first[name]["weights"], expected["weights"])
        assert apart <= TOLERANCE, f"{name}: {apart}"
        assert first[name]["counts"] == expected["counts"], name


def test_driven_cases_jump_and_are_no_less_exact_than_they_can_be():
    for name, case in DRIVEN.items():
        assert alone()[name]["counts"]["accepted"] >= 3, name
        disturbed = Driven(case)
        with torch.no_grad():
            disturbed.net.first.weight.mul_(1 + 2.3e-16)
        assert distance(disturbed.advance().weights(), alone()[name]["weights"]) <= TOLERANCE / 2


# ------------------------------------------------------------------------------------- what one rank cannot use


def bad_outputs_on_one_rank(bad: bool) -> dict[str, Any]:
    """Statistics of batches are sent around in the forward pass, so that ranks have to make equally many."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = DistributedDataParallel(net)
    optimizer = GaussNewton(SGD(model.parameters(), lr=0.1), loss="mse", budget=0.9)
    x, y = (rows[dist.get_rank() :: 2] for rows in batch())
    for i in range(60):
        factor = float("nan") if bad and dist.get_rank() == 1 and 20 < i < 40 else 1.0
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step(outputs=lambda factor=factor: (model(x) * factor, y))
    return {
        "weights": {name: p.detach().clone() for name, p in net.named_parameters()},
        "counts": {name: count for name, count in optimizer.stats.counts.items() if count},
    }


@pytest.mark.parametrize("bad", [False, True])
def test_outputs_that_one_rank_cannot_use_make_plain_steps_on_all(bad):
    one, other = run(2, bad_outputs_on_one_rank, bad)
    assert one["counts"] == other["counts"]
    assert one["counts"]["accepted"] > 0
    assert (one["counts"].get("skipped_nonfinite_outputs", 0) > 0) is bad
    assert_bitwise_equal(one["weights"], other["weights"])


# -------------------------------------------------------------------------- weights that were gathered and are stale


def plain_forward(weights: dict[str, Tensor]) -> Tensor:
    """The outputs of a model with these weights."""
    net = Net()
    net.load_state_dict(weights)
    return net(batch()[0]).detach()


def driven_and_looked_at(layout: str) -> dict[str, Any]:
    training = Driven(DRIVEN["residual"], layout).advance(27)  # the last step but one has jumped
    with torch.no_grad():
        return {**training.outcome(), "outputs": training.model(batch()[0]).clone()}


def test_after_a_jump_the_model_has_the_new_weights():
    for rank in run(2, driven_and_looked_at, "fsdp on 2"):
        assert rank["counts"]["accepted"] > 0
        assert torch.allclose(rank["outputs"], plain_forward(rank["weights"]), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- checkpoints

LEGS = (("fsdp on 2", 13), ("ddp", 22), ("single", 31), ("fsdp on 2", 48))


def leg(layout: str, number: int, folder: Path) -> dict[str, Any]:
    training = Driven(DRIVEN["cross-entropy"], layout)
    if number:
        load(training, folder / str(number))
    loaded = entries(training) if number else {}
    training.advance(LEGS[number][1], start=LEGS[number - 1][1] if number else 0)
    save(training, folder / str(number + 1))
    return {"loaded": loaded, "saved": entries(training), **training.outcome()}


@pytest.mark.slow
def test_directions_go_from_layout_to_layout(tmp_path):
    before: dict[str, Tensor] = {}
    for number, (layout, _) in enumerate(LEGS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            single = [leg(layout, number, tmp_path)] if layout == "single" else None
        found = (single or run(ALL[layout].ranks, leg, layout, number, tmp_path))[0]
        assert_bitwise_equal(found["loaded"], before)
        before = found["saved"]
    assert found["counts"] == alone()["cross-entropy"]["counts"]
    assert distance(found["weights"], alone()["cross-entropy"]["weights"]) <= TOLERANCE
