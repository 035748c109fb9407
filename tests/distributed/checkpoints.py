"""Distributed checkpoints of a training, and what of ours is in them."""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from layouts import Training, full
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def entries(training: Training) -> dict[str, Tensor]:
    """Our entries in the optimizer's state, in full."""
    return {
        f"{parameter}.{name}": full(value)
        for parameter, p in training.net.named_parameters()
        for name, value in sorted(training.optimizer.state[p].items())
        if name.startswith("anderson_")
    }


NESTED, FLATTENED = StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)


def state(training: Training, options: StateDictOptions = NESTED) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(training.model),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer, options=options),
    }


def save(training: Training, folder: Path, options: StateDictOptions = NESTED) -> None:
    dcp.save(state(training, options), checkpoint_id=folder)


def load(training: Training, folder: Path, options: StateDictOptions = NESTED) -> None:
    found = state(training, options)
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(training.model, found["model"])
    set_optimizer_state_dict(training.model, training.optimizer, found["optimizer"], options=options)
