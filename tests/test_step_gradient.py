"""Jumps of steps that the next gradient decides: never worse than the base, and at rest where they are refused."""

import itertools
from functools import partial
from statistics import median

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import mse_loss
from training import counts

from torch_anderson import Anderson, MovingAverage

BASES = {
    "Adam": partial(optim.Adam, lr=1e-3),
    "SGD": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9),
}


def losses(seed, optimizer_of, steps=1500):
    """A whole batch and 25 weights, without noise."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    optimizer, found = optimizer_of(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), torch.sin(3 * x))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"period": 5}], ids=str)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("seed", range(3))
def test_a_small_network_ends_no_worse_than_with_the_base_alone(seed, base, options):
    ours = losses(seed, lambda params: Anderson(BASES[base](params), residual="step", **options))
    alone = losses(seed, BASES[base])
    assert median(ours[-21:]) <= 1.05 * median(alone[-21:])


def moved(optimizer, w, *gradients):
    """Steps with these gradients; the weight."""
    for gradient in gradients:
        w.grad = torch.full_like(w, gradient)
        optimizer.step()
    return w.item()


def pending(**options):
    """Steps of 1 and 1/2 from 0 and 1 make the jump from 3/2 to 2, a displacement of 1 from the last gradient, -1/2."""
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Anderson(optim.SGD([w], lr=1.0), residual="step", period=2, regularization=0.0, **options)
    assert moved(optimizer, w, -1.0, -0.5) == pytest.approx(2.0)
    return optimizer, w


def test_the_next_gradient_is_the_default_test():
    optimizer, _ = pending()
    assert optimizer.options.safeguard == "gradient"


@pytest.mark.parametrize("safeguard", ["auto", "gradient"])
@pytest.mark.parametrize("gradient, passes", [(0.14, True), (0.16, False), (-0.2, True)])
def test_a_jump_passes_if_the_slope_at_its_end_is_at_most_three_tenths_of_the_descent_at_its_start(
    safeguard, gradient, passes
):
    optimizer, w = pending(safeguard=safeguard)
    assert moved(optimizer, w, gradient) == pytest.approx(2 - gradient if passes else 1.5)
    assert counts(optimizer)["accepted" if passes else "rejected_gradient"] == 1


def test_a_jump_is_refused_where_the_gradient_is_more_than_four_times_as_long():
    w = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    for size, cause in ((1.9, "accepted"), (2.1, "rejected_gradient")):
        with torch.no_grad():
            w.zero_()
        optimizer = Anderson(optim.SGD([w], lr=1.0), residual="step", period=2, regularization=0.0)
        for gradient in ([-1.0, 0.0], [-0.5, 0.0], [0.0, size]):
            w.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
        assert optimizer.stats.counts[cause] == 1


def test_a_jump_that_leads_uphill_is_skipped():
    """Momentum goes on against the gradient: the way to the jump has no descent."""
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Anderson(optim.SGD([w], lr=1.0, momentum=0.9), residual="step", period=2, regularization=0.0)
    moved(optimizer, w, -1.0, 0.4)
    assert counts(optimizer)["skipped_no_descent"] == 1
    assert w.item() == pytest.approx(1.5)


def test_rests_after_refusals_become_twice_as_long():
    """Jumps are attempted after 4, 8, 16 base steps without one; steps are made all the time but for the refusals."""
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Anderson(optim.SGD([w], lr=1e-3), residual="step", regularization=0.0)
    attempts, base_steps = [], 0
    for step in range(80):
        before = optimizer.stats.counts.copy()
        # A slope that steps reduce and jumps reverse.
        w.grad = torch.full_like(w, 5.0 if before["attempted"] > before["rejected_gradient"] else -1 + step / 1000)
        optimizer.step()
        made = optimizer.stats.counts - before
        base_steps += not made["rejected_gradient"]
        if made["attempted"]:
            attempts.append(base_steps)
    gaps = [b - a - 1 for a, b in itertools.pairwise(attempts)]
    assert gaps == [4, 8, 16, 32][: len(gaps)]
    assert len(gaps) >= 3


def test_a_refused_jump_under_an_average_ends_at_the_average_without_it():
    """Points 1, 3/2 and the jump to 2; the window of two at every step has 1 and 3/2 without the jump."""
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    average = MovingAverage(2, tolerance=0.0)
    optimizer = Anderson(optim.SGD([w], lr=1.0), residual="step", period=1, regularization=0.0, average=average)
    moved(optimizer, w, -1.0)
    assert w.item() == pytest.approx(1.0)  # one point is no window
    moved(optimizer, w, -0.5)
    assert w.item() == pytest.approx((1 + 2) / 2)
    moved(optimizer, w, 5.0)
    assert counts(optimizer)["rejected_gradient"] == 1
    assert w.item() == pytest.approx((1 + 1.5) / 2)


class Unknown(optim.Optimizer):
    """Gradient descent with a weight decay of its own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize(("safeguard", "gradient", "cause"), [
    ("auto", 0.14, "accepted"),
    ("auto", 0.4, "rejected_gradient"),
    ("residual", 0.4, "accepted"),  # the residual is shorter than 1/2, whatever the slope
    ("residual", 0.6, "rejected_residual"),
])  # fmt: skip
def test_the_gradient_decides_with_a_base_of_unknown_decay_unless_the_residual_is_asked_to(safeguard, gradient, cause):
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    base = Unknown([w], lr=1.0)
    optimizer = Anderson(base, residual="step", period=2, regularization=0.0, safeguard=safeguard)
    assert moved(optimizer, w, -1.0, -0.5, gradient) == pytest.approx(2 - gradient if cause == "accepted" else 1.5)
    assert counts(optimizer)[cause] == 1


