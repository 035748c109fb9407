"""Jumps along the tangent on several ranks: own samples on each, one decision, the same bits of weights."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import failures, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import grad
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Adam

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
        objective.terms["only"] = Term(lambda u, x: u(x) - x.mean(), x)
        optimizer.step(objective)
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
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        optimizer._driver.accelerate(objective.bind())
    finally:
        skipped = optimizer.stats.counts["skipped_nonfinite_outputs"]
    return {"skipped": skipped, "same": all(map(torch.equal, before, model.parameters()))}


def test_what_one_rank_cannot_use_no_rank_uses() -> None:
    assert run(2, nan_on_one_rank) == [{"skipped": 1, "same": True}] * 2


def bend(u: Any, x: Tensor) -> Tensor:
    """The residual of u'' + 9 sin(3 x) = 0: derivatives within torch.func, as a physics-informed network has them."""
    return grad(lambda y: grad(u)(y).sum())(x).sum() + 9 * torch.sin(3 * x.sum())


def solved(wrapped: bool, base: str) -> dict[str, Any]:
    model = network(8)
    whole = DistributedDataParallel(model) if wrapped else model
    torch.manual_seed(10 + dist.get_rank())
    objective = Objective(
        whole,
        inside=Term(bend, lambda k: 2 * torch.rand(k, 1, dtype=torch.float64) - 1, count=30 + 20 * dist.get_rank()),
        ends=Term(lambda u, x: u(x) - torch.sin(3 * x.sum()), torch.tensor([[-1.0], [1.0]]).double()),
    )
    optimizer = GaussNewton(BASES[base](model.parameters()))
    losses = [float(optimizer.step(objective)) for _ in range(40)]
    for _ in range(5):  # the base alone, on samples for one step
        losses.append(float(optimizer.step(objective.draw())))
    return {
        "weights": [p.detach() for p in model.parameters()],
        "losses": losses,
        "counts": dict(optimizer.stats.counts),
    }


BASES: dict[str, Any] = {
    "Adam": lambda params: Adam(params, lr=1e-3),
    "L-BFGS": lambda params: LBFGS(params, max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("base", BASES)
def test_a_physics_informed_network_has_the_same_bits_on_all_ranks(wrapped: bool, base: str) -> None:
    one, other = run(2, solved, wrapped, base)
    assert one["losses"] == other["losses"] and one["counts"] == other["counts"]
    assert all(map(torch.equal, one["weights"], other["weights"]))
    assert one["losses"][-1] < 1e-2 * one["losses"][0] and one["counts"]["skipped_given_samples"] == 5


def both(u: Any, x: Tensor) -> Tensor:
    return bend(u, x) + u(x)  # type: ignore[no-any-return]


def gradients_of(closure: Any) -> list[Tensor]:
    closure()
    return [p.grad for p in closure.objective.module.parameters()]


def plain_gradients() -> list[Tensor]:
    objective = Objective(DistributedDataParallel(network(5)), only=Term(both, X[dist.get_rank() :: 2]))
    return gradients_of(objective.bind())


def test_gradients_of_an_objective_with_a_wrapped_model_are_means_over_ranks() -> None:
    expected = gradients_of(Objective(network(5), only=Term(both, X)).bind())
    one, other = run(2, plain_gradients)
    assert all(map(torch.equal, one, other))
    torch.testing.assert_close(one, expected)


def with_other_terms(kind: str) -> str:
    model, rank = network(5), dist.get_rank()
    terms = {"only": Term(sine, X), "more": Term(lambda u, x: u(x), X, weight=2.0 + (kind == "weight") * rank)}
    if kind == "missing" and rank:
        del terms["more"]
    elif kind == "order" and rank:
        terms = dict(reversed(terms.items()))
    optimizer = GaussNewton(Adam(model.parameters()))
    try:
        if kind == "no objective" and rank:
            optimizer.step(lambda: sine(model, X).square().mean().backward())
        else:
            optimizer.step(Objective(model, **terms))
    except RuntimeError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("kind", ["missing", "order", "weight", "no objective"])
def test_ranks_with_other_terms_are_refused_at_the_first_step(kind: str) -> None:
    for message in run(2, with_other_terms, kind):
        assert "Ranks 0 and 1 differ in" in message and "term" in message


def with_another_number_on_one_rank() -> dict[str, Any]:
    model, settings = network(6), {"factor": 1.0}
    objective = Objective(model, only=Term(lambda u, x: u(x) - settings["factor"] * torch.sin(3 * x.sum()), X))
    optimizer, losses = GaussNewton(Adam(model.parameters(), lr=1e-3)), []
    for step in range(30):
        if step == 10 and dist.get_rank():
            settings["factor"] = 2.0
        losses.append(float(optimizer.step(objective)))
    return {"weights": [p.detach() for p in model.parameters()], "losses": losses}


def test_a_number_that_changes_on_one_rank_is_noticed_by_all() -> None:
    one, other = run(2, with_another_number_on_one_rank)
    assert one["losses"] == other["losses"] and one["losses"][10] > 10 * one["losses"][9]
    assert all(map(torch.equal, one["weights"], other["weights"]))


def sharded() -> str:
    model = network(8)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    try:
        GaussNewton(Adam(model.parameters())).step(Objective(model, only=Term(sine, X)))
    except ValueError as problem:
        return str(problem)
    return ""


def test_sharded_parameters_are_refused_at_the_first_step_with_what_to_do() -> None:
    for message in failures(run(2, sharded)):
        assert "sharded" in message and "Use Anderson(base)" in message
