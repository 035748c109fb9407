"""One small model and its training in every layout that PyTorch spreads parameters in.

The model is the same everywhere, float64, and its shapes are awkward on purpose: dimensions that 2 and 4 do not
divide, dimensions of 1 (all but one shard are empty), and a scalar. Each rank gets its part of the same batch, so that
the mean of the gradients is the gradient of a single process.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torch_anderson import Anderson, Storage

ROWS = 24


class Net(nn.Module):
    """Smooth, and small enough to be trained in no time."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first, self.second, self.last = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1)
            self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, how many of them have batches of their own, and how parameters are spread."""

    ranks: int
    parts: int
    spread: Callable[[Net], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def part(self) -> int:
        """Which part of a batch this rank has; ranks of one tensor parallel group are neighbours and share it."""
        return dist.get_rank() * self.parts // self.ranks if self.ranks > 1 else 0


def _mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _shard_fully(net: Net, mesh: DeviceMesh) -> nn.Module:
    """Scalars cannot be sharded: they stay whole."""
    fully_shard(net.first, mesh=mesh)
    return fully_shard(net, mesh=mesh, ignored_params={net.scale})


def _split_layers(net: Net, mesh: DeviceMesh) -> nn.Module:
    """The layers in between stay distributed tensors, as local ones do not tell how long uneven ones are."""
    plan = {"first": ColwiseParallel(use_local_output=False), "second": RowwiseParallel()}
    return parallelize_module(net, mesh, plan)


def _shard_split_layers(net: Net) -> nn.Module:
    mesh = _mesh(data=2, tensor=2)
    return _shard_fully(_split_layers(net, mesh["tensor"]), mesh["data"])


SHARDED_HISTORY = {"storage": Storage(shard=True)}

LAYOUTS = {
    "single": Layout(1, 1, lambda net: net),
    "ddp": Layout(2, 2, DistributedDataParallel),
    "ddp, history sharded": Layout(4, 4, DistributedDataParallel, SHARDED_HISTORY),
    "fsdp": Layout(4, 4, lambda net: _shard_fully(net, _mesh(data=4))),
    "hsdp": Layout(4, 4, lambda net: _shard_fully(net, _mesh(copies=2, data=2))),
    "tensor parallel": Layout(2, 1, lambda net: _split_layers(net, _mesh(tensor=2))),
    "fsdp x tp": Layout(4, 2, _shard_split_layers),
}
TWO_RANKS = {
    "ddp on 2": LAYOUTS["ddp"],
    "ddp on 2, history sharded": Layout(2, 2, DistributedDataParallel, SHARDED_HISTORY),
    "fsdp on 2": Layout(2, 2, lambda net: _shard_fully(net, _mesh(data=2))),
}
ALL = LAYOUTS | TWO_RANKS


def in_time(layout: str, *fast: str) -> Any:
    """A layout as parameter of a test, which is slow in all but a few."""
    return pytest.param(layout, marks=() if layout in fast else pytest.mark.slow)


Schedule = Callable[[int], tuple[float, float]]
"""Factors of the learning rates of matrices and of the rest at a step."""


def constant(step: int) -> tuple[float, float]:
    return 1.0, 1.0


def staircase(step: int) -> tuple[float, float]:
    return 2 * (0.5 ** (step // 25),)


def wave(step: int) -> tuple[float, float]:
    return 2 * (1 + 0.3 * math.sin(step),)


def diverging(step: int) -> tuple[float, float]:
    """Rates whose ratio changes at two steps, where the history restarts."""
    return 1.0, 0.8 ** (step // 25)


DECAY = 0.1
BASES: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": partial(optim.SGD, weight_decay=DECAY),
    "no decay": optim.SGD,
    "momentum": partial(optim.SGD, momentum=0.8, weight_decay=DECAY),
    "adam": partial(optim.Adam, weight_decay=DECAY, eps=1e-4),
}
"""A little weight decay, and for Adam an epsilon above rounding: without them training amplifies the last digit."""


@dataclass(frozen=True)
class Case:
    """An optimizer: its base, the learning rates of matrices and of the rest, and options of the acceleration."""

    base: str = "sgd"
    rates: tuple[float, float] = (0.2, 0.2)
    schedule: Schedule = constant
    steps: int = 60
    options: dict[str, Any] = field(default_factory=dict)


class Training:
    """A model and its optimizer on this rank, in a layout."""

    def __init__(self, case: Case, layout: str = "single", seed: int = 0, **options: Any) -> None:
        self.case, self.layout = case, ALL[layout]
        self.net = Net(seed)
        self.model = self.layout.spread(self.net)
        params = list(self.model.parameters())
        members = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]]
        groups = [{"params": group, "lr": lr} for group, lr in zip(members, case.rates, strict=True)]
        base = BASES[case.base](groups, lr=case.rates[0])
        self.optimizer = self.wrap(base, {**case.options, **self.layout.options, **options})
        self.inputs, self.targets = (rows[self.layout.part :: self.layout.parts] for rows in batch())
        self.drift = 1.0

    def wrap(self, base: optim.Optimizer, options: dict[str, Any]) -> optim.Optimizer:
        """The optimizer that makes the steps."""
        return Anderson(base, **options)

    def loss(self) -> Tensor:
        """On this rank's part of the batch."""
        return (self.model(self.inputs) - self.drift * self.targets).square().mean()

    def backward(self) -> None:
        """Gradients, averaged over the ranks."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self._average_by_hand()

    def step(self, step: int, **given: Any) -> None:
        """One step as users make it. Targets drift, so that there is always something left to learn."""
        self.drift = 1 + 0.3 * math.sin(step / 5)
        self.backward()
        rates = zip(self.case.rates, self.case.schedule(step), strict=True)
        for group, (rate, factor) in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step(**self.given(), **given)

    def given(self) -> dict[str, Any]:
        """What a step gets."""
        return {"loss_fn": self.loss}

    def advance(self, stop: int | None = None, start: int = 0) -> "Training":
        """Steps from ``start`` on to ``stop``, by default all of the case's."""
        for step in range(start, self.case.steps if stop is None else stop):
            self.step(step)
        return self

    def weights(self) -> dict[str, Tensor]:
        """Full parameters, as this rank knows them: where they are replicated, from its own copy."""
        return {name: full(p) for name, p in self.net.named_parameters()}

    def outcome(self) -> dict[str, Any]:
        """What to compare between ranks and layouts."""
        return {"weights": self.weights(), "counts": self.counts()}

    def counts(self) -> dict[str, int]:
        """Counters that are not 0."""
        return {name: int(count) for name, count in self.optimizer.stats.counts.items() if count}

    def _average_by_hand(self) -> None:
        """What full sharding leaves out is the user's to average."""
        sharded = any(isinstance(p, DTensor) for p in self.net.parameters())
        for p in self.net.parameters():
            if sharded and self.layout.parts > 1 and not isinstance(p, DTensor) and p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= self.layout.ranks


