"""The discrepancy driver, and weights to evaluate with, where parameters or their history are spread over ranks."""

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import NETWORK
from checkpoints import entries, load, save
from layouts import ALL, Case, Net, Training, assert_bitwise_equal, batch, constant, distance
from processes import run
from torch import Tensor

from torch_anderson import Discrepancy

SPREAD = ["ddp", "ddp on 2, history sharded", "fsdp on 2"]
EAGER = {"history_size": 4, "store_period": 1, "period": 2, "jumps": 2, "budget": 0.9}
CHEAP = {"store_period": 1, "forward_cost": 0.02}
"""So cheap that the mixture is learnt every few steps."""

DRIVEN = {
    "residual": Case("sgd", (0.1, 0.2), steps=24, options={"discrepancy": Discrepancy("residual", **EAGER)}),
    "cross-entropy in training": Case(
        *("adam", (0.01, 0.02), constant, 24),
        {"discrepancy": Discrepancy("cross_entropy", use="both", forward_cost=0.02, **EAGER)},
    ),
    "cross-entropy": Case(
        *("momentum", (0.05, 0.07), constant, 40), {"discrepancy": Discrepancy("cross_entropy", **CHEAP)}
    ),
}
AMPLIFIED = 1e-5
"""Columns are differences of outputs over steps of 5e-7 of the weights, which makes 1e-9 of a rounding error of 1e-16,
and a jump in few directions some more of it. Where nothing is differenced, 1e-12 holds as everywhere."""
TOLERANCES = {"residual": AMPLIFIED, "cross-entropy in training": AMPLIFIED, "cross-entropy": 1e-12}
DECIDING = {"attempted", "accepted", "rejected_loss", "extra_evaluations"}


class Driven(Training):
    """The network, trained with its outputs given."""

    def logits(self) -> Tensor:
        """Three of them, made of the one output."""
        return self.model(self.inputs) * torch.tensor([2.0, 0.0, -2.0], dtype=torch.float64)

    def outputs(self) -> Any:
        """Of this rank's part of the batch."""
        if self.settings.loss == "residual":
            return self.model(self.inputs) - self.drift * self.targets
        return self.logits(), self.classes

    @property
    def settings(self) -> Discrepancy:
        """Of the driver."""
        return self.case.options["discrepancy"]

    @property
    def classes(self) -> Tensor:
        """Of the samples of this rank."""
        return (self.targets[:, 0] > 0).long() + (self.targets[:, 0] > 0.5).long()

    def loss(self) -> Tensor:
        """What the outputs stand for."""
        if self.settings.loss == "residual":
            return super().loss()
        return torch.nn.functional.cross_entropy(self.logits(), self.classes)

    def step(self, step: int, **given: Any) -> None:
        """With outputs."""
        super().step(step, outputs=self.outputs)

    @torch.no_grad()
    def forward(self) -> Tensor:
        """On all rows of the batch, which is the same on all ranks."""
        return self.model(batch()[0]).clone()


def plain_forward(weights: dict[str, Tensor]) -> Tensor:
    """What a model with these weights answers."""
    net = Net()
    net.load_state_dict(weights)
    return net(batch()[0]).detach()


def evaluated(name: str, layout: str) -> dict[str, Any]:
    training = Driven(DRIVEN[name], layout).advance()
    found = training.outcome()
    if training.settings.evaluates:
        with training.optimizer.accelerated_weights(training.model):
            found["accelerated"] = training.weights()
    return found


def all_evaluated(layout: str, names: Sequence[str] = tuple(DRIVEN)) -> dict[str, dict[str, Any]]:
    return {name: evaluated(name, layout) for name in names}


@cache
def alone() -> dict[str, dict[str, Any]]:
    return all_evaluated("single")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*SPREAD, "fsdp x tp"])
def test_driven_training_is_that_of_a_single_process(layout):
    names = tuple(DRIVEN) if layout in SPREAD else ("residual",)
    first, *others = run(ALL[layout].ranks, all_evaluated, layout, names)
    for name in names:
        expected = alone()[name]
        for other in others:
            assert other[name]["counts"] == first[name]["counts"], name
            for key in expected.keys() - {"counts"}:
                assert_bitwise_equal(other[name][key], first[name][key])
        for key in expected.keys() - {"counts"}:
            apart = distance(first[name][key], expected[key])
            assert apart <= TOLERANCES[name], f"{name}: {key} {apart}"
        assert first[name]["counts"] == expected["counts"], name


