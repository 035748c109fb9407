"""Other code writes to the weights between steps: the safeguard goes on working, and no write is undone."""

import copy
from collections import Counter
from functools import partial
from statistics import geometric_mean, median

import pytest
import torch
from reference import TextbookAnderson
from resuming import resumed
from torch import nn, optim
from torch.nn.functional import mse_loss
from training import assert_counters_add_up, assert_same, counts, make_model, train, weights

from torch_anderson import Anderson, MovingAverage

STEP = {"residual": "step"}
PAPER = {"residual": "step", "safeguard": "residual"}
every_test = pytest.mark.parametrize("options", [{}, STEP, PAPER], ids=["gradient", "step", "paper"])

# ------------------------------------------------------------------------------------------ not worse than the base


def perceptron(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    return list(model.parameters()), lambda: mse_loss(model(x), torch.sin(3 * x))


def rosenbrock(seed):
    w = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64) + 0.1 * seed)
    return [w], lambda: 100 * (w[1] - w[0] ** 2) ** 2 + (1 - w[0]) ** 2


def least_squares(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(120, 40, generator=generator) * torch.logspace(0, -1.5, 40)
    targets = inputs.sum(1) + 0.3 * torch.randn(120, generator=generator)
    w = nn.Parameter(torch.randn(40, generator=generator))
    return [w], lambda: (inputs @ w - targets).square().mean()


def embedding(seed):
    """Its forward pass scales rows in place that are longer than allowed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(12, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 1))
    words = torch.cartesian_prod(torch.arange(12), torch.arange(12))
    targets = torch.sin(words[:, :1].float()) + torch.cos(0.7 * words[:, 1:].float())
    return list(model.parameters()), lambda: mse_loss(model(words), targets)


class Lookahead:
    """Slow weights, to which the weights return half of the way after every fifth step."""

    def __init__(self):
        self.slow, self.calls = {}, Counter()

    def __call__(self, p):
        slow = self.slow.setdefault(p, p.detach().clone())
        self.calls[p] += 1
        if self.calls[p] % 5 == 0:
            slow.lerp_(p, 0.5)
            p.copy_(slow)


def nothing(p):
    """The forward pass writes."""


WRITES = {
    "decay": lambda: lambda p: p.mul_(1 - 1e-5),
    "decay of the data": lambda: lambda p: p.data.mul_(1 - 1e-5),
    "clamp": lambda: lambda p: p.clamp_(-0.5, 0.5),
    "unit norm": lambda: lambda p: p.div_(p.norm()),
    "lookahead": Lookahead,
    "nothing": lambda: nothing,
}
SLOW = pytest.mark.slow
CASES = [
    *((rosenbrock, write) for write in ("decay", "decay of the data")),
    *((least_squares, write) for write in WRITES if write != "nothing"),
    *(pytest.param(perceptron, write, marks=SLOW) for write in ("decay", "decay of the data", "lookahead")),
    pytest.param(embedding, "nothing", marks=SLOW),
]
SGD_RATES = {rosenbrock: 1e-3}
BASES = {
    "SGD": lambda problem, params: optim.SGD(params, lr=SGD_RATES.get(problem, 0.1)),
    "Adam": lambda problem, params: optim.Adam(params, lr=3e-3),
}


def last_loss(problem, write, seed, optimizer_of, steps=400):
    """The median of the last 21 losses: some of them are those of jumps that are then refused."""
    params, loss_of_weights = problem(seed)
    optimizer, write, losses = optimizer_of(params), WRITES[write](), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of_weights()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            for p in params:
                write(p)
    return median(losses[-21:]), optimizer


@pytest.mark.parametrize("options", [{}, STEP], ids=["gradient", "step"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("problem", "write"), CASES)
def test_writes_after_every_step_leave_it_no_worse_than_its_base(problem, write, base, options):
    """Jumps of steps may lead a network into another valley, better or worse: there seeds are judged together."""
    ratios, scatters = [], problem is perceptron and options
    for seed in range(6 if scatters else 3):
        base_of = partial(BASES[base], problem)
        alone, _ = last_loss(problem, write, seed, base_of)
        ours, optimizer = last_loss(problem, write, seed, lambda params: Anderson(base_of(params), **options))  # noqa: B023
        assert scatters or ours <= 1.5 * alone, f"seed {seed}: {ours} instead of {alone}, {counts(optimizer)}"
        ratios.append(ours / alone)
        assert_counters_add_up(optimizer)
        assert optimizer.stats.counts["rejected_outside_write"] <= optimizer.stats.counts["attempted"] / 4
    assert geometric_mean(ratios) <= 1.05


# ------------------------------------------------------------------------------------------- trajectories by hand


def moved(optimizer, w, gradient, write=None):
    """A step with this gradient, then a write; the weights."""
    w.grad = torch.tensor(gradient, dtype=w.dtype)
    optimizer.step()
    if write is not None:
        with torch.no_grad():
            w.add_(torch.tensor(write, dtype=w.dtype))
    return w.tolist()


@pytest.fixture
def w():
    return nn.Parameter(torch.zeros(2, dtype=torch.float64))


def jump_of_steps(w, safeguard, write):
    """Steps of 1 and 1/2 from 0 and 1 lead to 3/2 and then to 2: the jump from there is (1/2, 0)."""
    base = optim.SGD([w], lr=1.0)
    optimizer = Anderson(base, residual="step", period=2, regularization=0.0, safeguard=safeguard)
    moved(optimizer, w, [-1.0, 0.0])
    assert moved(optimizer, w, [-0.5, 0.0]) == pytest.approx([2.0, 0.0])
    with torch.no_grad():
        w.add_(torch.tensor(write, dtype=w.dtype))
    return optimizer


@pytest.mark.parametrize("safeguard", ["gradient", "residual"])
def test_a_refused_jump_of_steps_leaves_a_write_across_it(w, safeguard):
    optimizer = jump_of_steps(w, safeguard, [0.0, 0.1])
    assert moved(optimizer, w, [3.0, 0.0]) == pytest.approx([1.5, 0.1])
    assert optimizer.stats.counts[f"rejected_{safeguard}"] == 1


@pytest.mark.parametrize("safeguard", ["gradient", "residual"])
def test_a_refused_jump_of_steps_takes_back_what_a_write_left_of_it(w, safeguard):
    """2 becomes 1.9: 4/5 of the jump are left, and 3/2 stays, where a decay of 0.95 would have made 1.425 of it."""
    optimizer = jump_of_steps(w, safeguard, [-0.1, 0.1])
    assert moved(optimizer, w, [3.0, 0.0]) == pytest.approx([1.5, 0.1])


@pytest.mark.parametrize("safeguard", ["gradient", "residual"])
def test_an_accepted_jump_of_steps_leaves_all_writes(w, safeguard):
    optimizer = jump_of_steps(w, safeguard, [-0.1, 0.1])
    assert moved(optimizer, w, [-0.01, 0.0]) == pytest.approx([1.91, 0.1])
    assert optimizer.stats.counts["accepted"] == 1


def test_a_write_is_a_part_of_the_way_by_which_a_jump_of_steps_is_judged(w):
    """D = (1, 0) + (0, 1): g'D = 0.9 - 0.9 <= 0.3 (-g D) = 0.15, which g' along the jump alone exceeds."""
    optimizer = jump_of_steps(w, "gradient", [0.0, 1.0])
    moved(optimizer, w, [0.9, -0.9])
    assert optimizer.stats.counts["accepted"] == 1
    without_write = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = jump_of_steps(without_write, "gradient", [0.0, 0.0])
    moved(optimizer, without_write, [0.9, -0.9])
    assert optimizer.stats.counts["rejected_gradient"] == 1


def test_a_refused_jump_of_steps_leaves_the_base_as_it_was(w):
    """Its gradient is one that the base has not seen: momentum goes on from the step before the jump."""
    base = optim.SGD([w], lr=1.0, momentum=0.5)
    optimizer = Anderson(base, residual="step", period=2, regularization=0.0)
    moved(optimizer, w, [-1.0, 0.0])
    moved(optimizer, w, [-0.1, 0.0])  # a step of 0.6 with momentum, and the jump
    kept = copy.deepcopy(base.state_dict())
    assert moved(optimizer, w, [3.0, 0.0]) == pytest.approx([1.6, 0.0])
    assert optimizer.stats.counts["rejected_gradient"] == 1
    assert_same([base.state[w]["momentum_buffer"]], [kept["state"][0]["momentum_buffer"]])


@every_test
def test_other_weights_stay(w, options):
    """They are far away, whatever the gradient there is; the base makes its step from them."""
    if not options:
        optimizer, _, _jump = jump_of_gradients(w)
    else:
        optimizer = jump_of_steps(w, options.get("safeguard", "auto"), [0.0, 0.0])
    with torch.no_grad():
        w.copy_(torch.tensor([-70.0, 90.0]))
    lr = optimizer.param_groups[0]["lr"]
    assert moved(optimizer, w, [5.0, 3.0]) == pytest.approx([-70 - 5 * lr, 90 - 3 * lr])
    assert optimizer.stats.counts["rejected_outside_write"] == 1
    assert optimizer.stats.counts["restarts"] == 1


def test_other_weights_across_a_short_jump_begin_a_history_of_their_own():
    """They are closer than the path through all points is long, but farther from the jump than its length."""
    ours, other = (nn.Parameter(torch.zeros(8, dtype=torch.float64)) for _ in range(2))
    optimizer = Anderson(optim.SGD([ours], lr=1.0), residual="step", period=2, regularization=1e-4)
    twin = TextbookAnderson(optim.SGD([other], lr=1.0), period=2, regularization=1e-4)
    first, second = torch.eye(8, dtype=torch.float64)[:2]
    later = torch.randn(9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for k, gradient in enumerate([-first, -0.5 * first, 10 * first, *later], start=1):
        for each, w in ((optimizer, ours), (twin, other)):
            moved(each, w, gradient.tolist(), write=second.tolist() if k == 2 else None)
        assert ours.tolist() == pytest.approx(other.tolist()), f"step {k}"
    assert optimizer.stats.counts["rejected_outside_write"] == 1
    assert optimizer.stats.counts["attempted"] + optimizer.stats.counts["skipped_no_descent"] > 1


def jump_of_gradients(w):
    """The first jump of the default on a quadratic: the end of the base's step, and the jump from there."""
    optimizer = Anderson(optim.SGD([w], lr=0.1))
    with torch.no_grad():
        w.copy_(torch.tensor([4.0, 2.0]))
    curvature = torch.tensor([1.0, 0.2], dtype=w.dtype)
    while not optimizer.stats.counts["attempted"]:
        before = w.detach().clone()
        w.grad = curvature * before
        optimizer.step()
        plain = before - 0.1 * w.grad
    return optimizer, plain, w.detach() - plain


@pytest.mark.parametrize("size", [0.01, 0.5])
def test_a_refused_jump_of_gradients_leaves_a_write_across_it(w, size):
    optimizer, plain, jump = jump_of_gradients(w)
    across = size * torch.stack([-jump[1], jump[0]])
    with torch.no_grad():
        w.add_(across)
    steep = 100 * jump / jump.norm()
    shortened = moved(optimizer, w, steep.tolist())
    assert optimizer.stats.counts["rejected_gradient"] == 1
    # A short write allows a shorter jump, from the plain point with the write on; after a long one it ends there.
    left = torch.tensor(shortened, dtype=w.dtype) - plain - across
    assert torch.linalg.vecdot(left, across).item() == pytest.approx(0.0, abs=1e-12)
    part = (left @ jump / (jump @ jump)).item()
    assert part == pytest.approx(0.1 if size < 0.1 else 0.0, abs=1e-12)


def test_a_refused_jump_of_gradients_takes_back_what_a_write_left_of_it(w):
    optimizer, plain, jump = jump_of_gradients(w)
    with torch.no_grad():
        w.sub_(0.6 * jump)
    assert moved(optimizer, w, (100 * jump).tolist()) == pytest.approx(plain.tolist())


def test_a_write_that_cuts_a_jump_off_in_one_parameter_leaves_nothing_of_it_in_another():
    """With one decomposition for all parameters, half of the jump of both would stay, with opposite signs."""
    pair = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    optimizer = Anderson(optim.SGD(pair, lr=1.0), residual="step", period=2, regularization=0.0)

    def step(gradient):
        for p in pair:
            p.grad = torch.full_like(p, gradient)
        optimizer.step()

    step(-1.0)
    step(-0.5)
    assert [p.item() for p in pair] == pytest.approx([2.0, 2.0])  # a jump from 3/2, as above
    with torch.no_grad():
        pair[0].clamp_(max=1.5)
    step(3.0)
    assert optimizer.stats.counts["rejected_gradient"] == 1
    assert [p.item() for p in pair] == pytest.approx([1.5, 1.5])


def test_jumps_come_to_rest_under_writes():
    """On Rosenbrock's function nearly all are refused where weights decay strongly between steps: few are attempted."""
    params, loss_of_weights = rosenbrock(0)
    optimizer = Anderson(optim.Adam(params, lr=3e-3))
    for _ in range(400):
        optimizer.zero_grad()
        loss_of_weights().backward()
        optimizer.step()
        with torch.no_grad():
            params[0].mul_(1 - 1e-5)
    found = optimizer.stats.counts
    # Near the minimum a refused jump may be shorter than the decay, which then stays as other weights would.
    decided = found["accepted"] + found["rejected_gradient"] + found["rejected_outside_write"]
    assert decided >= found["attempted"] - 1
    assert found["rejected_outside_write"] < found["rejected_gradient"]


# ------------------------------------------------------------------------------------------------------ checkpoints


@every_test
@pytest.mark.parametrize("average", [None, MovingAverage(3, tolerance=0.0)])
@pytest.mark.parametrize("stop", [4, 5, 6, 7, 8])
def test_a_checkpoint_between_a_write_and_the_next_step_resumes_bit_for_bit(options, average, stop):
    if average and not options:
        pytest.skip("averages are for steps")
    options = {**options, "history_size": 4, **({"average": average} if average else {})}

    def build():
        model = make_model()
        return model, Anderson(optim.Adam(model.parameters(), lr=0.05), **options)

    def write(model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)

    model, optimizer = build()
    train(model, optimizer, stop)
    write(model)
    again, other = resumed(model, optimizer, build)
    for i in range(stop, 20):
        for each, its_optimizer in ((model, optimizer), (again, other)):
            train(each, its_optimizer, i + 1, start=i)
            write(each)
        assert_same(weights(again), weights(model))
    assert counts(other) == counts(optimizer)
    assert counts(optimizer).get("attempted", 0) + counts(optimizer).get("skipped_no_descent", 0) > 0
