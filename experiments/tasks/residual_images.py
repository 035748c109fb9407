"""Small brothers of ImageNet: ResNet-20 on CIFAR-10 and on Fashion-MNIST, trained as the paper trains ResNet-50.

Nesterov at a learning rate that grows with the batch, after a slow start, and falls to a tenth three times.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad
from torch.optim.swa_utils import update_bn

from ..data import Arrays, load_cifar10, load_fashion
from ..ranges import at_least, check
from ..resnet import small_resnet
from ..task import Metrics, Problem, Task
from .images import Classification, Labelled, scores

REFERENCE_BATCH = 128
"""The batch whose learning rate is the task's own."""
SLOW_START = 5 / 90
"""Share of the run in which the learning rate has not yet grown with the batch (the paper's first 5 epochs)."""
DECAYS = (30 / 90, 60 / 90, 80 / 90)
"""Shares of the run after which the learning rate is a tenth of what it was."""
EVALUATIONS = 9
"""Number of evaluations in a run, if not set."""
CHUNK = 500
"""Images that are evaluated together."""
LEAST_WIDTH = 8
"""Channels. With fewer, the backward pass of oneDNN 3.12 (torch 2.13) writes past its buffers on processors with AVX2
but without AVX-512: strided 1 x 1 convolutions of images whose colours are innermost."""
STATISTICS = 1000
"""Training images from which statistics for evaluation are computed."""


