"""Jumps along the tangent on several ranks: own samples on each, one decision, the same bits of weights."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import failures, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from torch_anderson import GaussNewton, Objective, Term

X = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(-1, 1)
STEPS = 12


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()


def sine(u: Any, x: Tensor) -> Tensor:
    return u(x) - torch.sin(3 * x.sum())  # type: ignore[no-any-return]


def trained(width: int, samples: Any, **term: Any) -> dict[str, Any]:
    model = network(width)
    whole = DistributedDataParallel(model) if dist.is_initialized() else model
    objective = Objective(whole, only=Term(sine, samples, **term))
    optimizer = GaussNewton(Adam(model.parameters(), lr=1e-3))
    losses = [float(optimizer.step(objective)) for _ in range(STEPS)]
    del losses[3]  # of a base step, to compare with: each rank's own
    counts = {name: count for name, count in optimizer.stats.counts.items() if count}
    return {"weights": [p.detach() for p in model.parameters()], "losses": losses, "counts": counts}


def on_own_part(width: int) -> dict[str, Any]:
    return trained(width, X[dist.get_rank() :: 2])


@pytest.mark.slow
@pytest.mark.parametrize("width", [3, 40], ids=["more rows than weights", "more weights than rows"])
def test_ranks_with_parts_of_the_samples_jump_as_one_process_with_all(width: int) -> None:
    one, other = run(2, on_own_part, width)
    expected = trained(width, X)
    assert one["losses"] == other["losses"]
    for a, b, c in zip(one["weights"], other["weights"], expected["weights"], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
    assert one["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    assert one["counts"] == other["counts"] == expected["counts"]


def on_drawn_samples() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    draw = torch.Generator().manual_seed(dist.get_rank())
    return trained(10, lambda k: torch.rand(k, 1, generator=draw, dtype=torch.float64), count=30 + 3 * dist.get_rank())


def test_ranks_draw_their_own_samples_and_decide_as_one() -> None:
    one, other = run(2, on_drawn_samples)
    assert one["losses"] == other["losses"] and one["counts"] == other["counts"]
    assert all(map(torch.equal, one["weights"], other["weights"]))
    assert one["losses"][-1] < 0.1 * one["losses"][0]


class Mean(nn.Module):
    """A network of sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).mean(1)  # type: ignore[no-any-return]


def on_longer_samples_of_one_rank() -> dict[str, Any]:
    model, rank = Mean(), dist.get_rank()
    objective = Objective(DistributedDataParallel(model), only=Term(lambda u, x: u(x) - x.mean(), X[:, None]))
    optimizer = GaussNewton(Adam(model.parameters(), lr=1e-3))
    for step in range(70):
        length = 5 if step >= 15 and rank else 3
        x = torch.rand(12, length, 1, generator=torch.Generator().manual_seed(step)).double()
        optimizer.step(objective(only=x))
    return {"weights": [p.detach() for p in model.parameters()], "counts": dict(optimizer.stats.counts)}


def test_samples_of_one_rank_may_change_their_shape() -> None:
    one, other = run(2, on_longer_samples_of_one_rank)
    assert one["counts"] == other["counts"] and one["counts"]["attempted"] >= 2
    assert all(map(torch.equal, one["weights"], other["weights"]))


def nan_on_one_rank() -> dict[str, Any]:
    bad = torch.zeros((), dtype=torch.float64)
    model = network(6)
    objective = Objective(DistributedDataParallel(model), only=Term(lambda u, x: sine(u, x) + bad, X))
    optimizer = GaussNewton(Adam(model.parameters(), lr=1e-3))
    optimizer.step(objective)
    optimizer.step(objective)
    if dist.get_rank():
        bad.fill_(torch.nan)
        objective.at = None
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        optimizer._driver.accelerate(objective.bind(), {})
    finally:
        skipped = optimizer.stats.counts["skipped_nonfinite_outputs"]
    return {"skipped": skipped, "same": all(map(torch.equal, before, model.parameters()))}


def test_what_one_rank_cannot_use_no_rank_uses() -> None:
    assert run(2, nan_on_one_rank) == [{"skipped": 1, "same": True}] * 2


def sharded() -> str:
    model = network(8)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    try:
        GaussNewton(Adam(model.parameters()), directions="tangent").step(Objective(model, only=Term(sine, X)))
    except ValueError as problem:
        return str(problem)
    return ""


def test_sharded_parameters_are_refused_with_the_directions_that_work() -> None:
    for message in failures(run(2, sharded)):
        assert "directions='history'" in message
