"""Anderson on gradients: jumps, the test by the next gradient, noise and rest."""

from itertools import pairwise

import pytest
import torch
from reference import lbfgs_direction
from scipy import optimize
from smooth_losses import quadratic, softmax_regression, train
from torch import nn, optim
from torch.nn.functional import mse_loss

from torch_anderson import Anderson
from torch_anderson._anderson.quasi_newton import Secants

BASES = {
    "sgd": lambda params, **options: optim.SGD(params, lr=0.03, **options),
    "nesterov": lambda params, **options: optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, **options),
    "adam": lambda params, **options: optim.Adam(params, lr=3e-3, **options),
}


# ------------------------------------------------------------------------------------------------------------- jumps


def rows_of(pairs, size):
    """The rows of a history (previous minus present), and slots newest first, of pairs (point, gradient)."""
    differences = [(a[0] - b[0], a[1] - b[1]) for a, b in pairwise(pairs)]
    empty = torch.zeros_like(pairs[0][0])
    points = [d[0] for d in differences] + [empty] * (size - len(differences))
    gradients = [d[1] for d in differences] + [empty] * (size - len(differences))
    return torch.stack([*gradients, pairs[-1][1], *points]), list(reversed(range(len(differences))))


def random_pairs(n, count, seed=0):
    """Pairs of a convex function that is not quadratic."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, n, generator=generator, dtype=torch.float64)
    scales = torch.logspace(0, 2, n, dtype=torch.float64)
    return [(w, scales * w.sinh()) for w in points]


@pytest.mark.parametrize("count", [2, 4, 7])
def test_a_jump_is_the_direction_of_the_textbooks_two_loops(count):
    pairs = random_pairs(20, count)
    rows, slots = rows_of(pairs, size=8)
    secants = Secants((rows @ rows.T).tolist(), slots)
    weights = secants.jump(secants.least_squares(), explained=False)
    expected = lbfgs_direction(pairs)
    torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64) @ rows, expected, rtol=1e-9, atol=0)


def test_where_pairs_span_the_gradient_a_jump_goes_to_the_minimum_of_a_quadratic():
    _, _, matrix, centre = quadratic(n=4)
    points = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows, slots = rows_of([(point, matrix @ (point - centre)) for point in points], size=8)
    secants = Secants((rows @ rows.T).tolist(), slots)
    jump = torch.tensor(secants.jump(secants.least_squares(), explained=True), dtype=torch.float64) @ rows
    torch.testing.assert_close(points[-1] + jump, centre, rtol=0, atol=1e-5)  # a ridge of 1e-10 on unit columns


def test_a_trajectory_worked_out_by_hand():
    """f(x) = x^2 / 2, gradient x, plain steps of 0.5 x from x = 16: the fourth gradient makes the first jump."""
    x = nn.Parameter(torch.tensor([16.0], dtype=torch.float64))
    optimizer = Anderson(optim.SGD([x], lr=0.5))
    seen = []
    for _ in range(6):
        seen.append(x.item())
        x.grad = x.detach().clone()
        optimizer.step()
    assert seen == [16.0, 8.0, 4.0, 2.0, 0.0, 0.0]  # a pair has s = y, so H = 1 and the jump is -g
    assert optimizer.stats.counts["accepted"] == 1


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("closure", [False, True], ids=["gradient", "closure"])
def test_a_quadratic_is_solved_in_about_as_many_gradients_as_it_has_dimensions(base, closure):
    w, loss, _, centre = quadratic()
    train(Anderson(BASES[base]([w])), loss, 30, closure)
    torch.testing.assert_close(w.detach(), centre, rtol=0, atol=1e-6)


@pytest.mark.parametrize("base", BASES)
def test_a_convex_problem_takes_no_more_than_twice_the_gradients_of_scipys_lbfgs(base):
    model, loss = softmax_regression()
    start = [p.detach().clone() for p in model.parameters()]
    evaluations = []

    def function(x):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(x), model.parameters())
        model.zero_grad()
        value = loss()
        value.backward()
        evaluations.append(value.item())
        return value.item(), torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).numpy()

    x0 = torch.nn.utils.parameters_to_vector(start).numpy()
    lowest = optimize.minimize(function, x0, jac=True, method="L-BFGS-B", options={"ftol": 1e-14}).fun
    with torch.no_grad():
        for p, value in zip(model.parameters(), start, strict=True):
            p.copy_(value)
    losses = train(Anderson(BASES[base](model.parameters())), loss, 100)

    def needed(values):
        return next(i for i, value in enumerate(values) if value <= lowest + 1e-6)

    assert needed(losses) <= 2 * needed(evaluations)


# ------------------------------------------------------------------------------------------------------ the decision


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("base", BASES)
def test_decisions_agree_with_the_true_losses_of_a_convex_problem(base, seed):
    """If the gradient at the end of a jump does not point back, the loss is no higher there than at its start."""
    model, loss = softmax_regression(seed)
    optimizer = Anderson(BASES[base](model.parameters()))
    count = optimizer.stats.counts
    accepted, rises, start = 0, 0, None
    for _ in range(60):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        here = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        gradient = torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        before = count.copy()
        optimizer.step()
        refused = count["rejected_gradient"] > before["rejected_gradient"]
        if start is not None:
            point, lowest, steepest = start
            slope = gradient @ (here - point)
            if refused:
                assert slope > 0 or gradient.norm() > 4 * steepest
            else:
                accepted += 1
                rises += value.item() > lowest
                assert slope > 0 or value.item() <= lowest * (1 + 1e-12)
        if not refused:
            start = (here, value.item(), gradient.norm()) if count["attempted"] > before["attempted"] else None
        elif count["attempted"] == before["attempted"]:
            start = None
    assert accepted > 20
    assert rises <= 0.1 * accepted


def test_a_refused_jump_leaves_the_base_as_it_was_and_returns_its_loss():
    w, loss, _, _ = quadratic()
    base = optim.Adam([w], lr=1e-2)
    optimizer = Anderson(base)
    train(optimizer, loss, 6)
    steps, moments = base.state[w]["step"].clone(), base.state[w]["exp_avg"].clone()

    def far_off():  # where a gradient points back, steeply
        optimizer.zero_grad()
        w.grad = 1e6 * torch.ones_like(w)
        return torch.tensor(7.0)

    assert optimizer.step(far_off) == 7.0
    assert optimizer.stats.counts["rejected_gradient"] == 1
    torch.testing.assert_close(base.state[w]["step"], steps, rtol=0, atol=0)
    torch.testing.assert_close(base.state[w]["exp_avg"], moments, rtol=0, atol=0)


def test_after_three_refusals_the_weights_are_at_the_plain_point():
    w, loss, _, _ = quadratic()
    optimizer = Anderson(optim.SGD([w], lr=0.1))
    train(optimizer, loss, 8)
    optimizer.zero_grad()
    loss().backward()
    plain = w.detach() - 0.1 * w.grad
    optimizer.step()
    refused = optimizer.stats.counts["rejected_gradient"]
    for _ in range(3):
        assert not torch.equal(w.detach(), plain)
        w.grad = 1e6 * torch.ones_like(w)
        optimizer.step()
        refused += 1
        assert optimizer.stats.counts["rejected_gradient"] == refused
        if optimizer._driver.resting:  # earlier, if others were refused before
            break
    torch.testing.assert_close(w.detach(), plain, rtol=0, atol=0)


def test_a_jump_to_where_the_gradient_is_not_finite_is_taken_back_at_once():
    w, loss, _, _ = quadratic()
    optimizer = Anderson(optim.SGD([w], lr=0.1))
    train(optimizer, loss, 8)
    w.grad = torch.full_like(w, torch.inf)
    optimizer.step()
    assert w.isfinite().all()
    assert train(optimizer, loss, 40)[-1] < 1e-9


def test_without_safeguard_every_jump_stays():
    w, loss, _, _ = quadratic()
    optimizer = Anderson(optim.SGD([w], lr=0.1), safeguard=None)
    train(optimizer, loss, 14)
    assert optimizer.stats.counts["accepted"] == optimizer.stats.counts["attempted"] > 5


@pytest.mark.parametrize("seed", range(4))
def test_a_valley_that_the_base_leaves_by_rounding_alone_stays_solved(seed):
    """Rprop's steps depend on signs alone: where jumps were rounded like the point, it left the minimum again."""
    generator = torch.Generator().manual_seed(seed)
    x = (0.1 * torch.randn(10, dtype=torch.float64, generator=generator)).requires_grad_()

    def rosenbrock():
        return (100 * (x[1:] - x[:-1] ** 2).square().sum() + (1 - x[:-1]).square().sum()) / 1000

    train(Anderson(optim.Rprop([x], lr=0.01)), rosenbrock, 1000)
    assert rosenbrock().item() < 1e-9


