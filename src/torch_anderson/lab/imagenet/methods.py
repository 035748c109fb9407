"""The optimizers that are compared: Nesterov, and Anderson around it with the paper's options."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from torch_anderson import Anderson, Storage

from .settings import BadSettings, Settings

NEVER = 2**62
"""A warm-up that does not end: what is left of Anderson is its average."""


def make_optimizer(settings: Settings, parameters: Iterable[Tensor]) -> Optimizer:
    """The base, or Anderson around it; options that they do not like are bad settings."""
    rate, momentum, decay = settings.rate, settings.momentum, settings.weight_decay
    try:
        base = SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay, nesterov=True)
        return base if settings.method == "base" else Anderson(base, **anderson_options(settings))
    except ValueError as error:
        raise BadSettings(str(error)) from error


def anderson_options(settings: Settings) -> dict[str, Any]:
    """Of the method: with acceleration, with average, or with both."""
    average = settings.average_window if "average" in settings.method else 0
    options = {"average_window": average, **storage_options(settings)}
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


def storage_options(settings: Settings) -> dict[str, Any]:
    """Where the history is kept; nothing where nothing is said."""
    if not (settings.storage_shard or settings.storage_device or settings.storage_dtype):
        return {}
    dtype = getattr(torch, settings.storage_dtype) if settings.storage_dtype else None
    return {"storage": Storage(device=settings.storage_device, dtype=dtype, shard=settings.storage_shard)}
