"""Reductions over ranks; no-ops in a single process."""

import torch.distributed as dist
from torch import Tensor


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of a small tensor over the ranks of the default group, the same on all of them."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return values
    # NCCL, where it is the only backend, reduces nothing that lies on the CPU.
    on_gpu = dist.get_backend() == "nccl" and not values.is_cuda
    shared = values.cuda() if on_gpu else values.clone()
    dist.all_reduce(shared)
    return shared.to(values.device) / dist.get_world_size()
