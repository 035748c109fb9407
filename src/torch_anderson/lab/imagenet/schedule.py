"""The paper's learning rate: a flat warm-up, a peak that grows with the batch, and steps down.

The paper gives 0.05 for 5 epochs, then 0.98 on 384 processes and 1.96 on 1,536, of 64 images each. Four times the batch
has twice the rate: it is 0.05 times the square root of the number of processes, so 0.05 * sqrt(images per step / 64).
"""

import math

from .settings import Settings

REFERENCE_BATCH = 64


def peak_rate(rate: float, global_batch: int) -> float:
    """The learning rate after the warm-up, for a number of images per step over all processes.

    >>> [round(peak_rate(0.05, 64 * processes), 2) for processes in (1, 384, 1536)]
    [0.05, 0.98, 1.96]
    """
    return rate * math.sqrt(global_batch / REFERENCE_BATCH)


def rate_at(settings: Settings, epoch: int, global_batch: int) -> float:
    """The learning rate of an epoch, counted from 0. It depends on nothing else, so checkpoints need not store it."""
    if epoch < settings.warmup_epochs:
        return settings.rate
    passed = sum(epoch >= milestone for milestone in settings.milestones)
    return peak_rate(settings.rate, global_batch) * 0.1**passed
