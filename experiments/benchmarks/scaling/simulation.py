"""Runs the library on one rank of a simulated world, and counts what it keeps, sends and multiplies."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from torch_anderson import Anderson, MovingAverage, Storage

from .costs import Setting

COLLECTIVES = ("c10d", "_c10d_functional")
MATRIX_PRODUCTS = {"aten::mm": 0, "aten::mv": 0, "aten::addmv": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Operation -> position of the two factors among its arguments."""
NEW = ("aten::zeros", "aten::empty")
"""Operations that make a tensor from nothing."""


class Allocating(TorchDispatchMode):
    """Adds up the bytes of new tensors on one type of device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Add up what the operation makes."""
        made = function(*args, **(kwargs or {}))
        if function._schema.name in NEW and made.device.type == self.device:
            self.bytes += made.nbytes
        return made


class Counting(TorchDispatchMode):
    """Counts collectives and the bytes a rank gives to them, and the flops of matrix products by their type."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operation."""
        name = function._schema.name
        if function.namespace in COLLECTIVES:
            kind = "gather" if "gather" in name else "sum" if "reduce" in name else name
            self.collectives[kind] += 1
            given = args[1] if kind == "gather" else args[0]  # the first argument of a gather is what it fills
            self.sent[kind] += sum(tensor.nbytes for tensor in ([given] if isinstance(given, Tensor) else given))
        elif name in MATRIX_PRODUCTS:
            first = MATRIX_PRODUCTS[name]
            left, right = args[first : first + 2]
            self.flops[left.dtype] += 2 * prod(left.shape) * (right.shape[-1] if right.dim() > 1 else 1)
        return function(*args, **(kwargs or {}))

    def as_dict(self) -> dict[str, int]:
        """All counts by name."""
        return {
            "all-reduces": self.collectives["sum"],
            "bytes given to the all-reduce": self.sent["sum"],
            "all-gathers": self.collectives["gather"],
            "bytes given to the all-gather": self.sent["gather"],
            "other collectives": self.collectives.total() - self.collectives["sum"] - self.collectives["gather"],
            "flops in float64": self.flops[torch.float64],
            "flops in float32": self.flops[torch.float32],
        }


@contextmanager
def world(ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group whose other ranks send what this one sends."""
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Parameters(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: str):
        super().__init__()
        make = torch.empty if device == "meta" else torch.randn
        self.all = nn.ParameterList(nn.Parameter(make(shape, device=device)) for shape in shapes)


def build(shapes: Sequence[tuple[int, ...]], layout: str, setting: Setting, device: str = "meta") -> Anderson:
    """An optimizer of parameters in a layout, in the present world, that accepts any finite jump."""
    model, group = Parameters(shapes, device), dist.group.WORLD if dist.is_initialized() else None
    if layout == "fsdp2" and group:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    storage = Storage(
        dtype=torch.bfloat16 if setting.row_itemsize == 2 else None,
        shard=layout.startswith("ddp-sharded"),
    )
    return Anderson(
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True),
        residual="step",
        history_size=setting.history_size,
        period=setting.period,
        store_period=setting.store_period,
        average=MovingAverage(setting.average_window) if setting.average_window else None,
        safeguard=None,
        storage=storage,
        process_group=group if layout == "ddp-sharded-by-all" else None,
    )


def kept_bytes(optimizer: Anderson) -> int:
    """Bytes that the library allocates on this rank before training: at a step with a learning rate of 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    device = optimizer.param_groups[0]["params"][0].device.type
    with Allocating(device) as allocating:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return allocating.bytes


def told_bytes(optimizer: Anderson) -> int:
    """Bytes that this rank sends to all others at its first step, where all compare options and parameters."""
    with Counting() as counting:
        _random_step(optimizer)
    return counting.sent["gather"]


def counted_acceleration(optimizer: Anderson, accelerations: int = 3) -> Counting:
    """Count what the last of several accelerations sends and multiplies, with random gradients."""
    period = optimizer.options.period
    for _ in range(accelerations * period - 1):
        _random_step(optimizer)
    with Counting() as counting:
        _random_step(optimizer)
    latest = optimizer.stats.latest
    assert latest is not None and latest.step == accelerations * period and latest.accepted
    return counting


def _random_step(optimizer: Anderson) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = _random_like(parameter)
    optimizer.step()


def _random_like(parameter: Any) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.randn_like(parameter)
    local, placed = torch.randn_like(parameter.to_local()), (parameter.device_mesh, parameter.placements)
    return DTensor.from_local(local, *placed, run_check=False, shape=parameter.shape, stride=parameter.stride())