class Elementwise(Training):
    """Every number has another curvature and another target: gradients need neither a model nor other ranks, so that
    hundreds of steps take no time. Only the acceleration ties the numbers together."""

    def __init__(self, case: Case, layout: str = "single", **options: Any) -> None:
        super().__init__(case, layout, **options)
        self.places = places(layout)
        numbers = torch.rand(2, sum(p.numel() for p in Net().parameters()), generator=_generator(2)).double()
        self.curvatures, self.aims = 0.2 + 1.8 * numbers[0], 2 * numbers[1] - 1

    @torch.no_grad()
    def backward(self) -> None:
        """Gradients of this rank's numbers."""
        for p, places in zip(self.net.parameters(), self.places, strict=True):
            part = local(p)
            slope = self.curvatures[places] * (part - self.drift * self.aims[places]) + 0.2 * part.sin()
            if p.grad is None:
                p.grad = shard_like(p, slope)
            else:  # to make distributed tensors takes longer than all the rest
                local(p.grad).copy_(slope)


def places(layout: str) -> list[Tensor]:
    """Which numbers of the whole model this rank has of each parameter: what becomes of 0, 1, 2, ... in a layout."""
    net, start = Net(), 0
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.arange(start, start + p.numel()).view(p.shape))
            start += p.numel()
    ALL[layout].spread(net)
    return [local(p).long() for p in net.parameters()]


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def shard_like(param: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread as a parameter is."""
    if not isinstance(param, DTensor):
        return part
    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def batch() -> tuple[Tensor, Tensor]:
    """All rows of it. A model not far from where training starts knows the answers, so that the way is smooth."""
    generator = _generator(1)
    inputs = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    teacher = Net()
    for p in teacher.parameters():
        p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return inputs, teacher(inputs)


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, gathered where it is sharded."""
    whole = tensor.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two sets of weights, relative to the largest weight; infinite for NaN."""
    assert ours.keys() == theirs.keys()
    apart = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    size = max(float(value.abs().max()) for value in theirs.values())
    return apart / size if math.isfinite(apart) else math.inf


def assert_bitwise_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same bits, in all tensors; NaN stands for nothing yet in some."""
    assert ours.keys() == theirs.keys()
    alike = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    different = [name for name in ours if ours[name].dtype != theirs[name].dtype or not alike(ours[name], theirs[name])]
    assert not different, f"different bits in {different}"
