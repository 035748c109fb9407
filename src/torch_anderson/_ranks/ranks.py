"""The ranks that train one model together: reductions, exchange of objects, agreement."""

from functools import cache
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SLICING = 64
"""Most ranks that share one history: with fewer rows than ranks, parameters would have to be padded."""

ADVICE = (
    "Ranks that train one model together need the same; to train different ones, give each its own process_group. "
    "Sharded models are supported with fully_shard, not with FullyShardedDataParallel."
)


def world_size(group: Any) -> int:
    """Number of ranks in a process group; 1 as long as there is none."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


class Ranks:
    """The ranks of a process group as they were at construction; by default all there are."""

    def __init__(self, group: Any = None):
        self.group = group
        self.size = world_size(group)
        self.index = dist.get_rank(group) if self.size > 1 else 0
        self.home: torch.device | None = None  # the parameters' device, from which every usable backend can send

    def sum(self, values: Tensor) -> Tensor:
        """Sum a small tensor over ranks. A number that is not finite on one rank is not finite on any."""
        return self._reduced(values, dist.ReduceOp.SUM) if self.size > 1 else values

    def mean(self, values: Tensor) -> Tensor:
        """Average a small tensor over ranks."""
        return self.sum(values) / self.size if self.size > 1 else values

    def largest(self, values: Tensor) -> Tensor:
        """Maximum of each number over ranks, without waiting for the device; NaN where it is NaN on any rank."""
        if self.size == 1:
            return values
        lost = values.isnan()  # a maximum may hide it
        known = values.nan_to_num(posinf=torch.inf, neginf=-torch.inf)
        found, lost = self._reduced(torch.stack([known, lost.to(values.dtype)]), dist.ReduceOp.MAX)
        return torch.where(lost > 0, torch.nan, found)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Collect one object from each rank, in the order of ranks."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def require_agreement(self, account: dict[str, str]) -> None:
        """Raise RuntimeError, on all ranks, if they give different accounts of what they train.

        Ranks that differ would add up numbers that do not belong together, or wait for each other forever. One small
        exchange; a second one, to name the difference, only where there is one.
        """
        if len(set(self.gather_objects(sha256(repr(account).encode()).hexdigest()))) == 1:
            return
        found = self.gather_objects(account)
        for name in dict.fromkeys(name for account in found for name in account):
            values = [account.get(name, "absent") for account in found]
            other = next((i for i, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise RuntimeError(f"Ranks 0 and {other} differ in {name}: {values[0]} and {values[other]}. {ADVICE}")

    def _reduced(self, values: Tensor, operation: Any) -> Tensor:
        shared = self._movable(values).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(shared, operation, group=self.group)
        return shared.to(values.device)

    def _movable(self, values: Tensor) -> Tensor:
        """Move values to a device from which the group can send: NCCL alone takes nothing from the CPU."""
        group: Any = self.group or dist.group.WORLD
        senders = {device.type for device in group._device_types}
        if self.home is None or values.device.type in senders or self.home.type not in senders:
            return values
        return values.to(self.home)


def all_gather(mine: Tensor, size: int, group: Any) -> Tensor:
    """Collect the vectors of all ranks of a group, one row each."""
    found = mine.new_empty(size * len(mine))
    # The second is the name that older releases of torch know.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(found, mine, group=group)
    return found.view(size, len(mine))


def slicing_mesh(group: Any, size: int, device_type: str) -> Any:
    """Build the mesh whose last dimension holds the ranks that share a history: all, or about 64 of very many."""
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
    """Number of ranks that share one history: a divisor of ``size``.

    >>> [sharing_ranks(size) for size in (4, 64, 384, 1536, 97)]
    [4, 64, 64, 64, 97]
    """
    parts = [part for part in range(SLICING // 2, SLICING + 1) if size % part == 0]
    return parts[-1] if parts and size > SLICING else size
