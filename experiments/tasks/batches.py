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

    def __call__(self, step: int, factor: int = 1) -> Tensor:
        """The rows of this step; with a ``factor`` above 1, fresh ones for ``factor`` batches, or all rows.

        >>> len(Batches(rows=10, size=4, seed=0)(step=0, factor=2))
        8
        """
        return self._of_epoch(*divmod(step, self.per_epoch)) if factor == 1 else self._fresh(step, factor)

    def _of_epoch(self, epoch: int, position: int) -> Tensor:
        if epoch != self.epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
            self.epoch, self.order = epoch, list(torch.from_numpy(order[: self.per_epoch * self.size]).split(self.size))
        return self.order[position]

    def _fresh(self, step: int, factor: int) -> Tensor:
        random = np.random.default_rng([self.seed, step, 1])  # the 1 tells it from an epoch's
        count = min(factor * self.size, self.rows)
        return torch.from_numpy(random.choice(self.rows, count, replace=False, shuffle=False))
