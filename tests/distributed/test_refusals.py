"""What cannot work is said at once, on every rank, and nobody waits for anybody."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Net
from processes import attempt, failures, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from torch_anderson import Anderson, GaussNewton, MovingAverage, Objective, Storage, Term

REFUSED = (ValueError, RuntimeError, TypeError)


def model(outputs: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def train(optimizer: Anderson, steps: int = 12, **given: Any) -> None:
    """Train with gradients that are made up, without any communication except the optimizer's."""
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.detach().sin()
        optimizer.step(**given)


def accelerated(net: nn.Module, **options: Any) -> Anderson:
    given = {"residual": "step", "period": 3, "history_size": 3, "safeguard": None, "regularization": 1e-2, **options}
    return Anderson(SGD(net.parameters(), lr=0.1), **given)


def by_gradients(net: nn.Module, **options: Any) -> Anderson:
    return Anderson(SGD(net.parameters(), lr=0.1), **options)


# -------------------------------------------------------------------------------------------------- at construction


def partial_sums() -> str | None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    return attempt(lambda: Anderson(SGD([parameter], lr=0.1)), *REFUSED)


def test_partial_sums_are_refused_at_construction():
    for message in failures(run(2, partial_sums)):
        assert "artial" in message and message.startswith("ValueError")


def zero_redundancy() -> str | None:
    base = ZeroRedundancyOptimizer(model().parameters(), optimizer_class=Adam, lr=0.1)
    return attempt(lambda: Anderson(base), *REFUSED)


def test_zero_redundancy_is_refused_at_construction():
    for message in failures(run(2, zero_redundancy)):
        assert "ZeroRedundancyOptimizer" in message and message.startswith("ValueError")
        assert "fully_shard" in message or "shard=True" in message  # what to do instead


def separate_stage() -> str | None:
    """Ranks 0 and 1 shard one model, 2 and 3 another, by meshes that know nothing of each other."""
    half = dist.get_rank() // 2
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    net = fully_shard(model(), mesh=meshes[half])
    return attempt(lambda: accelerated(net), *REFUSED)


def stage_of_a_pipeline() -> str | None:
    """The same with one mesh of stages and data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    net = fully_shard(model(), mesh=mesh["data"])
    return attempt(lambda: accelerated(net), *REFUSED)


@pytest.mark.parametrize("stage", [separate_stage, stage_of_a_pipeline])
def test_a_pipeline_stage_without_a_group_is_refused_at_construction(stage):
    for message in failures(run(4, stage)):
        assert "process_group" in message and message.startswith("ValueError")


def pipeline_with_a_group() -> dict[str, Any]:
    """Two stages of different shapes, each with its process group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage = mesh["stage"].get_local_rank()
    net = fully_shard(model(outputs=3 + stage, seed=stage).double(), mesh=mesh["data"])
    optimizer = accelerated(net, process_group=mesh["data"].get_group())
    train(optimizer)
    return {"weights": [p.full_tensor() for p in net.parameters()], "stage": stage, **optimizer.stats.as_dict()}