# --------------------------------------------------------------------------- jumps beyond the numbers of the weights


@pytest.mark.parametrize("options", [{}, {"safeguard": None}], ids=str)
@pytest.mark.parametrize("residual", ["gradient", "step"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_jump_that_overflows_in_the_type_of_the_weights_is_not_made(dtype, residual, options):
    """The slopes are those of a quadratic whose minimum is beyond the largest number."""
    scale = torch.finfo(dtype).max / 65504
    w = nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = Anderson(optim.SGD([w], lr=50.0 * scale), residual=residual, **options)
    for _ in range(14):
        slopes = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64) + w.detach().double() * (1e-5 / scale)
        w.grad = slopes.to(dtype)
        optimizer.step()
        assert w.isfinite().all()
    found = optimizer.stats.counts  # rounded to float16, some slopes rise towards the jump
    assert found["rejected_nonfinite"] + found["skipped_no_descent"] > 0


class OwnDecay(optim.Optimizer):
    """Normalised steps and decoupled decay, as of an optimizer that the library does not know."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * p.grad.sign())


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_also_decides_where_the_bases_decay_is_unknown(seed):
    """The paper's residuals, the steps' signs, say nothing about the loss there, which rose by a factor of 10^5."""
    ours = losses(seed, lambda params: Anderson(OwnDecay(params, lr=1e-3), residual="step"), steps=400)
    alone = losses(seed, lambda params: OwnDecay(params, lr=1e-3), steps=400)
    assert median(ours[-21:]) <= 1.05 * median(alone[-21:])


def test_lbfgs_makes_plain_steps(caplog):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    twin = nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(20, 3)
    for each, wrap in ((model, lambda base: Anderson(base, residual="step")), (twin, lambda base: base)):
        optimizer = wrap(optim.LBFGS(each.parameters(), max_iter=2))

        def closure(each=each, optimizer=optimizer):
            optimizer.zero_grad()
            loss = mse_loss(each(x), x.sum(1, keepdim=True).sin())
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)
    assert torch.equal(model.weight, twin.weight)
    assert "keeps pairs" in caplog.text
