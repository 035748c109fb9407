"""Before the first step: do all ranks train the same model in the same way?

Ranks that differ would end in sums of numbers that do not belong together, or wait for each other for ever.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .distributed import Ranks
from .history import chunks
from .options import Options
from .parameters import Group, accelerated, flat_view
from .shards import is_dtensor

ADVICE = (
    "Ranks that train one model together need the same; to train different ones, give each its own with "
    "Storage(process_group=...). Of sharded models, those of fully_shard are known, not FullyShardedDataParallel."
)


def require_agreement(options: Options, groups: Sequence[Group], ranks: Ranks) -> None:
    """Raise RuntimeError, on all ranks, if options, parameters or their values differ; one exchange."""
    found = ranks.gather_objects(_account(options, groups))
    for name in dict.fromkeys(name for account in found for name in account):
        values = [account.get(name, "absent") for account in found]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise RuntimeError(f"Ranks 0 and {other} differ in {name}: {values[0]} and {values[other]}. {ADVICE}")


def _account(options: Options, groups: Sequence[Group]) -> dict[str, str]:
    """What has to be the same on all ranks, by name."""
    account = {f"option {name}": repr(value) for name, value in vars(options).items() if name != "storage"}
    if options.storage:
        kept = {name: value for name, value in vars(options.storage).items() if name != "process_group"}
        account |= {f"option storage.{name}": repr(value) for name, value in kept.items()}
    members = accelerated(groups)
    account["the number of parameters"] = str(len(members))
    for i, (group, param) in enumerate(members):
        account[f"parameter {i}"] = f"shape {tuple(param.shape)} of {param.dtype} in group {group}{_placed(param)}"
    whole = [param for _, param in members if not is_dtensor(param)]
    account["the values of the parameters"] = f"checksum {checksum(whole)}"
    return account


def _placed(param: Any) -> str:
    return f" on {param.placements}" if is_dtensor(param) else ""


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
