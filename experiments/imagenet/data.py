"""Images in folders, one for each class: reading, augmentation, and the images of each process at each step.

Augmentation and order depend on the seed, the epoch and the image alone, so that a run can resume anywhere. Files that
cannot be read are skipped and counted.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..data import MissingData
from .records import BadSettings

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"}
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""Exceptions of Pillow for damaged files."""
NO_LABEL = PADDING = -1
"""Label and index of padding in a batch."""
AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Range of a random crop's share of the area and of its width over height, and attempts to find one that fits."""
CENTRE = 224 / 256
"""The share of the shorter side that validation sees."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of the colours of ImageNet, on a scale from 0 to 1."""
Box = tuple[float, float, float, float]
"""Left, upper, right, lower."""
logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """Which image, and in which epoch."""

    epoch: int
    image: int


class Item(NamedTuple):
    """An image as bytes (3, size, size), its class, and how many files were skipped to get it."""

    image: Tensor
    label: int
    skipped: int


class Images(Dataset[Item]):
    """The images below ``root/part``; classes are its folders in alphabetical order."""

    def __init__(self, root: Path, part: str, size: int, seed: int, *, augment: bool) -> None:
        self.size, self.seed, self.augment = size, seed, augment
        self.classes, self.files = scan(root, part)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: Key) -> Item:
        """The image of a key. In place of a damaged one training gets the next good one, validation an empty one."""
        if key.image == PADDING:
            return self.empty(skipped=0)
        for skipped in range(len(self.files) if self.augment else 1):
            path, label = self.files[(key.image + skipped) % len(self.files)]
            try:
                return Item(self.seen(read(path), key), label, skipped)
            except UNREADABLE as error:
                logger.warning("stepped over %s, which cannot be read: %s", path, error)
        if self.augment:
            raise MissingData("None of the images can be read.")
        return self.empty(skipped=1)

    def seen(self, image: Image.Image, key: Key) -> Tensor:
        """The crop of an image that the network gets: random and mirrored in half of the cases, or the centre."""
        random = np.random.default_rng([self.seed, *key])
        box = random_box(*image.size, random) if self.augment else centre_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        if self.augment and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def empty(self, skipped: int) -> Item:
        """An item that counts for nothing."""
        return Item(torch.zeros(3, self.size, self.size, dtype=torch.uint8), NO_LABEL, skipped)


def scan(root: Path, part: str) -> tuple[list[str], list[tuple[Path, int]]]:
    """The names of the classes, and (file, class) of all images, in an order that every machine agrees on."""
    folder = root / part
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not files:
        layout = f"folders {root}/train/<class>/ and {root}/val/<class>/ with images ({', '.join(sorted(SUFFIXES))})"
        raise MissingData(f"No images in {folder}. Expected are {layout}.")
    return classes, files


def read(path: Path) -> Image.Image:
    """An image in RGB: decoded by torchvision where it can, which is faster, else by Pillow."""
    decode = torchvision_decoder()
    if decode is not None:
        try:
            return Image.fromarray(decode(str(path)).permute(1, 2, 0).numpy())
        except RuntimeError:  # a damaged file, or a format that only Pillow reads: let Pillow decide
            pass
    with Image.open(path) as image:
        return image.convert("RGB")


@cache
def torchvision_decoder() -> Callable[[str], Any] | None:
    """The function of torchvision, if it imports: a build for another torch raises RuntimeError."""
    try:
        from torchvision.io import ImageReadMode, decode_image
    except (ImportError, RuntimeError):
        return None
    return lambda path: decode_image(path, mode=ImageReadMode.RGB)


def random_box(width: int, height: int, random: np.random.Generator) -> Box:
    """A part of random area and shape, its logarithm uniform, that fits; the middle if none does in a few tries."""
    for _ in range(TRIES):
        area = width * height * random.uniform(*AREA)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, upper = int(random.integers(width - wide + 1)), int(random.integers(height - high + 1))
            return left, upper, left + wide, upper + high
    return centre_box(width, height, share=1.0)


def centre_box(width: int, height: int, share: float = CENTRE) -> Box:
    """The square in the middle whose side is this share of the shorter side.

    >>> centre_box(100, 60, share=0.5)
    (35.0, 15.0, 65.0, 45.0)
    """
    side = share * min(width, height)
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def normalised(images: Tensor) -> Tensor:
    """Bytes (batch, 3, height, width) as numbers of mean about 0 and deviation about 1."""
    mean, deviation = (torch.tensor(x, device=images.device).view(3, 1, 1) for x in (MEAN, DEVIATION))
    return (images.float() / 255 - mean) / deviation


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


def loader(images: Images, batches: Sampler[list[Key]], workers: int) -> DataLoader[Any]:
    """Batches of images, classes and numbers of skipped files, read by persistent worker processes."""
    return DataLoader(
        images,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # the default one would change the random state of training
    )
