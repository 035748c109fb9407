"""How a parameter's numbers are placed on the ranks, and which of them this rank keeps.

``Whole``    a plain tensor: every rank has all of it (single process, DDP)
``Sharded``  a DTensor: every rank has its local shard (FSDP2, HSDP, tensor parallel)
``Sliced``   a plain tensor whose history is divided: every rank keeps some rows (DDP with a sharded history)
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ranks import Ranks, all_gather, slicing_mesh

ALIGNMENT = 16
"""Bytes at whose multiples the parts of a packed message begin, so that any type can be read there."""


class Placement(ABC):
    """Which part of a parameter, and of everything that has its shape, this rank keeps."""

    key: Hashable
    """Equal for parameters that are placed alike, on every rank."""
    copies: int
    """Number of ranks that keep the same numbers."""
    copy: int | None
    """Index of this rank among them; None where that is not known."""
    sharded: bool
    """Whether ranks keep different numbers."""

    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor placed like the parameter, sharing memory, without a graph."""

    @abstractmethod
    def entry(self, rows: Tensor, ahead: int) -> Tensor:
        """Wrap rows of local parts, with ``ahead`` dimensions before the parameter's, for a checkpoint."""

    @abstractmethod
    def local_rows(self, entry: Tensor, ahead: int) -> Tensor:
        """Undo ``entry``, however the entry is placed on the ranks."""


