"""Before the first step: do all ranks train the same model in the same way?

Ranks that differ would end in sums of numbers that do not belong together, or wait for each other for ever.
"""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from .distributed import Ranks
from .flat import flat_view
from .history import chunks
from .layout import Group, accelerated
from .options import Options
from .shards import is_dtensor

ADVICE = (
    "Ranks that train one model together need the same; to train different ones, give each its own with "
    "Storage(process_group=...). Of sharded models, those of fully_shard are known, not FullyShardedDataParallel."
)


def require_agreement(options: Options, groups: Sequence[Group], ranks: Ranks) -> None:
    """Raise RuntimeError, on all ranks, if options, parameters or their values differ. One small exchange; only where
    they differ a second one, to say in what."""
    account = _account(options, groups)
    if len(set(ranks.gather_objects(sha256(repr(account).encode()).hexdigest()))) == 1:
        return
    found = ranks.gather_objects(account)
    for name in dict.fromkeys(name for account in found for name in account):
        values = [account.get(name, "absent") for account in found]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise RuntimeError(f"Ranks 0 and {other} differ in {name}: {values[0]} and {values[other]}. {ADVICE}")


def _account(options: Options, groups: Sequence[Group]) -> dict[str, str]:
    """What has to be the same on all ranks, by name."""
    account = {f"option {name}": _described(value) for name, value in _fields(options)}
    members = accelerated(groups)
    account["the number of parameters"] = str(len(members))
    for i, (group, param) in enumerate(members):
        account[f"parameter {i}"] = f"shape {tuple(param.shape)} of {param.dtype} in group {group}{_placed(param)}"
    whole = [param for _, param in members if not is_dtensor(param)]
    account["the values of the parameters"] = f"checksum {checksum(whole)}"
    return account


def _fields(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Options, and options of options, by name; not the group, which each rank has its own object of."""
    for name, value in vars(options).items():
        if is_dataclass(value):
            yield from _fields(value, f"{prefix}{name}.")
        elif name != "process_group":
            yield prefix + name, value


def _described(value: Any) -> str:
    """The same on ranks that mean the same: a function may lie elsewhere in memory, a device have another number."""
    if isinstance(value, torch.device):
        return value.type
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(value)


def _placed(param: Any) -> str:
    if not is_dtensor(param):
        return ""
    absent = param.device_mesh.get_coordinate() is None
    return f" on {param.placements}" + " of a mesh without this rank" * absent


def checksum(params: Sequence[Tensor]) -> int:
    """Of all bits, and where they stand.

    >>> checksum([torch.tensor([1.0, 2.0])]) == checksum([torch.tensor([2.0, 1.0])])
    False
    """
    total = 0
    for param in params:
        flat = flat_view(param)
        for start, stop in chunks(flat.numel(), flat.device):
            bits = flat[start:stop].contiguous().view(torch.uint8).long()
            places = torch.arange(1, len(bits) + 1, device=bits.device)
            total = (31 * total + int(((bits + 1) * places).sum())) % (1 << 61)
    return total
