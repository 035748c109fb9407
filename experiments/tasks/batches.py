"""Rows of a batch for training or evaluation: the same for every method, independently of earlier steps."""

import numpy as np
import torch
from torch import Tensor


class Batches:
    """Shuffled epochs of whole batches; the rows of a step depend only on the seed and the step.

    >>> batches = Batches(rows=10, size=4, seed=0)
    >>> [len(batches(step)) for step in range(3)]
    [4, 4, 4]
    >>> bool((batches(1) == Batches(10, 4, 0)(1)).all())
    True
    """

    def __init__(self, rows: int, size: int, seed: int) -> None:
        if not 0 < size <= rows:
            raise ValueError(f"Invalid batch_size: {size}. Allowed: 1 to {rows}, the number of training rows.")
        self.rows, self.size, self.seed = rows, size, seed
        self.per_epoch = rows // size
        self.epoch = -1
        self.order: list[Tensor] = []

    def __call__(self, step: int) -> Tensor:
        """The rows of this step."""
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
            self.epoch, self.order = epoch, list(torch.from_numpy(order[: self.per_epoch * self.size]).split(self.size))
        return self.order[position]
