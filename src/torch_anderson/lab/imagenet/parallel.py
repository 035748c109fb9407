"""The processes that torchrun starts, and the two ways to spread a model over them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..resnet import Residual
from .clock import Clock

TIMEOUT = timedelta(minutes=10)
"""Longest wait for another process: the slowest thing that one does alone is to read a large folder."""


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The default group, of one process if torchrun has not started this; gives the device of this process."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    store, rank, world = meeting_place()
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world)
    try:
        yield device
        dist.barrier()  # none closes connections that others still need
    finally:
        dist.destroy_process_group()


def meeting_place() -> tuple[Any, int, int]:
    """The store in which processes find each other, the rank of this process, and their number.

    torchrun keeps one store for all its restarts, in which processes may find addresses of those that were killed
    (github.com/pytorch/pytorch/issues/135712). On one machine, where all processes agree on the number of restarts,
    each attempt has its own prefix.
    """
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    store, rank, world = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        attempt = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
        store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    return store, rank, world


def spread(model: nn.Module, strategy: str, clock: Clock) -> nn.Module:
    """The model over all processes, with equal weights: DDP, or FSDP2 block by block."""
    if strategy == "fsdp":
        for block in [module for module in model.modules() if isinstance(module, Residual)]:
            fully_shard(block)
        fully_shard(model)
        return model
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(clock, timed_allreduce)
    return wrapped


def timed_allreduce(clock: Clock, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Sum gradients over the processes as DDP does; what follows the last call is communication alone."""
    clock.lap("forward_backward")
    return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def settle_buckets(model: nn.Module, images: Tensor) -> None:
    """Make a pass before the first step that changes nothing.

    DDP groups gradients anew after its first pass, in the order in which they came; with three processes and more, the
    order in which they are summed depends on it. After this pass a resumed run sums as the undisturbed one does.
    """
    model.eval()  # leaves BatchNorm's statistics alone
    model(images).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def share_buffers(model: nn.Module) -> None:
    """Give all processes rank 0's buffers: each one's BatchNorm has seen its own images."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def summed(numbers: dict[str, float], device: torch.device) -> dict[str, float]:
    """Sums over the processes."""
    total = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return dict(zip(numbers, total.tolist(), strict=True))
