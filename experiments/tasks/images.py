"""Classification of small images: digits (bundled with scikit-learn) and Fashion-MNIST (a Debian package)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data import load_fashion
from ..networks import perceptron
from ..task import Metrics, Problem, Task
from .batches import Batches

Labelled = tuple[Tensor, Tensor]
"""Images and classes."""


class Classification(Problem):
    """A network for ten classes."""

    def __init__(self, model: nn.Module, train: Labelled, valid: Labelled, batch_size: int, seed: int) -> None:
        (self.train_x, self.train_y), (self.valid_x, self.valid_y) = train, valid
        self.batches = Batches(len(self.train_y), batch_size, seed)
        self.model = model

    def batch(self, step: int) -> Labelled:
        """Images and classes of this step."""
        rows = self.batches(step)
        return self.train_x[rows], self.train_y[rows]

    def loss(self, step: int) -> Tensor:
        """Cross-entropy on the batch."""
        images, classes = self.batch(step)
        return cross_entropy(self.model(images), classes)

    def evaluate(self) -> Metrics:
        """Loss and share of errors on the validation part."""
        return scores(self.model(self.valid_x), self.valid_y)


def scores(logits: Tensor, labels: Tensor) -> Metrics:
    """Cross-entropy and share of wrong answers."""
    return {
        "validation_loss": cross_entropy(logits, labels).item(),
        "validation_error": (logits.argmax(1) != labels).float().mean().item(),
    }


class DigitsProblem(Classification):
    """With a linear classifier to compare with."""

    def references(self) -> dict[str, Metrics]:
        """Logistic regression."""
        line = LogisticRegression(max_iter=2_000).fit(self.train_x.numpy(), self.train_y.numpy())
        logits = torch.as_tensor(line.predict_log_proba(self.valid_x.numpy()))
        return {"logistic regression": scores(logits, self.valid_y)}


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """Settings of our own: the paper has no small images. Anderson's are the library's defaults."""

    metric: ClassVar[str] = "validation_loss"
    metrics: ClassVar[Mapping[str, str]] = {"validation_loss": "validation loss", "validation_error": "error rate"}

    width: int = 64
    depth: int = 2
    batch_size: int = 64
    learning_rate: float = 3e-3
    decay_factor: float = 0.2
    history_size: int = 10
    period: int = 10
    store_period: int = 1
    relaxation: float = 1.0
    average_window: int = 9

    def network(self, pixels: int) -> nn.Sequential:
        """A perceptron."""
        return perceptron(pixels, *[self.width] * self.depth, 10)


@dataclass(frozen=True, kw_only=True)
class Digits(ImageTask):
    """1,797 handwritten digits of 8 x 8 pixels, 80 % to train on."""

    name: ClassVar[str] = "digits"
    title: ClassVar[str] = "Handwritten digits"
    quick: ClassVar[Mapping[str, Any]] = {"steps": 1_000, "decay_every": 400}

    steps: int = 5_000
    decay_every: int = 2_000
    training_share: float = 0.8

    def start(self, seed: int) -> Problem:
        """Pixels scaled to variance 1; those that are always dark stay 0."""
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        cut = round(len(labels) * self.training_share)
        images = images[order] / images.std()
        labels = torch.as_tensor(labels[order])
        train, valid = (torch.as_tensor(part, dtype=torch.float32) for part in (images[:cut], images[cut:]))
        parts = (train, labels[:cut]), (valid, labels[cut:])
        return DigitsProblem(self.network(64), *parts, self.batch_size, seed)


@dataclass(frozen=True, kw_only=True)
class Fashion(ImageTask):
    """60,000 pictures of clothes to train on, 10,000 to validate."""

    name: ClassVar[str] = "fashion"
    title: ClassVar[str] = "Fashion-MNIST"
    quick: ClassVar[Mapping[str, Any]] = {"steps": 900, "decay_every": 300, "evaluate_every": 100}

    width: int = 128
    batch_size: int = 128
    steps: int = 4_680
    decay_every: int = 1_560
    evaluate_every: int = 117

    def start(self, seed: int) -> Problem:
        """With Debian's files; raises ``MissingData`` where they are not installed."""
        train_images, train_labels, test_images, test_labels = load_fashion()
        parts = flat(train_images, train_labels), flat(test_images, test_labels)
        return Classification(self.network(784), *parts, self.batch_size, seed)


def flat(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Labelled:
    """Rows of pixels between 0 and 1, and classes."""
    return torch.as_tensor(images.reshape(len(images), -1)).float() / 255, torch.as_tensor(labels).long()
