"""Checkpoints of a run on many processes, by torch.distributed.checkpoint.

A checkpoint is written into a folder `step-<number>.part`, which loses its suffix when all processes are done: if
one is killed before, the previous checkpoint is unchanged. Older ones are then removed.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from .parallel import share_buffers

PART = ".part"


class Checkpoints:
    """The checkpoints of one run: the model, the optimizer with its history, and where the run stands.

    ``common`` contains numbers that are equal on all processes, ``own`` numbers that differ between them. The random
    state of each process is saved as well.
    """

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer

    def save(self, step: int, common: dict[str, Any], own: dict[str, float]) -> None:
        """Write the checkpoint of a step, counted from the beginning of the run."""
        share_buffers(self.model)  # only one process's copy is saved
        final = self.folder / f"step-{step:09d}"
        part = final.with_suffix(PART)
        if final.exists():
            return
        save(self.state(common, own), checkpoint_id=part)
        if dist.get_rank() == 0:
            part.rename(final)
            remove(path for path in self.folder.glob("step-*") if path != final)

    def load(self, common: dict[str, Any], own: dict[str, float]) -> bool:
        """Load the latest checkpoint, also into these dictionaries; False if there is none."""
        path = self.latest()
        if path is None:
            return False
        state = self.state(common, own)
        known = FileSystemReader(path).read_metadata().state_dict_metadata
        if f"own.{dist.get_rank()}.random" not in known:  # there were fewer processes
            del state["own"]
        load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        common.update(state["common"])
        for mine in state.get("own", {}).values():
            restore_random_state(mine.pop("random"))
            own.update(mine)
        return True

    def latest(self) -> Path | None:
        """The newest checkpoint that is complete, as rank 0 sees it."""
        found: list[Path | None] = [None]
        if dist.get_rank() == 0 and self.folder.is_dir():
            remove(self.folder.glob(f"*{PART}"))
            found = [max(self.folder.glob("step-*"), default=None)]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def state(self, common: dict[str, Any], own: dict[str, float]) -> dict[str, Any]:
        """All that a checkpoint holds."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        mine = {str(dist.get_rank()): {"random": random_state(), **own}}
        return {"model": model, "optimizer": optimizer, "common": common, "own": mine}


def remove(folders: Iterable[Path]) -> None:
    """Remove these folders."""
    for folder in list(folders):
        shutil.rmtree(folder)


def random_state() -> torch.Tensor:
    """State of the random generators on the CPU, and on the GPU if there is one."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    return torch.cat(states)


def restore_random_state(state: torch.Tensor) -> None:
    """Go on with the random numbers that ``random_state`` found."""
    length = len(torch.get_rng_state())
    torch.set_rng_state(state[:length])
    if torch.cuda.is_available() and len(state) > length:
        torch.cuda.set_rng_state(state[length:])
