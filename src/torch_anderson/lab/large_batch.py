"""The paper's large-batch experiment in small: a growing batch, its learning rate in proportion, the same epochs."""

from collections.abc import Sequence

from .studies import Part, Study

METHODS = ("base", "average", "anderson", "anderson+average", "matched-anderson+average")
SMALL = {
    "training_images": 2048, "validation_images": 4000, "shrink": 2, "width": 16, "depth": 1, "epochs": 40,
    "learning_rate": 0.1,
}  # fmt: skip
"""A ResNet of 8 layers on photographs of 16 x 16 pixels: half a minute a run on one core."""
PARTS = (
    Part(METHODS, SMALL | {"augment": False}, {"batch_size": (32, 128, 512)}, "cifar10"),
    Part(METHODS, SMALL | {"augment": True}, {"batch_size": (32, 512)}, "cifar10"),
)
"""Without augmentation all batches can learn the training images by heart: what then differs is generalisation. With
it, as in the paper, none does, and a large batch with its few steps lags behind on both kinds of images."""


def study(seeds: Sequence[int]) -> Study:
    """All runs on these seeds."""
    return Study("A growing batch, its learning rate in proportion, with and without Anderson.", PARTS, seeds)
