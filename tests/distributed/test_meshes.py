"""Meshes and groups that are not the usual ones: scalars, other orders of ranks, parts of them, latecomers."""

import pickle

import pytest
import torch
import torch.distributed as dist
from processes import attempt, failures, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adagrad

from torch_anderson import Anderson, Storage

SLOPES = torch.linspace(0.1, 1, 6, dtype=torch.float64)
START = [torch.linspace(-1, 1, 6, dtype=torch.float64), torch.linspace(3, -2, 6, dtype=torch.float64)]
OPTIONS = {"residual": "step", "period": 3, "history_size": 2, "safeguard": None, "regularization": 1e-2}


def drive(params: list[nn.Parameter], steps: int = 7, **options) -> Anderson:
    """Train plain or distributed tensors with gradients that need no model."""
    optimizer = Anderson(SGD(params, lr=0.1), **{**OPTIONS, **options})
    for _ in range(steps):
        for p in params:
            slopes = SLOPES.sum() if p.dim() == 0 else SLOPES
            lies = hasattr(p, "device_mesh")
            p.grad = p.detach() * (distribute_tensor(slopes, p.device_mesh, p.placements) if lies else slopes)
        optimizer.step()
    return optimizer


def alone() -> float:
    return drive([nn.Parameter(start.clone()) for start in START]).stats.latest.residual_norm


def spread(tensor: Tensor, mesh: DeviceMesh, *placements) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor.clone(), mesh, placements))


def a_scalar_and_shards() -> tuple[Tensor, Tensor, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2,))
    scalar, vector = spread(torch.tensor(2.0).double(), mesh, Replicate()), spread(START[0], mesh, Shard(0))
    optimizer = drive([vector, scalar])
    entries = optimizer.state_dict()["state"][1]
    return scalar.full_tensor().detach(), vector.full_tensor().detach(), entries["anderson_point_diffs"].shape


def test_a_scalar_can_be_a_distributed_tensor():
    params = [nn.Parameter(START[0].clone()), nn.Parameter(torch.tensor(2.0).double())]
    drive(params)
    for scalar, vector, shape in run(2, a_scalar_and_shards):
        torch.testing.assert_close(vector, params[0].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(scalar, params[1].detach(), rtol=1e-12, atol=1e-12)
        assert shape == (OPTIONS["history_size"],)


def on_meshes_of_any_order() -> list[float]:
    one, other = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [[0, 2], [1, 3]])
    pairs = ((one, one), (one, other), (other, one))
    params = [[spread(s, mesh, Replicate(), Shard(0)) for s, mesh in zip(START, pair, strict=True)] for pair in pairs]
    return [drive(pair).stats.latest.residual_norm for pair in params]


def test_each_number_counts_once_whatever_the_order_of_ranks_in_a_mesh():
    for norms in run(4, on_meshes_of_any_order):
        assert norms == pytest.approx([alone()] * 3, rel=1e-12)


def on_a_part_of_the_ranks() -> str | None:
    everywhere, part = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0])
    params = [spread(START[0], everywhere, Shard(0)), spread(START[1], part, Shard(0))]
    return attempt(lambda: drive(params, 1), RuntimeError)


def test_a_parameter_that_only_some_ranks_have_is_refused_on_all():
    for message in failures(run(2, on_a_part_of_the_ranks)):
        assert "parameter 1" in message and "a mesh without this rank" in message


def a_group_that_differs() -> str | None:
    optimizer = drive([nn.Parameter(START[0].clone())], 4)
    torch.manual_seed(dist.get_rank())
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(6, dtype=torch.float64))]})
    return attempt(optimizer.step, RuntimeError)


def test_a_group_that_comes_late_is_compared_too():
    for message in failures(run(2, a_group_that_differs)):
        assert "the values of the parameters" in message


def test_blocks_from_before_the_process_group_are_built_anew():
    """As with Adagrad, which makes its state when it is built."""
    param = nn.Parameter(START[0].clone())
    optimizer = Anderson(Adagrad([param], lr=0.1), **OPTIONS, storage=Storage(shard=True))

    def norm_and_bytes() -> tuple[float, int]:
        for _ in range(6):
            param.grad = param.detach() * SLOPES
            optimizer.step()
        return optimizer.stats.latest.residual_norm, optimizer.stats.history_bytes

    ((norm, whole),) = run(1, norm_and_bytes)
    for found, kept in run(2, norm_and_bytes):
        assert found == pytest.approx(norm, rel=1e-9)
        assert kept == whole / 2


def device_of_an_entry() -> list[str]:
    net = fully_shard(nn.Linear(5, 6), mesh=init_device_mesh("cpu", (2,)))
    optimizer = Anderson(SGD(net.parameters(), lr=0.1), storage=Storage(device="meta"))
    net(torch.randn(3, 5)).sum().backward()
    optimizer.step()
    entry = optimizer.state[net.weight]["anderson_point_diffs"]
    return [entry.device.type, entry.to_local().device.type]


def test_an_entry_says_on_which_device_its_rows_are():
    assert run(2, device_of_an_entry) == [["meta", "meta"]] * 2


def pickled_with_a_group() -> str | None:
    optimizer = Anderson(SGD([nn.Parameter(torch.ones(6))], lr=0.1), process_group=dist.new_group([0, 1]))
    return attempt(lambda: pickle.dumps(optimizer), TypeError)


def test_a_process_group_cannot_be_pickled_and_it_is_said_what_to_do():
    for message in failures(run(2, pickled_with_a_group)):
        assert "state_dict()" in message
