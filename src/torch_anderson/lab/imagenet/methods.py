"""The optimizers that are compared: Nesterov, and Anderson around it with the paper's options."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from torch_anderson import Anderson, MovingAverage, Storage

from .settings import BadSettings, Settings

NEVER = 2**62
"""A warm-up that does not end, so that only the average takes effect."""


def make_optimizer(settings: Settings, parameters: Iterable[Tensor]) -> Optimizer:
    """The base, or Anderson around it; raises ``BadSettings`` for options that they refuse."""
    rate, momentum, decay = settings.rate, settings.momentum, settings.weight_decay
    try:
        base = SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay, nesterov=True)
        return base if settings.method == "base" else Anderson(base, **anderson_options(settings))
    except ValueError as error:
        raise BadSettings(str(error)) from error


def anderson_options(settings: Settings) -> dict[str, Any]:
    """The options of a method with acceleration, with the average, or with both."""
    options = {"residual": "step", "average": average(settings), **storage_options(settings)}
    if settings.method == "average":
        return {"warmup": NEVER, "history_size": 1, "safeguard": None, **options}
    return {
        "history_size": settings.history_size,
        "period": settings.period,
        "store_period": settings.store_period,
        "relaxation": settings.relaxation,
        "safeguard": None if settings.safeguard == "none" else settings.safeguard,
        **options,
    }


def average(settings: Settings) -> MovingAverage | None:
    """The moving average of the methods that have one; None for a window of 0."""
    averages = "average" in settings.method and settings.average_window > 0
    return MovingAverage(settings.average_window) if averages else None


def storage_options(settings: Settings) -> dict[str, Any]:
    """The option ``storage``, where a setting asks for it."""
    if not (settings.storage_shard or settings.storage_device or settings.storage_dtype):
        return {}
    dtype = getattr(torch, settings.storage_dtype) if settings.storage_dtype else None
    return {"storage": Storage(device=settings.storage_device, dtype=dtype, shard=settings.storage_shard)}
