"""Anderson on gradients: the function that is minimised, with weight decay, groups and schedules."""

import pytest
import torch
from smooth_losses import quadratic, train
from torch import nn, optim

from torch_anderson import Anderson

DECAYS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.3),
    "nesterov": lambda p: optim.SGD(p, lr=0.03, momentum=0.9, nesterov=True, weight_decay=0.3),
    "maximize": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.3, maximize=True),
    "adam": lambda p: optim.Adam(p, lr=1e-3, weight_decay=0.3),
    "adam, decoupled": lambda p: optim.Adam(p, lr=1e-3, weight_decay=0.3, decoupled_weight_decay=True),
    "adamw": lambda p: optim.AdamW(p, lr=1e-3, weight_decay=0.3),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, weight_decay=0.3),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.3, weight_decay=0.3),
    "nadam": lambda p: optim.NAdam(p, lr=1e-3, weight_decay=0.3),
    "asgd": lambda p: optim.ASGD(p, lr=0.1, lambd=0.2, alpha=0.0, t0=1e9, weight_decay=0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DECAYS)
def test_the_minimum_is_that_of_the_base_run_to_the_end(name):
    """For every kind of weight decay; the base alone takes thousands of steps, with a rate that falls to 0."""
    sign = -1.0 if name == "maximize" else 1.0
    ends = []
    for wrap, steps in ((lambda base: base, 20_000), (Anderson, 60)):
        w, loss, _, _ = quadratic(n=4, condition=10.0)
        base = DECAYS[name]([w])
        optimizer = wrap(base)
        rate = base.param_groups[0]["lr"]
        for step in range(steps):
            base.param_groups[0]["lr"] = rate * (1 - 0.999 * step / steps)
            optimizer.zero_grad()
            (sign * loss()).backward()
            optimizer.step()
        ends.append(w.detach().clone())
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=2e-3)


def test_a_base_whose_weight_decay_is_unknown_is_left_alone_with_a_message(caplog):
    class Unknown(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "weight_decay": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad + 0.1 * p.data.sign(), alpha=-0.1)

    w, loss, _, _ = quadratic()
    optimizer = Anderson(Unknown([w]))
    train(optimizer, loss, 20)
    assert optimizer.stats.counts["attempted"] == 0
    assert "residual='step'" in caplog.text


@pytest.mark.parametrize("rate", [0.0, 1e-9])
def test_a_group_whose_rate_is_next_to_nothing_stays_where_it_is(rate):
    weights = [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2)]
    centre = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    optimizer = Anderson(optim.SGD([{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": rate}]))
    train(optimizer, lambda: sum(((w - centre) ** 2 * centre).sum() for w in weights), 30)
    torch.testing.assert_close(weights[0].detach(), centre, rtol=0, atol=1e-6)
    assert weights[1].abs().max() < 1e-6


def test_groups_with_different_rates_reach_the_common_minimum():
    weights = [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2)]
    centre = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    optimizer = Anderson(optim.SGD([{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.003}]))
    train(optimizer, lambda: sum(((w - centre) ** 2 * centre).sum() for w in weights), 30)
    for w in weights:
        torch.testing.assert_close(w.detach(), centre, rtol=0, atol=1e-6)


def test_a_schedule_does_not_disturb_the_history():
    w, loss, _, centre = quadratic()
    base = optim.SGD([w], lr=0.1)
    optimizer = Anderson(base)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    for _ in range(30):
        train(optimizer, loss, 1)
        schedule.step()
    assert optimizer.stats.counts["restarts"] == 0
    torch.testing.assert_close(w.detach(), centre, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"relaxation": 0.5}, {"store_period": 2}, {"max_jump": 2.0}, {"safeguard": "residual"}, {"safeguard": "loss"}],
    ids=str,
)
def test_options_of_the_papers_method_are_refused_without_it(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"Invalid {name}"):
        Anderson(optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), **options)
    if name != "safeguard":
        Anderson(optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), residual="step", **options)
