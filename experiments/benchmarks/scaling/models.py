"""Models as lists of the shapes of their parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from experiments.resnet import resnet50

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """A model, and the work of a rank in one training step."""

    title: str
    count: int
    """Published number of parameters."""
    make: Callable[[], Shapes]
    flops: float
    """Flops of a training step on one rank."""
    batch: str
    """Batch of such a step, in words."""

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes of all parameters; their total has to be the published one."""
        shapes = self.make()
        found = sum(map(prod, shapes))
        assert found == self.count, f"{self.title} has {self.count} parameters, not {found}"
        return shapes


def residual_network() -> Shapes:
    """ResNet-50."""
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in resnet50().parameters()]


def transformer(layers: int, width: int, inner: int, keys: int, vocabulary: int = 32_000) -> Shapes:
    """A decoder like Llama 2: gated layers, keys and values of ``keys`` numbers, no biases.

    >>> sum(map(prod, transformer(layers=1, width=4, inner=8, keys=2, vocabulary=10)))
    236
    """
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    layer = [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(vocabulary, width), *(layer * layers), (width,), (vocabulary, width)]


IMAGE_FLOPS = 3 * 2 * 4.1e9
"""Flops of one image of 224 pixels: 4.1e9 multiplications and additions forward, twice as many backward."""
IMAGES, TOKENS = 64, 8192
"""Images and tokens per rank and step: as in the paper; a guess."""


def transformer_model(title: str, count: int, **sizes: int) -> Model:
    """A transformer; about 6 flops per parameter and token, forward and backward."""
    return Model(title, count, lambda: transformer(**sizes), 6.0 * count * TOKENS, f"{TOKENS:,} tokens")


MODELS = {
    "resnet50": Model("ResNet-50", 25_557_032, residual_network, IMAGES * IMAGE_FLOPS, f"{IMAGES} images"),
    "7B": transformer_model("transformer, 7B", 6_738_415_616, layers=32, width=4096, inner=11_008, keys=4096),
    "70B": transformer_model("transformer, 70B", 68_976_648_192, layers=80, width=8192, inner=28_672, keys=1024),
}
