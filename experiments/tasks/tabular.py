"""Regression on small tables: graduate admissions (the paper's) and diabetes (bundled with scikit-learn)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from torch import Tensor
from torch.nn.functional import mse_loss

from ..data import load_admissions
from ..networks import perceptron
from ..task import Metrics, Problem, Task
from .batches import Batches


class Regression(Problem):
    """A perceptron that learns one column of a table from the others."""

    def __init__(self, task: "TableTask", features: NDArray[Any], target: NDArray[Any], seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(target))
        cut = round(len(target) * task.training_share)
        self.train_x, self.valid_x = standardized(features[order], cut)
        self.train_y, self.valid_y = tensor(target[order[:cut], None]), tensor(target[order[cut:], None])
        self.batches = Batches(cut, task.batch_size, seed)
        self.model = perceptron(features.shape[1], *[task.width] * task.depth, 1)

    def loss(self, step: int) -> Tensor:
        """Mean squared error on the batch."""
        batch = self.batches(step)
        return mse_loss(self.model(self.train_x[batch]), self.train_y[batch])

    def evaluate(self) -> Metrics:
        """Mean squared errors on the whole of both parts."""
        return {
            "validation_mse": mse_loss(self.model(self.valid_x), self.valid_y).item(),
            "training_mse": mse_loss(self.model(self.train_x), self.train_y).item(),
        }

    def references(self) -> dict[str, Metrics]:
        """A straight line, and the mean."""
        line = LinearRegression().fit(self.train_x, self.train_y)
        predictions = {
            "ordinary least squares": tensor(line.predict(self.valid_x)),
            "mean of the training targets": self.train_y.mean().expand_as(self.valid_y),
        }
        return {name: {"validation_mse": mse_loss(p, self.valid_y).item()} for name, p in predictions.items()}


def standardized(features: NDArray[Any], cut: int) -> tuple[Tensor, Tensor]:
    """Training and validation rows, scaled by statistics of the training rows."""
    mean, deviation = features[:cut].mean(0), features[:cut].std(0)
    scaled = tensor((features - mean) / deviation)
    return scaled[:cut], scaled[cut:]


def tensor(array: NDArray[Any]) -> Tensor:
    """In single precision, as networks are trained."""
    return torch.as_tensor(array, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class TableTask(Task):
    """Network and settings of the paper for admissions, shared by both tables."""

    metric: ClassVar[str] = "validation_mse"
    metrics: ClassVar[Mapping[str, str]] = {"validation_mse": "validation MSE", "training_mse": "training MSE"}
    quick: ClassVar[Mapping[str, Any]] = {"steps": 3_000, "decay_every": 2_000}

    steps: int = 15_000
    learning_rate: float = 0.02
    decay_factor: float = 0.2
    decay_every: int = 10_000
    width: int = 64
    depth: int = 3
    batch_size: int = 40
    training_share: float = 0.8
    history_size: int = 10
    period: int = 1
    store_period: int = 1
    relaxation: float = 0.1
    average_window: int = 10
    safeguard: str | None = None
    """The paper's residual test, which defers each jump by a step, would leave no step to average at period 1."""


@dataclass(frozen=True, kw_only=True)
class Admissions(TableTask):
    """The paper's first experiment. 400 rows in batches of 40: 10 steps are an epoch, 15,000 steps are 1,500 epochs."""

    name: ClassVar[str] = "admissions"
    title: ClassVar[str] = "Graduate admissions"

    def start(self, seed: int) -> Problem:
        """With the admissions table; raises ``MissingData`` where it cannot be had."""
        return Regression(self, *load_admissions(), seed)


@dataclass(frozen=True, kw_only=True)
class Diabetes(TableTask):
    """The network and settings of admissions on 442 patients and 10 features that come with scikit-learn."""

    name: ClassVar[str] = "diabetes"
    title: ClassVar[str] = "Diabetes"

    def start(self, seed: int) -> Problem:
        """The target has mean 0 and variance 1: 1.0 is what the mean would get."""
        features, target = load_diabetes(return_X_y=True)
        return Regression(self, features, (target - target.mean()) / target.std(), seed)
