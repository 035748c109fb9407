"""What the tests of the lab have in common: tasks in miniature, and data that may not be there."""

import os
from pathlib import Path

import pytest
import torch

from torch_anderson.lab.data import ADMISSIONS, DATA_VARIABLE, MissingData, load_cifar10, load_fashion
from torch_anderson.lab.runner import Spec
from torch_anderson.lab.task import Problem
from torch_anderson.lab.tasks import TASKS

BESIDE = Path(__file__).parents[3] / "shared" / "data"
"""Where the admissions table is on machines that develop this project."""
os.environ.setdefault(DATA_VARIABLE, str(BESIDE))

TINY_PINN = {"steps": 40, "evaluate_every": 10, "width": 6, "depth": 2, "interior_points": 40, "boundary_points": 20}
TINY = {"steps": 40, "evaluate_every": 10, "width": 8, "depth": 1}
TINY_RESNET = TINY | {"training_images": 600, "validation_images": 100}
SMALL = {name: TINY_PINN if task.pinn else TINY for name, task in TASKS.items()}
SMALL |= dict.fromkeys(("cifar10", "fashion-resnet"), TINY_RESNET)
LOADERS = {"fashion": load_fashion, "fashion-resnet": load_fashion, "cifar10": load_cifar10}


def need_data(task: str) -> None:
    """Skip the test where the task's data are missing."""
    if task == "admissions" and not (BESIDE / ADMISSIONS).exists():
        pytest.skip(f"the admissions table is not in {BESIDE}")
    if task in LOADERS:
        try:
            LOADERS[task]()
        except MissingData as problem:
            pytest.skip(str(problem))


def small(task: str, method: str = "base", seed: int = 0, **overrides: object) -> Spec:
    """A run of a task in miniature."""
    return Spec(task, method, seed, overrides={**SMALL[task], **overrides})


def start(task: str, seed: int, **overrides: object) -> Problem:
    """The problem of a task in miniature."""
    torch.manual_seed(seed)
    return small(task, **overrides).resolve().start(seed)
