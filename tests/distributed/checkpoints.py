"""Distributed checkpoints of a training, and what of ours is in them."""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from layouts import Training, full
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def entries(training: Training) -> dict[str, Tensor]:
    """All of ours in the optimizer's state, in full."""
    training.optimizer.state_dict()  # brings them up to date
    return {
        f"{parameter}.{name}": full(value)
        for parameter, p in training.net.named_parameters()
        for name, value in sorted(training.optimizer.state[p].items())
        if name.startswith("anderson_")
    }


def state(training: Training) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(training.model),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer),
    }


def save(training: Training, folder: Path) -> None:
    dcp.save(state(training), checkpoint_id=folder)


def load(training: Training, folder: Path) -> None:
    found = state(training)
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(training.model, found["model"])
    set_optimizer_state_dict(training.model, training.optimizer, found["optimizer"])