def test_driven_cases_jump_and_are_no_less_exact_than_they_can_be():
    for name, case in DRIVEN.items():
        counts, evaluates = alone()[name]["counts"], case.options["discrepancy"].evaluates
        assert counts.get("accepted", 0) >= (5 if case.options["discrepancy"].trains else 0), name
        disturbed = Driven(case)
        with torch.no_grad():
            disturbed.net.first.weight.mul_(1 + 2.3e-16)
        assert distance(disturbed.advance().weights(), alone()[name]["weights"]) <= TOLERANCES[name] / 2
        if evaluates:
            assert counts["extra_evaluations"] >= 12
            assert distance(alone()[name]["accelerated"], alone()[name]["weights"]) > 1e-4


# -------------------------------------------------------------------------- weights that were gathered and are stale


def looked_at(layout: str) -> dict[str, Any]:
    """Evaluation before, within and after, and training on."""
    training = Driven(DRIVEN["cross-entropy"], layout).advance(20)
    undisturbed = Driven(DRIVEN["cross-entropy"], layout).advance(20)
    found = {"weights": training.weights(), "before": training.forward()}
    with training.optimizer.accelerated_weights(training.model):
        found |= {"accelerated": training.weights(), "within": training.forward()}
    found |= {"weights again": training.weights(), "after": training.forward()}
    with training.optimizer.accelerated_weights(training.model):
        training.forward()
    training.advance(start=20)  # no forward pass between the evaluation and the next step
    undisturbed.advance(start=20)
    return found | {"end": training.weights(), "undisturbed": undisturbed.weights()}


@pytest.mark.parametrize("layout", SPREAD)
def test_evaluation_sees_its_weights_and_training_those_of_training(layout):
    for rank in run(ALL[layout].ranks, looked_at, layout):
        assert distance(rank["accelerated"], rank["weights"]) > 1e-4
        assert_bitwise_equal(rank["weights again"], rank["weights"])
        for outputs, weights in (("before", "weights"), ("within", "accelerated"), ("after", "weights")):
            assert torch.allclose(rank[outputs], plain_forward(rank[weights]), rtol=0, atol=1e-12), outputs
        assert_bitwise_equal(rank["end"], rank["undisturbed"])


class Curious(Training):
    """Evaluates after every step, and gives a loss that is evaluated without a graph."""

    def step(self, step: int, **given: Any) -> None:
        """On a batch that stays."""
        self.backward()
        self.optimizer.step(loss_fn=torch.no_grad()(self.loss))
        with torch.no_grad():
            self.model(self.inputs)


def curious(layout: str) -> dict[str, Any]:
    training = Curious(NETWORK["loss"], layout).advance()
    return {**training.outcome(), "outputs": training.model(batch()[0]).detach().clone()}


def test_a_loss_without_graph_leaves_no_stale_weights_behind():
    expected = curious("single")
    for rank in run(2, curious, "fsdp on 2"):
        assert rank["counts"] == expected["counts"] and rank["counts"]["accepted"] >= 5
        assert distance(rank["weights"], expected["weights"]) <= 1e-12
        assert torch.allclose(rank["outputs"], plain_forward(rank["weights"]), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- checkpoints

LEGS = (("fsdp on 2", 13), ("ddp on 2, history sharded", 22), ("single", 31), ("ddp", 40))


def leg(layout: str, number: int, folder: Path) -> dict[str, Any]:
    training = Driven(DRIVEN["cross-entropy"], layout)
    if number:
        load(training, folder / str(number))
    loaded = entries(training) if number else {}
    start = LEGS[number - 1][1] if number else 0
    training.advance(LEGS[number][1], start=start)
    save(training, folder / str(number + 1))
    saved = entries(training)
    with training.optimizer.accelerated_weights(training.model):
        return {"loaded": loaded, "saved": saved, "accelerated": training.weights(), "counts": training.counts()}


@pytest.mark.slow
def test_averages_go_from_layout_to_layout(tmp_path):
    before: dict[str, Tensor] = {}
    for number, (layout, _) in enumerate(LEGS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            single = [leg(layout, number, tmp_path)] if layout == "single" else None
        found = (single or run(ALL[layout].ranks, leg, layout, number, tmp_path))[0]
        assert_bitwise_equal(found["loaded"], before)
        before = found["saved"]
    assert distance(found["accelerated"], alone()["cross-entropy"]["accelerated"]) <= 1e-12
    assert found["counts"] == alone()["cross-entropy"]["counts"]
