"""Giving all ranks what each of them has of a parameter, in one message."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from .distributed import all_gather
from .shards import Sliced

ALIGNMENT = 16
"""Bytes at whose multiples the parts of a packed message begin, so that any type can be read there."""


class Parcel(NamedTuple):
    """What this rank has of a parameter that all shall have."""

    part: Sliced
    target: Tensor
    """All numbers of the parameter, as one vector in the order of memory."""
    values: Tensor
    """Of this rank's rows."""
    wanted: bool
    """Whether the parameter is set, or only other ranks need our rows."""

    @property
    def room(self) -> int:
        """Numbers that the message has for each rank's rows."""
        return self.part.fullest()

    @property
    def bytes(self) -> int:
        """The same in bytes."""
        return ceil(self.room * self.target.element_size() / ALIGNMENT) * ALIGNMENT


def exchange(parcels: Sequence[Parcel]) -> None:
    """Give each rank the rows of all others, in one packed all-gather."""
    first, sizes = parcels[0], [piece.bytes for piece in parcels]
    message = torch.zeros(sum(sizes), dtype=torch.uint8, device=first.target.device)
    for piece, packed in zip(parcels, message.split(sizes), strict=True):
        packed.view(piece.target.dtype)[: piece.values.numel()].copy_(piece.values)
    found = all_gather(message, first.part.sharers, first.part.group)
    for piece, packed in zip(parcels, found.split(sizes, dim=1), strict=True):
        if piece.wanted:
            _unpack(piece.target, packed.view(piece.target.dtype)[:, : piece.room])


def _unpack(target: Tensor, rows: Tensor) -> None:
    """Copy the ranks' rows one after the other; the last ranks may have fewer, or none."""
    full, rest = divmod(target.numel(), rows.shape[1])
    target[: full * rows.shape[1]].view(full, rows.shape[1]).copy_(rows[:full])
    if rest:
        target[full * rows.shape[1] :].copy_(rows[full, :rest])