def test_a_quadratic_is_minimised_after_a_write_from_outside():
    w, loss, _, _ = quadratic()
    optimizer = Anderson(optim.SGD([w], lr=0.1))
    train(optimizer, loss, 8)
    with torch.no_grad():
        w.zero_()
    assert train(optimizer, loss, 41)[-1] < 1e-12


# ------------------------------------------------------------------------------------------------------------- noise


def noisy_regression(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2000, 10, generator=generator)
    targets = inputs.sin().sum(1, keepdim=True) + torch.randn(2000, 1, generator=generator)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))

    def loss(size=batch):
        chosen = torch.randint(2000, (size,), generator=generator) if size else slice(None)
        return mse_loss(model(inputs[chosen]), targets[chosen])

    return model, loss


@pytest.mark.parametrize("seed", range(3))
def test_small_batches_are_left_to_the_base(seed):
    model, loss = noisy_regression(batch=16, seed=seed)
    optimizer = Anderson(optim.Adam(model.parameters(), lr=1e-3))
    train(optimizer, loss, 400)
    assert optimizer.stats.counts["attempted"] <= 20
    assert optimizer.stats.counts["skipped_noisy"] >= 8


@pytest.mark.parametrize("seed", range(10))
def test_when_the_noise_ends_a_jump_follows_within_40_steps(seed):
    model, loss = noisy_regression(batch=16, seed=seed)
    optimizer = Anderson(optim.Adam(model.parameters(), lr=1e-3))
    train(optimizer, loss, 200)
    before = optimizer.stats.counts["accepted"]
    train(optimizer, lambda: loss(0), 40)
    assert optimizer.stats.counts["accepted"] > before