class Whole(Placement):
    """Every rank has all of the parameter."""

    sharded = False
    key = "whole"

    def __init__(self, ranks: Ranks):
        self.copies, self.copy = ranks.size, ranks.index

    def local(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor.detach()

    def entry(self, rows: Tensor, ahead: int) -> Tensor:
        """Return the rows; contiguous on several ranks, since torch broadcasts other entries wrongly."""
        return rows.contiguous() if self.copies > 1 else rows

    def local_rows(self, entry: Tensor, ahead: int) -> Tensor:
        """Return all of the entry."""
        return entry.full_tensor() if is_dtensor(entry) else entry  # type: ignore[attr-defined]


class OnMesh(Placement):
    """What ranks keep is a DTensor on a mesh."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size

    def entry(self, rows: Tensor, ahead: int) -> Tensor:
        """Return a DTensor that shares the rows' memory."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        shape = torch.Size((*rows.shape[:ahead], *self.shape))
        stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        # Built on an empty stand-in: rows in the middle of a buffer would give the DTensor an offset, for which
        # asynchronous checkpoints look for memory that a DTensor does not have. `from_local` would claim that all is
        # on the mesh's device, and would move there what is kept on the host.
        meta = TensorMeta(shape, stride, rows.dtype)
        spec = DTensorSpec(self.mesh, self._shifted(ahead), tensor_meta=meta)
        entry = DTensor(rows.new_empty(()).expand(rows.shape), spec, requires_grad=False)
        entry._local_tensor = rows
        return entry

    def local_rows(self, entry: Tensor, ahead: int) -> Tensor:
        """Return the local shard; communicates only if the entry is placed otherwise."""
        from torch.distributed.tensor import distribute_tensor

        placements = self._shifted(ahead)
        if is_dtensor(entry):
            if entry.device_mesh == self.mesh and entry.placements == placements:  # type: ignore[attr-defined]
                return entry.to_local()  # type: ignore[attr-defined]
            entry = entry.full_tensor()  # type: ignore[attr-defined]
        if ahead:  # a whole entry may be on the host: one row at a time fits on the device
            return torch.stack([self.local_rows(row, ahead - 1) for row in entry])
        entry = entry.to(self.mesh.device_type)
        return distribute_tensor(entry, self.mesh, placements, src_data_rank=None).to_local()

    def _shifted(self, by: int) -> tuple[Any, ...]:
        """Placements for a tensor with ``by`` dimensions before the parameter's."""
        return tuple(placement if placement.is_replicate() else _moved(placement, by) for placement in self.placements)


class Sharded(OnMesh):
    """Every rank has the local shard of a DTensor."""

    def __init__(self, param: Any, ranks: Ranks):
        self.mesh, self.placements, self.shape = param.device_mesh, tuple(param.placements), _real_shape(param)
        if any(placement.is_partial() for placement in self.placements):
            raise ValueError(
                f"Invalid parameter of placements {self.placements}: partial sums. Allowed: replicated or sharded."
            )
        split = [i for i, placement in enumerate(self.placements) if not placement.is_replicate()]
        parts = prod(self.mesh.size(i) for i in split)
        names = self.mesh.mesh_dim_names or range(self.mesh.ndim)
        everywhere = self.mesh.size() == ranks.size
        # Which copy belongs to whom depends on the order of ranks; on a part of them, copies do not share work.
        order = tuple(self.mesh.mesh.flatten().tolist()) if everywhere else ()
        self.key = ("shards", self.mesh.ndim, *((names[i], self.mesh.size(i)) for i in split), order)
        self.copies = ranks.size // parts
        self.copy = self._copy() if everywhere else None
        self.sharded = parts > 1

    def _copy(self) -> int:
        """Index among the ranks that differ from this one in replicated dimensions of the mesh only."""
        place = 0
        for i, placement in enumerate(self.placements):
            if placement.is_replicate():
                place = place * self.mesh.size(i) + self.mesh.get_local_rank(i)
        return place

    def local(self, tensor: Tensor) -> Tensor:
        """Return the local shard."""
        return local_part(tensor)


class Sliced(OnMesh):
    """Every rank has all of the parameter, and keeps the history of some rows (of the first dimension)."""

    sharded = True
    key = "slices"

    def __init__(self, param: Tensor, ranks: Ranks):
        from torch.distributed.tensor import Replicate, Shard

        self.mesh, self.shape = slicing_mesh(ranks.group, ranks.size, param.device.type), _real_shape(param)
        self.placements = (*[Replicate()] * (self.mesh.ndim - 1), Shard(0))
        self.group = self.mesh.get_group(self.mesh.ndim - 1)
        self.sharers = self.mesh.size(self.mesh.ndim - 1)
        self.copies = ranks.size // self.sharers
        self.copy = self.mesh.get_local_rank(0) if self.mesh.ndim > 1 else 0
        self.rows = ceil(len(param) / self.sharers)
        self._start = min(self.rows * self.mesh.get_local_rank(self.mesh.ndim - 1), len(param))

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows."""
        return tensor.detach()[self._start : self._start + self.rows]

    @property
    def most_numbers(self) -> int:
        """Numbers on the first rank, which never has fewer than another."""
        return self.rows * prod(self.shape[1:])


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is distributed over ranks; the module that defines the class need not be loaded for it."""
    return hasattr(tensor, "_local_tensor")


def local_part(tensor: Any) -> Tensor:
    """This rank's part of any tensor, sharing memory, without a graph; for operations that DTensors do not know."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor.detach()  # type: ignore[no-any-return]


def placement_of(param: Tensor, ranks: Ranks, shard: bool) -> Placement:
    """How a parameter is placed; ``shard``: divide the history of what is whole on every rank."""
    if is_dtensor(param):
        return Sharded(param, ranks)
    # Rows can be sliced where they are consecutive in memory.
    rows = param.dim() > 0 and param.stride(0) * len(param) == param.numel()
    return Sliced(param, ranks) if shard and rows and ranks.size > 1 else Whole(ranks)


def _moved(placement: Any, by: int) -> Any:
    if hasattr(placement, "split_factor"):  # FSDP on top of tensor parallel
        return type(placement)(placement.dim + by, split_factor=placement.split_factor)
    return type(placement)(placement.dim + by)


def _real_shape(param: Tensor) -> torch.Size:
    return torch.Size((*param.shape, 2)) if param.is_complex() else param.shape


class Parcel(NamedTuple):
    """What this rank has of a parameter that every rank is to have."""

    placement: Sliced
    target: Tensor
    """All numbers of the parameter, as one vector in memory order."""
    values: Tensor
    """This rank's rows."""
    wanted: bool
    """Whether the parameter is to be set here, or only other ranks need our rows."""

    @property
    def bytes(self) -> int:
        """Length of each rank's part of the message."""
        return ceil(self.placement.most_numbers * self.target.element_size() / ALIGNMENT) * ALIGNMENT


def exchange(parcels: Sequence[Parcel]) -> None:
    """Give each rank the rows of all others, in one packed all-gather."""
    first, sizes = parcels[0], [parcel.bytes for parcel in parcels]
    message = torch.zeros(sum(sizes), dtype=torch.uint8, device=first.target.device)
    for parcel, packed in zip(parcels, message.split(sizes), strict=True):
        packed.view(parcel.target.dtype)[: parcel.values.numel()].copy_(parcel.values)
    found = all_gather(message, first.placement.sharers, first.placement.group)
    for parcel, packed in zip(parcels, found.split(sizes, dim=1), strict=True):
        if parcel.wanted:
            _unpack(parcel.target, packed.view(parcel.target.dtype)[:, : parcel.placement.most_numbers])


def _unpack(target: Tensor, rows: Tensor) -> None:
    """Copy the ranks' rows one after the other; the last ranks may have fewer, or none."""
    full, rest = divmod(target.numel(), rows.shape[1])
    target[: full * rows.shape[1]].view(full, rows.shape[1]).copy_(rows[:full])
    if rest:
        target[full * rows.shape[1] :].copy_(rows[full, :rest])
