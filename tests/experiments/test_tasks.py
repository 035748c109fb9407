"""Each task in small: what it declares is what it does, and its batches depend on seed and step alone."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from shared import SMALL, each_task, start
from sklearn.datasets import load_diabetes

from experiments.tasks import TASKS
from experiments.tasks.batches import Batches

COUNT, ANY = (-5, 0), (-1, math.nan, math.inf)
RANGES = {
    **dict.fromkeys(("steps", "evaluate_every", "width", "depth", "batch_size"), COUNT),
    **dict.fromkeys(("learning_rate", "viscosity"), (0.0, *ANY)),
    **dict.fromkeys(("decay_factor", "forward_cost"), ANY),
    **dict.fromkeys(("decay_every", "hold"), (-1,)),
    "training_share": (0.0, 1.0, math.nan, -0.5),
    "tol": (-1.0, math.nan),
}
"""Values that make no sense, by the name of a setting."""


@pytest.mark.parametrize("name", each_task())
def test_a_task_trains_and_measures_what_it_declares(name):
    problem = start(name, seed=3)
    problem.loss(0).backward()
    gradients = [parameter.grad for parameter in problem.model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    with torch.no_grad():
        metrics, references = problem.evaluate(), problem.references()
    task = TASKS[name]
    assert list(metrics) == list(task.metrics)
    assert task.metric in task.metrics
    assert all(map(math.isfinite, metrics.values()))
    assert all(set(values) <= set(task.metrics) for values in references.values())


@pytest.mark.parametrize("name", TASKS)
def test_the_quick_profile_changes_settings_that_exist_and_is_shorter(name):
    task = TASKS[name]
    assert set(task.quick) <= set(task.__dataclass_fields__)
    assert task(**task.quick).steps < task().steps


@pytest.mark.parametrize("name", each_task())
def test_all_methods_of_a_seed_see_the_same_weights_and_batches_in_whatever_order(name):
    first, second, other = start(name, seed=1), start(name, seed=1), start(name, seed=2)
    steps = [0, 1, 2]
    losses = {step: first.loss(step).item() for step in steps}
    assert {step: second.loss(step).item() for step in reversed(steps)} == losses
    assert other.loss(0).item() != losses[0]


NUMBERS = [
    (name, setting.name, value)
    for name, task in TASKS.items()
    for setting in fields(task)
    if setting.name in RANGES
    for value in RANGES[setting.name]
    if (value, setting.name, setting.default) not in [(0, "steps", 0), (0, "evaluate_every", 0)]  # of the epochs
]


@pytest.mark.parametrize(("name", "setting", "value"), NUMBERS)
def test_a_number_out_of_its_range_is_refused(name, setting, value):
    with pytest.raises(ValueError, match=rf"Invalid {setting}: {value}\. Allowed:"):
        TASKS[name](**{setting: value})


def test_a_setting_that_may_be_zero_or_infinite_is_accepted():
    TASKS["digits"](decay_every=0, decay_factor=0.0, forward_cost=0.0, tol=math.inf)


def test_an_epoch_has_each_row_once_and_differs_from_the_next():
    batches = Batches(rows=12, size=4, seed=0)
    epochs = [torch.cat([batches(3 * epoch + position) for position in range(3)]) for epoch in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(12)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="batch_size"):
        Batches(rows=3, size=4, seed=0)


def test_ordinary_least_squares_is_numpys():
    problem = start("diabetes", seed=0)
    features, target = load_diabetes(return_X_y=True)
    target = (target - target.mean()) / target.std()
    order = np.random.default_rng(0).permutation(len(target))
    train, valid = order[:354], order[354:]
    with_one = np.c_[features, np.ones(len(target))]
    coefficients, *_ = np.linalg.lstsq(with_one[train], target[train])
    expected = np.mean((with_one[valid] @ coefficients - target[valid]) ** 2)
    assert problem.references()["ordinary least squares"]["validation_mse"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.data("admissions")
def test_admissions_noise_floor():
    """Known facts: 20 splits of ordinary least squares give 0.0036 +- 0.0005; the target's variance is 0.01988."""
    floors, spreads = [], []
    for seed in range(20):
        references = start("admissions", seed).references()
        floors.append(references["ordinary least squares"]["validation_mse"])
        spreads.append(references["mean of the training targets"]["validation_mse"])
    assert np.mean(floors) == pytest.approx(0.0036, abs=0.0005)
    assert np.std(floors) == pytest.approx(0.0005, abs=0.0002)
    assert np.mean(spreads) == pytest.approx(0.01988, rel=0.1)


@pytest.mark.parametrize("name", ["admissions", "diabetes"])
def test_the_paper_s_network_and_schedule(name):
    task = TASKS[name]()
    assert [task.rate_factor(step) for step in (0, 9_999, 10_000, 14_999)] == [1, 1, 0.2, 0.2]
    assert (task.period, task.store_period, task.history_size, task.relaxation) == (1, 1, 10, 0.1)
    sizes = [layer.weight.shape for layer in start("diabetes", 0, width=64, depth=3).model[::2]]
    assert sizes == [(64, 10), (64, 64), (64, 64), (1, 64)]


def test_small_settings_are_smaller_than_quick_ones():
    for name, settings in SMALL.items():
        assert settings["steps"] < TASKS[name](**TASKS[name].quick).steps