def test_a_step_at_rest_does_nothing_but_the_bases_step():
    model, loss = noisy_regression(batch=16)
    optimizer = Anderson(optim.SGD(model.parameters(), lr=1e-2))
    while not optimizer._driver.resting:
        train(optimizer, loss, 1)
    optimizer.zero_grad()
    loss().backward()
    expected = [p.detach() - 1e-2 * p.grad for p in model.parameters()]
    bytes_before, k = optimizer._driver.bytes(), optimizer._driver.state.k
    optimizer.step()
    assert (optimizer._driver.bytes(), optimizer._driver.state.k) == (bytes_before, k)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("noise, expected", [(0.0, 0.0), (1.0, 0.7)])
def test_asymmetry_tells_noise_from_a_smooth_loss(noise, expected):
    generator = torch.Generator().manual_seed(0)
    _, _, matrix, _ = quadratic(n=200)
    found = []
    for _ in range(50):
        w, pairs = torch.randn(200, generator=generator, dtype=torch.float64), []
        for _ in range(4):
            g = (1 - noise) * matrix @ w + noise * torch.randn(200, generator=generator, dtype=torch.float64)
            pairs.append((w, g))
            w = w - 0.1 * g
        rows, slots = rows_of(pairs, size=4)
        found.append(Secants((rows @ rows.T).tolist(), slots).asymmetry(3))
    assert sum(found) / len(found) == pytest.approx(expected, abs=0.12)


@pytest.mark.parametrize(("clip", "seed"), [(1.0, 2), (0.1, 2), (0.1, 4)])
def test_gradient_clipping_does_not_hide_a_bad_jump(clip, seed):
    """A clipped gradient has a slope that is too small: jumps that multiplied the loss by 200 were accepted."""

    def last_losses(optimizer_of):
        generator = torch.Generator().manual_seed(seed + 1000)
        inputs = torch.randn(128, 6, generator=generator)
        targets = torch.sin(inputs @ torch.randn(6, 1, generator=generator))
        targets += 0.1 * torch.randn(128, 1, generator=generator)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer, losses = optimizer_of(optim.Adam(model.parameters(), lr=5e-4)), []
        for _ in range(120):
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
        return sorted(losses[-10:])[5]

    assert last_losses(Anderson) <= 1.05 * last_losses(lambda base: base)
