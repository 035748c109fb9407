"""How a parameter's numbers lie on the ranks, and which of them this rank keeps.

``Whole``    a plain tensor: each rank has all of it (a single process, DDP)
``Sharded``  a DTensor: each rank has its local shard (FSDP2, HSDP, tensor parallel)
``Sliced``   a plain tensor of whose history each rank keeps some rows (DDP with a sharded history)
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from .distributed import Ranks, slicing_mesh


class Part(ABC):
    """The part of a parameter, and of all that has its shape, that this rank keeps."""

    key: Hashable
    """The same for parameters that lie alike, on every rank."""
    copies: int
    """How many ranks keep the same numbers."""
    copy: int | None
    """Which of them this one is; None where that is not known."""
    sharded: bool
    """Whether ranks keep different numbers."""

    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor that lies as the parameter does, sharing memory, without a graph."""

    @abstractmethod
    def entry(self, rows: Tensor, ahead: int) -> Tensor:
        """Rows of local parts, with ``ahead`` dimensions before the parameter's, as checkpoints want them."""

    @abstractmethod
    def local_rows(self, entry: Tensor, ahead: int) -> Tensor:
        """The inverse of ``entry``, whatever way the entry lies on the ranks."""

    @abstractmethod
    def fullest(self) -> int:
        """Numbers on the rank that has most of them."""


class Whole(Part):
    """All of it."""

    sharded = False

    def __init__(self, param: Tensor, ranks: Ranks):
        self.copies, self.copy = ranks.size, ranks.index
        self.key = "whole"
        self._numbers = real_numbers(param)

    def local(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor.detach()

    def entry(self, rows: Tensor, ahead: int) -> Tensor:
        """The rows themselves."""
        return rows

    def local_rows(self, entry: Tensor, ahead: int) -> Tensor:
        """All of the entry."""
        return entry.full_tensor() if is_dtensor(entry) else entry  # type: ignore[attr-defined]

    def fullest(self) -> int:
        """All numbers."""
        return self._numbers


class OnMesh(Part):
    """What ranks keep as a DTensor on a mesh."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size

    def entry(self, rows: Tensor, ahead: int) -> Tensor:
        """A DTensor that shares the rows' memory."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        shape = torch.Size((*rows.shape[:ahead], *self.shape))
        stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        # Made of an empty stand-in: rows in the middle of a buffer would give the DTensor an offset, for which
        # asynchronous checkpoints look for memory that a DTensor has not. Not by `from_local`, which says that all is
        # on the mesh's device, and would move there what is kept on the host.
        meta = TensorMeta(shape, stride, rows.dtype)
        spec = DTensorSpec(self.mesh, self._shifted(ahead), tensor_meta=meta)
        entry = DTensor(rows.new_empty(()).expand(rows.shape), spec, requires_grad=False)
        entry._local_tensor = rows
        return entry

    def local_rows(self, entry: Tensor, ahead: int) -> Tensor:
        """The local shard; communicates only if the entry lies otherwise."""
        from torch.distributed.tensor import distribute_tensor

        placements = self._shifted(ahead)
        if is_dtensor(entry):
            if entry.device_mesh == self.mesh and entry.placements == placements:  # type: ignore[attr-defined]
                return entry.to_local()  # type: ignore[attr-defined]
            entry = entry.full_tensor()  # type: ignore[attr-defined]
        if ahead:  # what came whole may be on the host: one row at a time fits on the device
            return torch.stack([self.local_rows(row, ahead - 1) for row in entry])
        entry = entry.to(self.mesh.device_type)
        return distribute_tensor(entry, self.mesh, placements, src_data_rank=None).to_local()

    def _shifted(self, by: int) -> tuple[Any, ...]:
        """The placements, where ``by`` dimensions come before the parameter's."""
        return tuple(placement if placement.is_replicate() else _moved(placement, by) for placement in self.placements)


class Sharded(OnMesh):
    """The local shard of a DTensor."""

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
        # Which copy is whose depends on the order of ranks; on a part of them, no work is shared among copies.
        order = tuple(self.mesh.mesh.flatten().tolist()) if everywhere else ()
        self.key = ("shards", self.mesh.ndim, *((names[i], self.mesh.size(i)) for i in split), order)
        self.copies = ranks.size // parts
        self.copy = self._copy() if everywhere else None
        self.sharded = parts > 1

    def _copy(self) -> int:
        """The place among the ranks that differ from this one in replicated dimensions of the mesh only."""
        place = 0
        for i, placement in enumerate(self.placements):
            if placement.is_replicate():
                place = place * self.mesh.size(i) + self.mesh.get_local_rank(i)
        return place

    def local(self, tensor: Tensor) -> Tensor:
        """The local shard."""
        return tensor.detach().to_local()  # type: ignore[attr-defined]

    def fullest(self) -> int:
        """The first shards are never smaller than others."""
        lengths = list(self.shape)
        for i, placement in enumerate(self.placements):
            if not placement.is_replicate():
                lengths[placement.dim] = ceil(lengths[placement.dim] / self.mesh.size(i))
        return prod(lengths)


class Sliced(OnMesh):
    """Some rows (of the first dimension) of a tensor that is whole on every rank."""

    sharded = True

    def __init__(self, param: Tensor, ranks: Ranks):
        from torch.distributed.tensor import Replicate, Shard

        self.mesh, self.shape = slicing_mesh(ranks.group, ranks.size, param.device.type), _real_shape(param)
        self.placements = (*[Replicate()] * (self.mesh.ndim - 1), Shard(0))
        self.group = self.mesh.get_group(self.mesh.ndim - 1)
        self.key = "slices"
        self.sharers = self.mesh.size(self.mesh.ndim - 1)
        self.copies = ranks.size // self.sharers
        self.copy = self.mesh.get_local_rank(0) if self.mesh.ndim > 1 else 0
        self.rows = ceil(len(param) / self.sharers)
        self._start = min(self.rows * self.mesh.get_local_rank(self.mesh.ndim - 1), len(param))

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's rows."""
        return tensor.detach()[self._start : self._start + self.rows]

    def fullest(self) -> int:
        """The first rank's."""
        return self.rows * prod(self.shape[1:])


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is spread over ranks; the module that has the class need not be loaded for it."""
    return hasattr(tensor, "_local_tensor")


def part_of(param: Tensor, ranks: Ranks, shard: bool) -> Part:
    """How a parameter lies; ``shard``: let ranks share the history of what is whole on each of them."""
    if is_dtensor(param):
        return Sharded(param, ranks)
    # Rows can be sliced where they lie one after the other.
    rows = param.dim() > 0 and param.stride(0) * len(param) == param.numel()
    return Sliced(param, ranks) if shard and rows and ranks.size > 1 else Whole(param, ranks)


def _moved(placement: Any, by: int) -> Any:
    if hasattr(placement, "split_factor"):  # of FSDP on top of tensor parallel
        return type(placement)(placement.dim + by, split_factor=placement.split_factor)
    return type(placement)(placement.dim + by)


def _real_shape(param: Tensor) -> torch.Size:
    return torch.Size((*param.shape, 2)) if param.is_complex() else param.shape


def real_numbers(param: Tensor) -> int:
    """How many real numbers a parameter has, on all ranks."""
    return param.numel() * (2 if param.is_complex() else 1)
