"""Reductions over ranks; no-ops in a single process."""

import torch.distributed as dist
from torch import Tensor


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of a small tensor over the ranks of the default group, the same on all of them."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()
