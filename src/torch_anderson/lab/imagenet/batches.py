"""The images of each process at each step. Their order depends only on the seed and the epoch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from .images import PADDING, Images, Key
from .settings import BadSettings, Settings


@dataclass
class Order(Sampler[list[Key]]):
    """The batches of one process, a list of keys per step.

    An epoch is one permutation of all images, the same for all processes, cut into steps, and these into the shares of
    the processes. Images that do not fill the last step are left out. An epoch can start after any number of images.
    """

    images: int
    batch_size: int
    rank: int
    world: int
    seed: int
    limit: int | None = None
    epoch: int = 0
    first: int = 0
    """Images of the epoch that all processes together have seen before."""

    def __post_init__(self) -> None:
        if len(range(self.first, self.end, self.step)) == 0:
            raise BadSettings(
                f"Invalid batch_size: {self.batch_size}. With {self.world} processes a step needs {self.step} images, "
                f"and there are {self.images}."
            )

    @property
    def step(self) -> int:
        """Images per step, over all processes."""
        return self.batch_size * self.world

    @property
    def end(self) -> int:
        """Images that an epoch uses."""
        steps = self.images // self.step
        return self.step * (steps if self.limit is None else min(steps, self.limit))

    def steps(self, images: int) -> tuple[int, int]:
        """Steps of the images made so far, and of the whole epoch."""
        return images // self.step, self.end // self.step

    def __len__(self) -> int:
        return len(range(self.first, self.end, self.step))

    def __iter__(self) -> Iterator[list[Key]]:
        permutation = np.random.default_rng([self.seed, self.epoch]).permutation(self.images)
        for start in range(self.first + self.rank * self.batch_size, self.end, self.step):
            yield [Key(self.epoch, int(index)) for index in permutation[start : start + self.batch_size]]


@dataclass
class Share(Sampler[list[Key]]):
    """The validation images of one process, in order; padded, so that all processes have the same number of batches."""

    images: int
    batch_size: int
    rank: int
    world: int
    limit: int | None = None

    def __len__(self) -> int:
        batches = -(-self.images // (self.batch_size * self.world))
        return batches if self.limit is None else min(batches, self.limit)

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in range(len(self)):
            start = (batch * self.world + self.rank) * self.batch_size
            indices = range(start, start + self.batch_size)
            yield [Key(0, index if index < self.images else PADDING) for index in indices]


def loader(images: Images, batches: Sampler[list[Key]], settings: Settings) -> DataLoader[Any]:
    """Batches of images, classes and numbers of skipped files, read by persistent worker processes."""
    return DataLoader(
        images,
        batch_sampler=batches,
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # the default one would change the random state of training
    )
