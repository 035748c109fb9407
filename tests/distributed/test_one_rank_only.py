"""What happens on one rank alone must not make the others wait, nor decide otherwise."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import NETWORK
from layouts import Net, Training, batch, distance
from processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam

from torch_anderson import Anderson, MovingAverage, Storage
from torch_anderson._tensors.members import account


def base() -> SGD:
    return SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def test_devices_of_one_kind_are_the_same_on_all_ranks():
    accounts = [account(Anderson(base(), storage=Storage(device=f"cuda:{i}")).options, []) for i in (0, 1)]
    assert accounts[0] == accounts[1]


def counts(optimizer: Anderson) -> dict[str, int]:
    return {name: int(count) for name, count in optimizer.stats.counts.items() if count}


LAX = {"residual": "step", "history_size": 2, "safeguard": None, "regularization": 1e-2}
WATCHING = {
    "pending": {"safeguard": "residual", "period": 3},
    "pending, history sharded": {"safeguard": "residual", "period": 3, "storage": Storage(shard=True)},
    "pending by gradient": {"safeguard": "gradient"},
    "pending by gradient, averaged": {"safeguard": "gradient", "period": 2, "average": MovingAverage(2)},
    "pending, averaged": {"safeguard": "residual", "period": 3, "average": MovingAverage(2)},
    "pending, gradients": {"residual": "gradient"},
    "pending, gradients, history sharded": {"residual": "gradient", "storage": Storage(shard=True)},
    "window": {"average": MovingAverage(3), "period": 5},
    "window, history sharded": {"average": MovingAverage(3), "period": 5, "storage": Storage(shard=True)},
}
"""What depends on nobody else writing to the weights, where ranks add up or decide together."""


def weights_written_on_rank_0_and_broadcast(name: str, written: bool = True) -> tuple[torch.Tensor, dict[str, int]]:
    torch.manual_seed(0)
    w, slopes = nn.Parameter(torch.randn(6, dtype=torch.float64)), torch.linspace(0.1, 1, 6, dtype=torch.float64)
    optimizer = Anderson(SGD([w], lr=0.1), **(WATCHING[name] if "gradients" in name else LAX | WATCHING[name]))
    for step in range(60):
        if written and step % 13 == 6:
            if dist.get_rank() == 0:
                with torch.no_grad():
                    w.mul_(1.1)
            dist.broadcast(w.data, 0)  # leaves no trace on other ranks
        w.grad = slopes * w.detach()
        optimizer.step()
    return w.detach().clone(), counts(optimizer)


@pytest.mark.parametrize("name", WATCHING)
def test_all_ranks_treat_alike_what_one_has_seen_written(name):
    (first, counts_first), (second, counts_second) = run(2, weights_written_on_rank_0_and_broadcast, name)
    _, undisturbed = run(2, weights_written_on_rank_0_and_broadcast, name, False)[0]
    assert torch.equal(first, second) and first.isfinite().all()
    assert counts_first == counts_second
    assert counts_first["accepted"] > 0
    if "pending" in name:
        assert counts_first["attempted"] > 5 and first.norm() < 1e-2
    else:
        assert 0 < counts_first["averaged"] < undisturbed["averaged"]


def writes_on_all_ranks(name: str, write: str) -> tuple[torch.Tensor, dict[str, int]]:
    """The same on all ranks, after every step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    options = WATCHING[name] if "gradients" in name else {"residual": "step", "history_size": 4} | WATCHING[name]
    optimizer = Anderson(Adam(net.parameters(), lr=0.05), **options)
    x = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for step in range(60):
        net.zero_grad()
        (net(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for p in net.parameters():
                if write == "decay":
                    p.mul_(0.999)
                elif write == "clamp":
                    p.clamp_(-0.5, 0.5)
                elif step % 20 == 19:
                    p.copy_(torch.linspace(-7, 9, p.numel(), dtype=p.dtype).view_as(p))
    return torch.cat([p.detach().flatten() for p in net.parameters()]), counts(optimizer)


@pytest.mark.parametrize("write", ["decay", "clamp", "other weights"])
@pytest.mark.parametrize("name", [name for name in WATCHING if "pending" in name])
def test_writes_on_all_ranks_leave_equal_weights_and_are_judged(name, write):
    (first, counts_first), (second, counts_second) = run(2, writes_on_all_ranks, name, write)
    assert torch.equal(first, second) and first.isfinite().all()
    assert counts_first == counts_second
    found = ("accepted", "rejected_gradient", "rejected_residual", "skipped_noisy", "skipped_no_descent")
    assert sum(counts_first.get(name, 0) for name in found) > 0
    if write == "decay":
        assert counts_first.get("rejected_outside_write", 0) == 0


def a_shard_written_on_rank_0() -> tuple[torch.Tensor, dict[str, int]]:
    torch.manual_seed(0)
    net = fully_shard(nn.Linear(4, 6).double(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = Anderson(SGD(net.parameters(), lr=0.05), residual="step", period=4, history_size=2, safeguard=None,
                         average=MovingAverage(3))  # fmt: skip
    x = torch.randn(8, 4).double()
    for step in range(20):
        if step == 6 and dist.get_rank() == 0:
            with torch.no_grad():
                net.weight.clamp_(-9, 9)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return net.weight.full_tensor().detach(), counts(optimizer)


def test_sharded_weights_that_one_rank_writes_to_do_not_make_the_others_wait():
    (first, counts_first), (second, counts_second) = run(2, a_shard_written_on_rank_0)
    assert torch.equal(first, second)
    assert counts_first == counts_second and counts_first["averaged"] > 0


def a_gradient_comes_late_and_on_rank_0_alone(options: dict[str, Any]) -> torch.Tensor:
    first, late = nn.Parameter(torch.ones(8, 3)), nn.Parameter(torch.ones(4, 2))
    optimizer = Anderson(SGD([first, late], lr=0.1), **options, storage=Storage(shard=True))
    for step in range(12):
        first.grad = first.detach() * torch.arange(24.0).view(8, 3) / 24
        late.grad = late.detach() * 0.5 if step > 5 and dist.get_rank() == 0 else None
        optimizer.step()
    return first.detach().clone()


@pytest.mark.parametrize("options", [LAX | {"period": 2}, {"residual": "gradient"}], ids=["step", "gradient"])
def test_gradients_do_not_decide_what_is_sent(options):
    first, second = run(2, a_gradient_comes_late_and_on_rank_0_alone, options)
    assert first.shape == second.shape == (8, 3)


def losses_that_a_safeguard_compares(look: bool) -> list[float]:
    """With or without a forward pass between backward and step, after which the weights stay gathered."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    x = torch.randn(16, 4).double()
    y = x.sin().sum(1, keepdim=True)
    options = {"residual": "step", "period": 2, "history_size": 2, "safeguard": "loss", "max_jump": 50.0}
    optimizer = Anderson(SGD(net.parameters(), lr=0.1), **options)
    seen: list[float] = []

    def loss() -> torch.Tensor:
        return (net(x) - y).square().mean()

    def loss_fn() -> torch.Tensor:
        seen.append(float(value := loss().detach()))
        return value

    for _ in range(8):
        optimizer.zero_grad()
        loss().backward()
        if look:
            with torch.no_grad():
                loss()
        optimizer.step(loss_fn=loss_fn)
        net.reshard()  # so that training itself has the new weights
    return seen


def test_the_loss_is_that_of_the_present_weights_whatever_was_gathered_before():
    def both() -> list[list[float]]:
        return [losses_that_a_safeguard_compares(look) for look in (False, True)]

    for without, with_look in run(2, both):
        assert without == with_look
        assert len(without) >= 4


class Curious(Training):
    """Evaluates after every step, and gives a loss that is evaluated without a graph."""

    def step(self, step: int, **given: Any) -> None:
        """Train on the same batch at every step."""
        self.backward()
        self.optimizer.step(loss_fn=torch.no_grad()(self.loss))
        with torch.no_grad():
            self.model(self.inputs)


def plain_forward(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The outputs of a model with these weights."""
    net = Net()
    net.load_state_dict(weights)
    return net(batch()[0]).detach()


def curious(layout: str) -> dict[str, Any]:
    training = Curious(NETWORK["loss"], layout).advance()
    return {**training.outcome(), "outputs": training.model(batch()[0]).detach().clone()}


def test_a_loss_without_graph_leaves_no_stale_weights_behind():
    expected = curious("single")
    for rank in run(2, curious, "fsdp on 2"):
        assert rank["counts"] == expected["counts"] and rank["counts"]["accepted"] >= 5
        assert distance(rank["weights"], expected["weights"]) <= 1e-12
        assert torch.allclose(rank["outputs"], plain_forward(rank["weights"]), rtol=0, atol=1e-12)
