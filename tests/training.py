"""What the contract tests train: a small model, one optimizer of every kind, and a loop."""

import io

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from torch_anderson import Anderson

EAGER = {"residual": "step", "history_size": 4, "period": 3, "safeguard": None}
"""The paper's method; jumps early and nearly always."""
GRADIENTS = {"residual": "gradient"}
"""Jumps by gradients, as by default."""
both = pytest.mark.parametrize("options", [EAGER, GRADIENTS], ids=["step", "gradient"])
"""Both kinds of residuals."""


def eager(**options):
    """Options that jump early: the paper's method, unless residuals are to be gradients."""
    return ({"history_size": 4} if options.get("residual") == "gradient" else EAGER) | options


class ListState(Optimizer):
    """Momentum whose state is no dictionary: a list for each parameter, and one number for all of them."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p not in self.state:
                        self.state[p] = [torch.zeros_like(p), 0]
                    momentum, count = self.state[p]
                    self.state[p] = [momentum.mul_(0.5).add_(p.grad), count + 1]
                    p.add_(momentum, alpha=-group["lr"] * self.state["calls"] / (count + 1))
        return loss


class GroupCounter(Optimizer):
    """Counts its steps in the group, as a number and in a tensor that it changes in place."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group.setdefault("total", torch.zeros(())).add_(1)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(
                        p.grad, alpha=-group["lr"] * 2 / (1 + float(group["total"]) / group["k"]) ** group["k"] ** 0.1
                    )
        return loss


BASES = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "adamw_foreach": lambda params: AdamW(params, lr=1e-2, foreach=True),
    "adamw_fused": lambda params: AdamW(params, lr=1e-2, fused=True),
    "adagrad": lambda params: Adagrad(params, lr=0.05),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.2, max_iter=2, history_size=3),
    "list_state": ListState,
    "group_counter": GroupCounter,
}


FEW_BASES = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: Adam(params, lr=1e-2, foreach=True),
}
"""One base of each kind of state: none, a momentum, two moments."""


def left_alone(optimizer):
    """Whether the base makes plain steps, because jumps would falsify what it knows."""
    options = optimizer.options
    by_gradient = "gradient" in (getattr(options, "residual", None), getattr(options, "safeguard", None))
    return isinstance(optimizer.base, torch.optim.LBFGS) and by_gradient


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def batch(i, dtype=torch.float32):
    """Mostly the same problem, with a little that changes from batch to batch."""
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    x = x + 0.01 * torch.randn(32, 4, generator=torch.Generator().manual_seed(100 + i))
    return x.to(dtype), x.sin().sum(1, keepdim=True).to(dtype)


def loss_of(model, i):
    x, y = batch(i, next(model.parameters()).dtype)
    return (model(x) - y).square().mean()


def train(model, optimizer, steps, start=0, scheduler=None, **step_options):
    """Steps ``start`` to ``steps``; the losses."""
    losses = []
    for i in range(start, steps):

        def closure(i=i):
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure, **step_options).item())
        if scheduler is not None:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(losses[-1]) if plateau else scheduler.step()
    return losses


def make(base, dtype=torch.float32, **options):
    """A model and its accelerated optimizer."""
    model = make_model(dtype=dtype)
    return model, Anderson(BASES[base](model.parameters()), **eager(**options))


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same(ours, theirs):
    """Bit for bit, including the places of NaN."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def through_a_file(state_dict):
    """Saved, and loaded with nothing allowed but weights."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def learning_rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def counts(optimizer):
    """Counters, none of the numbers of the latest acceleration."""
    return {name: count for name, count in optimizer.stats.counts.items() if count}


def assert_counters_add_up(optimizer):
    flat = optimizer.stats.as_dict()
    rejected = sum(value for name, value in flat.items() if name.startswith("rejected_"))
    may_be_pending = (0, 1) if optimizer.options.safeguard in ("residual", "gradient") else (0,)
    assert flat["attempted"] - flat["accepted"] - rejected in may_be_pending