def test_pipeline_stages_with_process_groups_train_as_if_alone():
    for rank in run(4, pipeline_with_a_group):
        alone = model(outputs=3 + rank["stage"], seed=rank["stage"]).double()
        optimizer = accelerated(alone)
        train(optimizer)
        assert rank["accepted"] == optimizer.stats.as_dict()["accepted"] > 0
        for ours, theirs in zip(rank["weights"], alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------- ranks that are not alike: first step

Build = Callable[[int], Anderson]
UNLIKE: dict[str, tuple[Build, str]] = {
    "residual": (lambda rank: by_gradients(model(), residual=("gradient", "step")[rank]), "residual"),
    "gradients, history_size": (lambda rank: by_gradients(model(), history_size=3 + rank), "history_size"),
    "gradients, warmup": (lambda rank: by_gradients(model(), warmup=5 * rank), "warmup"),
    "gradients, values": (lambda rank: by_gradients(model(seed=rank)), "parameter|value|weight"),
    "period": (lambda rank: accelerated(model(), period=3 + rank), "period"),
    "safeguard": (lambda rank: accelerated(model(), safeguard=("residual", None)[rank]), "safeguard"),
    "regularization": (lambda rank: accelerated(model(), regularization=(1e-3, 1e-4)[rank]), "regularization"),
    "storage": (
        lambda rank: accelerated(model(), storage=(None, Storage(dtype=torch.bfloat16))[rank]),
        "storage|dtype",
    ),
    "accelerator": (
        lambda rank: (Anderson, GaussNewton)[rank](SGD(model().parameters(), lr=0.1)),
        "option",
    ),
    "first pairs": (lambda rank: accelerated(model(), period=12, store_period=(1, 4)[rank]), "store_period"),
    "warmup": (lambda rank: accelerated(model(), warmup=5 * rank), "warmup"),
    "average": (lambda rank: accelerated(model(), average=(None, MovingAverage(3))[rank]), "average"),
    "shapes": (lambda rank: accelerated(model(outputs=3 + rank)), "shape"),
    "types": (lambda rank: accelerated(model().to((torch.float32, torch.float64)[rank])), "dtype|type|float64"),
    "numbers of parameters": (
        lambda rank: accelerated(nn.Sequential(*list(model())[: 3 - 2 * rank])),
        "parameter",
    ),
    "groups": (
        lambda rank: (
            Anderson(SGD([{"params": list(model().parameters()), "anderson": True}], lr=0.1), period=3)
            if rank
            else Anderson(SGD([{"params": [p]} for p in model().parameters()], lr=0.1), period=3)
        ),
        "group|parameter",
    ),
    "values": (lambda rank: accelerated(model(seed=rank)), "parameter|value|weight"),
    "one value in its last digit": (lambda rank: accelerated(nudged(rank)), "parameter|value|weight"),
}


def nudged(rank: int) -> nn.Module:
    net = model()
    with torch.no_grad():
        bias = net[2].bias
        bias[-1] = torch.nextafter(bias[-1], bias[-1] + rank) if rank else bias[-1]
    return net


def first_step(build: Build) -> str | None:
    optimizer = build(dist.get_rank())  # no error yet
    return attempt(lambda: train(optimizer, 1), *REFUSED)


def all_first_steps() -> list[str | None]:
    found = []
    for build, _ in UNLIKE.values():
        found.append(first_step(build))
        dist.barrier()  # whatever became of it, ranks are together again
    return found


def test_ranks_that_are_not_alike_all_say_so_at_the_first_step():
    for name, *messages in zip(UNLIKE, *run(2, all_first_steps), strict=True):
        assert all(messages), f"{name}: errors {messages}"
        for message in messages:
            assert re.search(UNLIKE[name][1], message), f"{name}: {message}"


def known(optimizer: Anderson) -> dict[str, float]:
    """All numbers that are not NaN, which is never the same."""
    return {name: value for name, value in optimizer.stats.as_dict().items() if value == value}


def alike_but_for_seeds(build: Callable[..., Anderson]) -> dict[str, float]:
    net = model()
    optimizer = build(net)
    torch.manual_seed(dist.get_rank())
    train(optimizer)
    return known(optimizer)


@pytest.mark.parametrize("build", [accelerated, by_gradients])
def test_seeds_may_differ(build):
    one, other = run(2, alike_but_for_seeds, build)
    assert one == other and one["accepted"] > 0


def alone_in_groups() -> dict[str, Any]:
    """Different models, options and numbers of steps, at the same time, by both accelerators."""
    rank = dist.get_rank()
    groups = [dist.new_group([i]) for i in range(dist.get_world_size())]
    net = model(outputs=3 + rank, seed=rank)
    optimizer = accelerated(net, period=2 + rank, process_group=groups[rank])
    train(optimizer, 10 + 7 * rank)
    driven = model(seed=rank)
    other = GaussNewton(SGD(driven.parameters(), lr=0.1), process_group=groups[rank])
    fit(driven, other, 5 + rank)
    return {"weights": [*map(clone, net.parameters()), *map(clone, driven.parameters())], "accepted": accepted(other)}


def fit(net: nn.Module, optimizer: GaussNewton, steps: int) -> None:
    """Make as many steps on an objective."""
    objective = Objective(net, only=Term(lambda u, x: u(x) - x[:3].sin(), torch.linspace(-1, 1, 40).view(10, 4)))
    for _ in range(steps):
        optimizer.step(objective)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def accepted(optimizer: Anderson | GaussNewton) -> float:
    return optimizer.stats.as_dict()["accepted"]


def test_ranks_in_groups_of_one_train_different_models():
    for rank, found in enumerate(run(2, alone_in_groups)):
        net, driven = model(outputs=3 + rank, seed=rank), model(seed=rank)
        train(accelerated(net, period=2 + rank), 10 + 7 * rank)
        other = GaussNewton(SGD(driven.parameters(), lr=0.1))
        fit(driven, other, 5 + rank)
        assert found["accepted"] == accepted(other) > 0
        for ours, theirs in zip(found["weights"], [*net.parameters(), *driven.parameters()], strict=True):
            assert torch.equal(ours, theirs)


def copies(build: Callable[..., Anderson]) -> dict[str, float]:
    """A copy, and an optimizer that has loaded a checkpoint, compare again and train on."""
    net = DistributedDataParallel(Net())
    optimizer = build(net)
    train(optimizer, 5)
    twin = copy.deepcopy(optimizer)
    train(twin, 5)
    optimizer.load_state_dict(copy.deepcopy(twin.state_dict()))
    train(optimizer, 5)
    return known(optimizer)


@pytest.mark.parametrize("build", [accelerated, by_gradients])
def test_copies_and_loaded_optimizers_go_on(build):
    one, other = run(2, copies, build)
    assert one == other and one["accepted"] >= 3
