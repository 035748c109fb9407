"""The textbook twin against what does not come from it: GMRES, the secant method, trajectories by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import TextbookAnderson
from scipy.sparse.linalg import gmres

UNGUARDED = {"safeguard": None, "max_gain": math.inf}


def moving_average(window, tolerance=0.1):
    return SimpleNamespace(window=window, tolerance=tolerance)


def iterate(fixed_point_map, start, steps, base=torch.optim.SGD, lr=1.0, **options):
    """`steps` steps of the twin over gradient descent whose step at learning rate 1 is `fixed_point_map`."""
    w = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    twin = TextbookAnderson(base([w], lr=lr), **{"safeguard": None, **options})
    for _ in range(steps):
        w.grad = (w - fixed_point_map(w)).detach()
        twin.step()
    return w.detach(), twin


def halfway_to_two(w):
    """w -> w/2 + 1. From 0: r = 1 at 0, r = 1/2 at 1, then g = (1/2) / (1/2 - 1) = -1, r - R g = 0."""
    return w / 2 + 1


def contraction(n):
    generator = np.random.default_rng(0)
    M = generator.standard_normal((n, n))
    return 0.9 * M / np.linalg.norm(M, 2), generator.standard_normal(n)


def linear_map(M, b):
    return lambda w: torch.from_numpy(M) @ w + torch.from_numpy(b)


def test_predicted_residuals_are_those_of_gmres():
    n = 8
    M, b = contraction(n)
    expected: list[float] = []
    gmres(np.eye(n) - M, b, rtol=1e-12, restart=n, callback=expected.append, callback_type="pr_norm")
    w = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    twin = TextbookAnderson(torch.optim.SGD([w], lr=1.0), history_size=n, period=1, **UNGUARDED)
    predicted = []
    for _ in range(n):
        residual = linear_map(M, b)(w).detach() - w.detach()
        w.grad = -residual
        twin.step()
        if twin.last:
            predicted.append(twin.last["gain"] * residual.norm().item() / np.linalg.norm(b))
    np.testing.assert_allclose(predicted, expected[: n - 1], rtol=1e-9)


def test_linear_problem_of_n_unknowns_is_solved_in_n_plus_1_steps():
    M, b = contraction(5)
    w, _ = iterate(linear_map(M, b), [0.0] * 5, steps=6, history_size=5, period=1, **UNGUARDED)
    np.testing.assert_allclose(w, np.linalg.solve(np.eye(5) - M, b), rtol=1e-10)


def test_one_column_in_one_dimension_is_the_secant_method():
    previous, present = 0.0, 1.0  # the first step is plain: cos 0 = 1
    for _ in range(4):
        f0, f1 = math.cos(previous) - previous, math.cos(present) - present
        previous, present = present, present - f1 * (present - previous) / (f1 - f0)
    w, _ = iterate(torch.cos, [0.0], steps=5, history_size=1, period=1)
    assert w.item() == pytest.approx(present, rel=1e-12)


# In each reading w = 1, r = 1/2, W = 1, R = -1/2, g = -1.
@pytest.mark.parametrize(
    ("mixing", "beta", "expected"),
    [
        ("paper", 1.0, 2.0),  # the three readings agree at 1
        ("b", 1.0, 2.0),
        ("anderson", 1.0, 2.0),
        ("paper", 0.5, 1 + 0.5 * (0.5 + 0.5)),  # w + beta (r - (W + R) g)
        ("b", 0.5, 1 + 0.5 + 0.5 * 0.5),  # w + r - beta (W + R) g
        ("anderson", 0.5, 1 + 1 + 0.5 * 0.0),  # w - W g + beta (r - R g)
    ],
)
def test_readings_of_beta_by_hand(mixing, beta, expected):
    w, twin = iterate(halfway_to_two, [0.0], steps=2, period=1, mixing=mixing, relaxation=beta)
    assert twin.last["coefficients"].tolist() == pytest.approx([-1.0])
    assert w.item() == pytest.approx(expected)


def test_regularization_is_relative_to_the_column():
    # The scaled column is -1, so y = -(1/2) / (1 + 1) and g = y / (1/2) = -1/2; r - R g = 1/4;
    # u - (W + R) g = 1.75.
    w, twin = iterate(halfway_to_two, [0.0], steps=2, period=1, regularization=1.0)
    assert twin.last["gain"] == pytest.approx(0.5)
    assert w.item() == pytest.approx(1.75)


def test_two_dimensions_one_column_by_hand():
    # w -> (w1/2, w2/4) from (4, 4): r = (-2, -3), then at (2, 1) r = (-1, -3/4); R = (1, 9/4), R.R = 97/16,
    # g = R.r / R.R = -(43/16) / (97/16) = -43/97; u = (1, 1/4), W + R = (-1, -3/4):
    # u - (W + R) g = (54/97, -8/97).
    halve_and_quarter = torch.tensor([0.5, 0.25], dtype=torch.float64)
    w, _ = iterate(lambda w: halve_and_quarter * w, [4.0, 4.0], steps=2, history_size=1, period=1)
    assert w.tolist() == pytest.approx([54 / 97, -8 / 97])


def test_old_pairs_are_read_at_the_present_learning_rate():
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    base = torch.optim.SGD([w], lr=0.5)
    twin = TextbookAnderson(base, period=1, safeguard=None)
    for lr in (0.5, 0.125):  # both pairs lie on the line lr (2 - w), whose root is 2 at any lr
        base.param_groups[0]["lr"] = lr
        w.grad = w.detach() - 2
        twin.step()
    assert w.item() == pytest.approx(2.0)


def test_history_is_reset_where_steps_are_not_proportional_to_the_learning_rate():
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    base = torch.optim.Rprop([w], lr=0.5)
    twin = TextbookAnderson(base, period=1, safeguard=None)
    for lr in (0.5, 0.5, 0.125):
        base.param_groups[0]["lr"] = lr
        w.grad = torch.ones_like(w)
        twin.step()
    assert len(twin.pairs) == 1


def test_pairs_of_two_groups_are_read_at_a_common_schedule():
    # Residuals lr (2 - w) in both groups: at any common factor the root is 2.
    params = [torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    base = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(params, (0.5, 0.5), strict=True)])
    twin = TextbookAnderson(base, period=2, safeguard=None)
    for factor in (1.0, 0.3):
        for p, group in zip(params, base.param_groups, strict=True):
            group["lr"] *= factor
            p.grad = p.detach() - 2
        twin.step()
    assert [p.item() for p in params] == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("rates", "kept"),
    [((0.1, 0.2), 2), ((0.03, 0.06), 2), ((0.1, 0.1), 1), ((0.1, 0.0), 1), ((0.1 * 0.7, 0.2 * 0.7), 2)],
)
def test_history_restarts_where_the_ratio_of_learning_rates_changes(rates, kept):
    params = [torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    base = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(params, (0.1, 0.2), strict=True)])
    twin = TextbookAnderson(base, period=5, safeguard=None)
    for present in ((0.1, 0.2), rates):
        for p, group, lr in zip(params, base.param_groups, present, strict=True):
            group["lr"] = lr
            p.grad = p.detach() - 2
        twin.step()
    assert (len(twin.pairs), twin.restarts) == (kept, 2 - kept)


def test_residual_safeguard_compares_norms_per_unit_of_the_largest_learning_rate():
    # Rates 1 and 1/2; residuals (1, 1/2) and (1/2, 1/4) make the jump. At rates 2 and 1 a residual of length below
    # 2 |(1/2, 1/4)| = 1.118 passes: here (1, 0.4), which is longer than (1/2, 1/4).
    first, second = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    base = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.5}])
    twin = TextbookAnderson(base, period=2, safeguard="residual")
    for rate, gradients in ((1.0, (-1.0, -1.0)), (1.0, (-0.5, -0.5)), (2.0, (-0.5, -0.4))):
        base.param_groups[0]["lr"], base.param_groups[1]["lr"] = rate, rate / 2
        first.grad, second.grad = (torch.full_like(first, gradient) for gradient in gradients)
        twin.step()
    assert twin.last["cause"] == "accepted"
    assert (first.item(), second.item()) == (pytest.approx(3.0), pytest.approx(1.4))


def test_average_is_fed_back_and_the_window_keeps_raw_points():
    # Steps of 1: raw 1, then raw 2 -> mean 1.5, then raw 2.5 -> mean of 2 and 2.5.
    w, twin = iterate(lambda w: w + 1, [0.0], steps=3, period=10, average=moving_average(2))
    assert w.item() == 2.25
    assert torch.cat(twin.window).tolist() == [2.0, 2.5]


def test_accepted_jump_restarts_the_window():
    # 1, then a jump from u = 3/2 to 2: the mean over [1, 2] would pull it back.
    w, twin = iterate(halfway_to_two, [0.0], steps=2, period=2, average=moving_average(2))
    assert w.item() == pytest.approx(2.0)
    assert len(twin.window) == 1


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"max_jump": 0.9}, "too_long"),  # the path so far is 1 long, so is the jump
        ({"max_gain": 0.4, "regularization": 1.0}, "no_gain"),  # the gain is 1/2
        ({"safeguard": "loss"}, "no_loss"),
    ],
)
def test_refused_jump_leaves_the_plain_step(options, cause):
    w, twin = iterate(halfway_to_two, [0.0], steps=2, period=1, **options)
    assert twin.last["cause"] == cause
    assert w.item() == 1.5


@pytest.mark.parametrize(("minimum", "cause", "end"), [(2.0, "accepted", 2.0), (1.5, "loss", 1.5)])
def test_loss_safeguard_compares_with_the_plain_point(minimum, cause, end):
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    twin = TextbookAnderson(torch.optim.SGD([w], lr=1.0), period=1, safeguard="loss")
    for _ in range(2):
        w.grad = (w - halfway_to_two(w)).detach()
        twin.step(loss_fn=lambda: (w - minimum).square().sum())
    assert twin.last["cause"] == cause
    assert w.item() == pytest.approx(end)


# Residuals 1 at 0 and 1/2 at 1 make the jump to 2. Momentum 1/2: the buffer is 1 after the first step, so the
# gradient 0 makes the second residual 1/2; after it the buffer is 1/2.
@pytest.mark.parametrize(
    ("next_residual", "cause", "end", "buffer"),
    [(0.25, "accepted", 2.25, -0.25), (-0.75, "residual", 1.5, -0.5), (math.nan, "residual", 1.5, -0.5)],
)
def test_residual_safeguard_decides_one_step_later(next_residual, cause, end, buffer):
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    base = torch.optim.SGD([w], lr=1.0, momentum=0.5)
    twin = TextbookAnderson(base, period=2, safeguard="residual")
    for grad in (-1.0, 0.0):
        w.grad = torch.full_like(w, grad)
        twin.step()
    assert twin.last["cause"] == "pending"
    assert w.item() == pytest.approx(2.0)
    w.grad = torch.full_like(w, 0.25 - next_residual)
    twin.step()
    assert (twin.last["cause"], twin.k) == (cause, 3)
    assert w.item() == pytest.approx(end)
    assert base.state[w]["momentum_buffer"].item() == pytest.approx(buffer)


def test_step_that_moves_nothing_is_not_counted():
    _, twin = iterate(lambda w: w, [1.0], steps=3, period=1, average=moving_average(2))
    assert (twin.k, twin.pairs, twin.window) == (0, [], [])


def test_warmup_neither_stores_nor_jumps():
    w, twin = iterate(halfway_to_two, [0.0], steps=2, period=1, warmup=2)
    assert (w.item(), twin.k, twin.pairs) == (1.5, 2, [])


def test_unmeasured_step_counts_where_there_is_a_gradient():
    _, twin = iterate(lambda w: w, [1.0], steps=3, period=5, store_period=2)
    assert twin.k == 1  # the first step is not stored, so nobody looks; the second is, and did nothing


def test_opted_out_group_takes_no_part():
    w, other = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    groups = [{"params": [w]}, {"params": [other], "anderson": False}]
    twin = TextbookAnderson(torch.optim.SGD(groups, lr=1.0), period=1, safeguard=None)
    for _ in range(2):
        w.grad, other.grad = (w - halfway_to_two(w)).detach(), -torch.ones_like(other)
        twin.step()
    assert (w.item(), other.item()) == (pytest.approx(2.0), 2.0)
