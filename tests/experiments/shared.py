"""What the tests of the experiments have in common: tasks in miniature, and data that may not be there."""

from typing import Any

import pytest
import torch

from experiments.runner import Spec
from experiments.task import Problem
from experiments.tasks import TASKS

TINY_PINN = {"steps": 40, "evaluate_every": 10, "width": 6, "depth": 2, "interior_points": 40, "boundary_points": 20}
TINY = {"steps": 40, "evaluate_every": 10, "width": 8, "depth": 1}
TINY_RESNET = TINY | {"training_images": 600, "validation_images": 100}
SMALL = {name: TINY_PINN if task.pinn else TINY for name, task in TASKS.items()}
SMALL |= dict.fromkeys(("cifar10", "fashion-resnet"), TINY_RESNET)
DATA = {"admissions": "admissions", "fashion": "fashion", "fashion-resnet": "fashion", "cifar10": "cifar10"}
"""The data set of each task that needs one."""


def each_task(*, without: str = "") -> list[Any]:
    """The names of all tasks but one, as parameters of a test; those that need data are marked."""
    return [
        pytest.param(name, marks=pytest.mark.data(DATA[name])) if name in DATA else name
        for name in TASKS
        if name != without
    ]


def small(task: str, method: str = "base", seed: int = 0, **overrides: object) -> Spec:
    """A run of a task in miniature."""
    return Spec(task, method, seed, overrides={**SMALL[task], **overrides})


def start(task: str, seed: int, **overrides: object) -> Problem:
    """The problem of a task in miniature."""
    torch.manual_seed(seed)
    return small(task, **overrides).resolve().start(seed)