class ResidualClassification(Classification):
    """A ResNet for ten classes.

    Images are kept as bytes, one per pixel and colour, and normalised when they are used.
    """

    def __init__(self, task: "ResidualTask", train: Labelled, valid: Labelled, seed: int) -> None:
        model = small_resnet(channels=train[0].shape[-1], width=task.width, depth=task.depth)
        super().__init__(model, train, valid, task.batch_size, seed)
        self.seed, self.augment = seed, task.augment
        sample = self.train_x[:STATISTICS].float()
        self.mean, self.deviation = sample.mean((0, 1, 2)), sample.std((0, 1, 2))

    def batch(self, step: int) -> Labelled:
        """Images and classes of this step, each image flipped and shifted depending on seed and step."""
        images, classes = super().batch(step)
        if self.augment:
            images = moved(images, images.shape[1] // 8, np.random.default_rng([self.seed, step, 2]))
        return self.ready(images), classes

    def evaluate(self) -> Metrics:
        """Loss and share of errors on validation images, and on the same number of training images."""
        count = len(self.valid_y)
        with evaluating(self.model, self.ready(self.train_x[:STATISTICS])):
            valid = scores(self.logits(self.valid_x), self.valid_y)
            train = scores(self.logits(self.train_x[:count]), self.train_y[:count])
        return valid | {name.replace("validation", "training"): value for name, value in train.items()}

    def logits(self, images: Tensor) -> Tensor:
        """Logits of images without augmentation."""
        return torch.cat([self.model(self.ready(part)) for part in images.split(CHUNK)])

    def ready(self, images: Tensor) -> Tensor:
        """Images normalised to mean 0 and deviation 1. Colours stay innermost, which makes convolutions faster."""
        return ((images.float() - self.mean) / self.deviation).permute(0, 3, 1, 2)


def moved(images: Tensor, shift: int, random: np.random.Generator) -> Tensor:
    """The images, every other one mirrored, each shifted by up to ``shift`` pixels along both sides, black behind it.

    >>> row = torch.tensor([1, 2, 3], dtype=torch.uint8).reshape(1, 1, 3, 1)
    >>> moved(row, 0, np.random.default_rng(0)).flatten().tolist()
    [3, 2, 1]
    """
    count, height, width, _ = images.shape
    top, left = (torch.from_numpy(random.integers(0, 2 * shift + 1, (count, 1))) for _ in range(2))
    flip = torch.from_numpy(random.integers(0, 2, (count, 1)))
    rows, columns = top + torch.arange(height), torch.arange(width).expand(count, width)
    columns = left + torch.where(flip == 1, columns.flip(1), columns)
    framed = pad(images, (0, 0, shift, shift, shift, shift))
    return framed[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


@contextmanager
def evaluating(model: nn.Module, images: Tensor) -> Iterator[None]:
    """Evaluation mode, with the BatchNorm statistics of these images at the present weights.

    Statistics from training lag behind, and belong to other weights if a method jumps or is evaluated at a mean.
    """
    update_bn(images.split(CHUNK), model)
    model.eval()
    try:
        yield
    finally:
        model.train()


@dataclass(frozen=True, kw_only=True)
class ResidualTask(Task):
    """Settings of the paper's ResNet-50, with those of Anderson; sizes are our own."""

    metric: ClassVar[str] = "validation_loss"
    metrics: ClassVar[Mapping[str, str]] = {
        "validation_loss": "validation loss",
        "validation_error": "error rate",
        "training_loss": "training loss",
        "training_error": "error rate in training",
    }
    load: ClassVar[Callable[[], Arrays]]
    """All of the data; raises ``MissingData``."""
    quick: ClassVar[Mapping[str, Any]] = {
        "training_images": 2_560, "validation_images": 1_000, "shrink": 2, "batch_size": 64, "epochs": 8,
    }  # fmt: skip

    training_images: int
    """Number of training images, selected by the seed."""
    validation_images: int = 10_000
    shrink: int = 1
    """Side of the squares of pixels that become one."""
    augment: bool = True
    """Whether images are flipped and shifted in training."""
    width: int = 16
    """Channels of the first of three stages; each has twice those of the one before."""
    depth: int = 3
    """Blocks in a stage."""
    batch_size: int = REFERENCE_BATCH
    epochs: int = 90
    steps: int = 0
    """0 for those of the epochs."""
    evaluate_every: int = 0
    """Steps between two evaluations; 0 for nine evaluations in a run."""
    optimizer: str = "nesterov"
    learning_rate: float = 0.1
    """Learning rate of a batch of 128; for other batches it is proportional."""
    history_size: int = 20
    period: int = 5
    store_period: int = 5
    relaxation: float = 0.5
    average_window: int = 4

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):  # before other settings follow from them
            check(name, getattr(self, name), at_least(1))
        steps = self.steps or self.epochs * max(self.training_images // self.batch_size, 1)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "evaluate_every", self.evaluate_every or -(-steps // EVALUATIONS))
        super().__post_init__()
        check("width", self.width, at_least(LEAST_WIDTH))

    def rate_factor(self, step: int) -> float:
        """A slow start, then in proportion to the batch, then a tenth, a hundredth, a thousandth of that."""
        scale = self.batch_size / REFERENCE_BATCH
        if step < SLOW_START * self.steps:
            return min(1.0, scale)
        return scale * 0.1 ** sum(step >= share * self.steps for share in DECAYS)

    def start(self, seed: int) -> Problem:
        """Images of both parts; of the training part those that the seed chooses."""
        train_x, train_y, valid_x, valid_y = type(self).load()
        for name, labels in (("training_images", train_y), ("validation_images", valid_y)):
            if getattr(self, name) > len(labels):
                raise ValueError(f"Invalid {name}: {getattr(self, name)}. There are {len(labels)}.")
        chosen = np.random.default_rng(seed).permutation(len(train_y))[: self.training_images]
        first = slice(self.validation_images)
        train = small(train_x[chosen], self.shrink), torch.as_tensor(train_y[chosen]).long()
        valid = small(valid_x[first], self.shrink), torch.as_tensor(valid_y[first]).long()
        return ResidualClassification(self, train, valid, seed)


def small(images: NDArray[np.uint8], shrink: int) -> Tensor:
    """The images as (image, row, column, colour), squares of ``shrink`` x ``shrink`` pixels made one by their mean."""
    pixels = torch.as_tensor(images.reshape(*images.shape[:3], -1))
    if shrink == 1:
        return pixels
    parts = (avg_pool2d(part.permute(0, 3, 1, 2).float(), shrink).round().byte() for part in pixels.split(CHUNK))
    return torch.cat([part.permute(0, 2, 3, 1) for part in parts])


@dataclass(frozen=True, kw_only=True)
class Cifar10(ResidualTask):
    """50,000 photographs of ten kinds of things to train on, 10,000 to validate."""

    name: ClassVar[str] = "cifar10"
    title: ClassVar[str] = "CIFAR-10, ResNet-20"

    load: ClassVar[Callable[[], Arrays]] = load_cifar10

    training_images: int = 50_000


@dataclass(frozen=True, kw_only=True)
class FashionResNet(ResidualTask):
    """60,000 pictures of clothes to train on, 10,000 to validate."""

    name: ClassVar[str] = "fashion-resnet"
    title: ClassVar[str] = "Fashion-MNIST, ResNet-20"

    load: ClassVar[Callable[[], Arrays]] = load_fashion

    training_images: int = 60_000
