"""How many batches an acceleration looks at: more where jumps fit noise, and no more than it takes."""

import pytest
import torch
from driven import EAGER, driven, predictions, train
from torch.optim import SGD
from training import assert_same, counts, make_model, weights

from torch_anderson import Anderson, Discrepancy

MOST = 8
ROWS, COLUMNS = 6, 10
"""Of a batch: fewer rows than columns, so that a jump can fit one exactly."""


class Regression:
    """A linear model whose targets are noisy; every step looks at rows of its own."""

    def __init__(self, noise, **options):
        self.weights = torch.nn.Parameter(torch.zeros(COLUMNS, dtype=torch.float64))
        self.noise, self.asked = noise, []
        self.optimizer = Anderson(
            SGD([self.weights], lr=0.05), discrepancy=Discrepancy("mse", **{**EAGER, "most_batches": MOST, **options})
        )

    def outputs(self, step, batches):
        """The same whenever they are asked for again."""
        self.asked.append(batches)
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(batches * ROWS, COLUMNS, generator=generator, dtype=torch.float64)
        errors = torch.randn(batches * ROWS, generator=generator, dtype=torch.float64)
        return inputs @ self.weights, inputs.sum(1) + self.noise * errors

    def advance(self, steps):
        """Gradients have no noise: what is lost after a jump is the jump's fault."""
        for step in range(steps):
            self.weights.grad = 2 * (self.weights.detach() - 1)
            self.optimizer.step(outputs=lambda batches, step=step: self.outputs(step, batches))
        return self

    @property
    def batches(self):
        return self.optimizer.stats.as_dict()["batches"]


def test_batches_grow_where_jumps_fit_noise():
    training = Regression(noise=3.0).advance(60)
    assert training.optimizer.stats.counts["accepted"] >= 5
    assert {1, 2, 4} <= set(training.asked) <= {1, 2, 4, MOST}
    assert training.batches > 1


def test_one_batch_is_enough_where_there_is_no_noise():
    training = Regression(noise=0.0).advance(60)
    assert training.optimizer.stats.counts["accepted"] >= 3  # then there is nothing left to gain
    assert max(training.asked) <= 2
    assert training.asked.count(1) > 0.8 * len(training.asked)


def test_batches_grow_where_halves_of_a_batch_disagree():
    training = Regression(noise=30.0, held_out=True).advance(60)
    assert training.optimizer.stats.counts["rejected_held_out"] >= 3
    assert training.batches == MOST


@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_an_evaluation_counts_as_often_as_it_has_batches(noise):
    training = Regression(noise=noise).advance(60)
    assert training.optimizer.stats.counts["extra_evaluations"] == sum(training.asked)


def test_batches_come_back_from_a_checkpoint():
    options = {"most_batches": 4}

    def outputs(model, i):
        return lambda batches: tuple(torch.cat(part) for part in zip(*_parts(model, i, batches), strict=True))

    def advance(model, optimizer, start, steps):
        for i in range(start, steps):
            optimizer.zero_grad()
            predictions(model, i)[0].square().mean().backward()
            optimizer.step(outputs=outputs(model, i))

    model, optimizer = driven(**options)
    advance(model, optimizer, 0, 20)
    optimizer._accelerator.batches = 3  # a number that is not one to begin with
    twin, other = driven(**options)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert other.stats.as_dict()["batches"] == 3
    advance(model, optimizer, 20, 40)
    advance(twin, other, 20, 40)
    assert_same(weights(model), weights(twin))
    assert counts(optimizer) == counts(other)


def _parts(model, i, batches):
    return [predictions(model, i + 100 * j) for j in range(batches)]


def test_evaluation_weights_are_judged_by_one_batch():
    training = Regression(noise=3.0, use="evaluation", forward_cost=0.02).advance(40)
    assert set(training.asked) == {1}


def test_without_the_option_outputs_take_no_number():
    model, optimizer = driven()
    train(model, optimizer, 10)
    assert optimizer.stats.as_dict()["batches"] == 1


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
def test_numbers_that_make_no_sense_are_refused(number):
    with pytest.raises(ValueError, match="most_batches"):
        Discrepancy("mse", most_batches=number)


def test_a_function_that_takes_no_number_is_told_so():
    model = make_model(dtype=torch.float64)
    optimizer = Anderson(SGD(model.parameters(), lr=0.05), discrepancy=Discrepancy("mse", **EAGER, most_batches=2))
    with pytest.raises(TypeError, match="most_batches"):
        for _ in range(10):
            predictions(model)[0].square().mean().backward()
            optimizer.step(outputs=lambda: predictions(model))
