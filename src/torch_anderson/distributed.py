"""The ranks that train one model together, and what they tell each other; in a single process, nothing."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SLICING = 64
"""About as many ranks share a history where there are many more: with fewer rows than ranks, parameters are padded."""


class Ranks:
    """The ranks of a process group, by default all there are."""

    def __init__(self, group: Any = None):
        self.group = group
        self.home: torch.device | None = None  # where the parameters are, from where any backend of theirs sends

    @property
    def size(self) -> int:
        """How many; 1 as long as there is no process group."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def index(self) -> int:
        """Which of them this one is."""
        return dist.get_rank(self.group) if self.size > 1 else 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a small tensor, the same on all ranks. A number that is not finite on one is so on all."""
        return self._reduced(values, dist.ReduceOp.SUM) if self.size > 1 else values

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a small tensor, the same on all ranks."""
        return self.sum(values) / self.size if self.size > 1 else values

    def largest(self, values: Tensor) -> Tensor:
        """The largest of each number, without waiting for the device; not a number where it is so on any rank."""
        if self.size == 1:
            return values
        lost = values.isnan()  # which a maximum may hide
        known = values.nan_to_num(posinf=torch.inf, neginf=-torch.inf)
        found, lost = self._reduced(torch.stack([known, lost.to(values.dtype)]), dist.ReduceOp.MAX)
        return torch.where(lost > 0, torch.nan, found)

    def gather(self, values: Tensor) -> Tensor:
        """The tensors of all ranks, in a new first dimension."""
        if self.size == 1:
            return values.unsqueeze(0)
        found = all_gather(self._movable(values).flatten(), self.size, self.group)
        return found.view(self.size, *values.shape).to(values.device)

    def gather_objects(self, mine: Any) -> list[Any]:
        """What each rank gives, in their order."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def _reduced(self, values: Tensor, operation: Any) -> Tensor:
        shared = self._movable(values).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(shared, operation, group=self.group)
        return shared.to(values.device)

    def _movable(self, values: Tensor) -> Tensor:
        """On a device from which the group sends: NCCL, where it is the only backend, takes nothing from the CPU."""
        group: Any = self.group or dist.group.WORLD
        senders = {device.type for device in group._device_types}
        if self.home is None or values.device.type in senders or self.home.type not in senders:
            return values
        return values.to(self.home)


def all_gather(mine: Tensor, size: int, group: Any) -> Tensor:
    """The vectors of all ranks, one row each."""
    found = mine.new_empty(size * len(mine))
    # The second is the name that older releases of torch know.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(found, mine, group=group)
    return found.view(size, len(mine))


def slicing_mesh(group: Any, size: int, device_type: str) -> Any:
    """A mesh whose last dimension are the ranks that share a history: all, or about 64 of very many."""
    return _slicing_mesh(group, dist.group.WORLD, size, device_type)


@cache
def _slicing_mesh(group: Any, world: Any, size: int, device_type: str) -> Any:
    """Made once for each ``world``, which ends when its process group is destroyed."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if group is not None:
        return DeviceMesh.from_group(group, device_type)
    together = sharing_ranks(size)
    return init_device_mesh(device_type, (size // together, together) if together < size else (size,))


def sharing_ranks(size: int) -> int:
    """How many of ``size`` ranks share a history: an even part of them.

    >>> [sharing_ranks(size) for size in (4, 64, 384, 1536, 97)]
    [4, 64, 64, 64, 97]
    """
    parts = [part for part in range(SLICING // 2, SLICING + 1) if size % part == 0]
    return parts[-1] if parts and size > SLICING else size
