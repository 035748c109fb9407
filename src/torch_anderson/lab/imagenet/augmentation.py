"""Crops of an image: a random one, possibly mirrored, for training; the centre for validation."""

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

AREA = 0.08, 1.0
"""Least and largest share of the image's area that a random part has."""
RATIO = 3 / 4, 4 / 3
"""Least and largest width over height of it."""
TRIES = 10
CENTRE = 224 / 256
"""The share of the shorter side that validation sees."""
MEAN = 0.485, 0.456, 0.406
DEVIATION = 0.229, 0.224, 0.225
"""Mean and deviation of the colours of ImageNet, from 0 to 1."""

Box = tuple[float, float, float, float]
"""Left, upper, right, lower."""


def random_view(image: Image.Image, size: int, random: np.random.Generator) -> Image.Image:
    """A random part of the image at the size that is wanted, mirrored in half of the cases."""
    part = view(image, random_box(*image.size, random), size)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else part


def view(image: Image.Image, box: Box, size: int) -> Image.Image:
    """A part of the image at the size that is wanted."""
    return image.resize((size, size), Image.Resampling.BILINEAR, box)


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
