"""Images in folders, one for each class; those that cannot be read are stepped over and counted."""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from ..data import MissingData
from .augmentation import centre_box, random_view, view

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"}
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""Exceptions of Pillow for damaged files."""
NO_LABEL = -1
"""Label of padding in a batch."""
PADDING = -1
LAYOUT = "Expected are folders {root}/train/<class>/ and {root}/val/<class>/ with images ({suffixes})."
logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """Which image, and how: its augmentation depends on these and the seed alone."""

    epoch: int
    image: int


class Item(NamedTuple):
    """An image as bytes (3, size, size), its class, and how many files were stepped over to get it."""

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
        """The crop of an image that the network gets."""
        if self.augment:
            image = random_view(image, self.size, np.random.default_rng([self.seed, *key]))
        else:
            image = view(image, centre_box(*image.size), self.size)
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
        layout = LAYOUT.format(root=root, suffixes=", ".join(sorted(SUFFIXES)))
        raise MissingData(f"No images in {folder}. {layout}")
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
