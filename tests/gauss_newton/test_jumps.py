"""Jumps against SciPy, NumPy and dense Levenberg-Marquardt steps computed with torch.func."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from driven import (
    EAGER,
    FIRST,
    Cone,
    assert_counters_add_up,
    driven,
    predictions,
    quadratic,
    train,
    trained_plainly,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize as scipy_minimize
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from torch.optim import SGD
from training import assert_same, make_model, weights

from torch_anderson import GaussNewton
from torch_anderson._gauss_newton.solve import LinearModel, solve_damped
from torch_anderson._gauss_newton.solve import quadratic as loss_around
from torch_anderson._gauss_newton.state import FIXED
from torch_anderson._tensors.evaluate import read

RATE = 0.05


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def levenberg_marquardt(values, columns, damping):
    """argmin |values + columns' a|^2 + damping * sum |column_i|^2 a_i^2, by one least-squares problem."""
    penalty = np.sqrt(damping) * np.diag(np.linalg.norm(columns, axis=1))
    right = np.concatenate([-values, np.zeros(len(columns))])
    return np.linalg.lstsq(np.vstack([columns.T, penalty]), right, rcond=None)[0]


# ------------------------------------------------------------------------------------------------ jumps, by hand


def two_residuals(model):
    """Tensors of different sizes, so that each mean counts."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(10, 4)
    return model(x) - x.sum(1, keepdim=True).sin(), 2 * model(x[:3]) - 1


def mean_squares(found, loss):
    parts = found if loss == "residual" else [found[0] - found[1]]
    return sum(part.square().mean() for part in parts)


def residual_vector(model, outputs, loss):
    """The vector whose squares add up to the loss, as a function of flat weights."""
    shapes = {name: p.shape for name, p in model.named_parameters()}

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            found = outputs(self.model)
            parts = found if loss == "residual" else [found[0] - found[1]]
            return torch.cat([part.reshape(-1) / part.numel() ** 0.5 for part in parts])

    def at(vector):
        pieces = vector.split([shape.numel() for shape in shapes.values()])
        named = {f"model.{name}": piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        return functional_call(Wrapped(), named, ())

    return at


def dense_jump(at, point, directions, damping):
    """The Levenberg-Marquardt step in the span of some directions."""
    directions = torch.stack(directions)
    directions = directions / directions.norm(dim=1, keepdim=True)
    columns = directions @ jacrev(at)(point).detach().T
    return torch.from_numpy(levenberg_marquardt(at(point).detach().numpy(), columns.numpy(), damping)) @ directions


@pytest.mark.parametrize(("loss", "outputs"), [("mse", predictions), ("residual", two_residuals)])
def test_jumps_are_levenberg_marquardt_steps_in_the_directions_of_training(loss, outputs):
    """The first two: the second also goes along the first."""
    model = make_model(dtype=torch.float64)
    optimizer = GaussNewton(SGD(model.parameters(), lr=RATE), loss=loss, **EAGER)
    at = residual_vector(model, outputs, loss)
    before, stored, jumps = optimizer.stats.as_dict(), [], []
    for step in range(1, 30):
        optimizer.zero_grad()
        mean_squares(outputs(model), loss).backward()
        gradient = flat(p.grad for p in model.parameters())
        plain = flat(model.parameters()) - RATE * gradient
        if step % 5 == 0:
            stored.append(plain)
        optimizer.step(outputs=lambda: outputs(model))
        after = optimizer.stats.as_dict()
        if after["accepted"] > before["accepted"]:
            differences = [b - a for a, b in pairwise(stored)]
            if jumps:  # differences are measured from where a jump has ended
                differences[2] = stored[3] - jumps[0][1]
            used = differences[-int(before["differences"]) :]
            directions = [-RATE * gradient, gradient, *used, *(jump for jump, _ in jumps)]
            evaluations = after["extra_evaluations"] - before["extra_evaluations"]
            tries = (
                evaluations - len(directions) - (1 if jumps else 3)
            )  # at first, repeatability is checked, and samples are compared
            expected = dense_jump(at, plain, directions, before["damping"] * 10 ** (tries - 1))
            jump = flat(model.parameters()) - plain
            torch.testing.assert_close(jump, expected, rtol=1e-3, atol=1e-4 * float(expected.norm()))
            jumps.append((jump, flat(model.parameters())))
        before = after
    assert len(jumps) == 2


CLASSES = torch.arange(24) * 7 % 3
CONVEX = {
    "cross_entropy": ("cross_entropy", CLASSES, cross_entropy),
    "function": (binary_cross_entropy_with_logits, one_hot(CLASSES).double(), binary_cross_entropy_with_logits),
}


def linear_model(found, columns):
    here = loss_around(found.convex, found.values, columns)
    return LinearModel(found.convex, found.values, columns, here, float(here.loss), lambda x: x)


@pytest.mark.parametrize("damping", [1e-6, 0.1, 1.0])
@pytest.mark.parametrize("kind", CONVEX)
def test_convex_losses_are_minimised_in_the_coefficients_as_by_scipy(kind, damping):
    loss, targets, function = CONVEX[kind]
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(24, 3, generator=generator, dtype=torch.float64)  # far from what they should be
    columns = torch.randn(4, 72, generator=generator, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda v: function(v.view(24, 3), targets), logits.reshape(-1))
    penalty = damping * (columns @ hessian @ columns.T).diagonal().numpy()

    def objective(a):
        moved = logits + (torch.as_tensor(a) @ columns).view_as(logits)
        return float(function(moved, targets)) + 0.5 * float(penalty @ np.square(np.asarray(a)))

    best = scipy_minimize(objective, np.zeros(4), method="BFGS").fun
    ours = solve_damped(linear_model(read(loss, (logits, targets)), columns), damping)
    assert objective(ours.coefficients) - best <= 1e-2 * (objective(np.zeros(4)) - best)
    moved = logits + (ours.coefficients @ columns).view_as(logits)
    assert ours.promised == pytest.approx(float(function(moved, targets)))


@pytest.mark.parametrize("name", ["mse", "huber", "smooth_l1", "poisson_nll", "soft_margin"])
def test_losses_of_the_library_have_the_curvature_that_autograd_finds(name):
    function = getattr(nn.functional, f"{name}_loss")
    generator = torch.Generator().manual_seed(0)
    values, targets, *columns = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    targets = targets.sign()
    hessian = torch.autograd.functional.hessian(lambda v: function(v, targets), values)
    columns = torch.stack(columns)
    here = loss_around(read(function, (values, targets)).convex, values, columns)
    torch.testing.assert_close(here.hessian, columns @ hessian @ columns.T)


def test_several_tensors_count_by_their_own_means():
    found = read("residual", [torch.tensor([3.0, 1.0]), torch.tensor(2.0), torch.tensor([[2j, 0j, 0j, 0j]])])
    assert found.loss() == pytest.approx(5 + 4 + 1)


# ------------------------------------------------------------------------------------------------- whole problems


def test_least_squares_are_solved_to_rounding_error_by_a_few_jumps():
    a, b, x, base = quadratic()
    optimizer = GaussNewton(base, loss="mse", **EAGER)
    for _ in range(250):
        optimizer.zero_grad()
        (a @ x - b).square().mean().backward()
        optimizer.step(outputs=lambda: (a @ x, b))
    expected = torch.linalg.lstsq(a, b.unsqueeze(1)).solution[:, 0]
    assert 0 < optimizer.stats.counts["accepted"] <= 24
    plain = quadratic()
    for _ in range(250):
        plain[3].zero_grad()
        (plain[0] @ plain[2] - plain[1]).square().mean().backward()
        plain[3].step()
    assert float((x.detach() - expected).norm() / expected.norm()) < 1e-9
    assert float((plain[2].detach() - expected).norm() / expected.norm()) > 1e-4


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), rate=st.floats(0.01, 0.5), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_accepted_jumps_lower_the_loss_of_their_batch_and_others_leave_the_plain_step(seed, rate, dtype):
    model, plain = make_model(seed, dtype), make_model(seed, dtype)
    optimizer = GaussNewton(SGD(model.parameters(), lr=rate), loss="mse", **EAGER)
    optimizer._driver.state.samples = FIXED  # or else the next batch would decide
    reference = SGD(plain.parameters(), lr=rate)
    for i in range(40):
        plain.load_state_dict(model.state_dict())
        accepted = optimizer.stats.counts["accepted"]
        train(model, optimizer, i + 1, start=i)
        train(plain, reference, i + 1, start=i)
        after, before = (
            (p - y).double().square().mean().item() for p, y in (predictions(model, i), predictions(plain, i))
        )
        if optimizer.stats.counts["accepted"] > accepted:
            assert after < before * (1 + 1e-6)
        else:
            assert_same(weights(model), weights(plain))
    assert optimizer.stats.counts["attempted"] > 0
    assert_counters_add_up(optimizer)


def test_jumps_that_never_help_become_rare():
    model, optimizer = driven()
    outputs = Cone(optimizer)
    train(model, optimizer, 100, outputs=outputs)
    early = optimizer.stats.counts["extra_evaluations"]
    train(model, optimizer, 400, start=100, outputs=outputs)
    late = optimizer.stats.counts["extra_evaluations"] - early
    assert optimizer.stats.counts["accepted"] == 0 < early
    assert late / 300 < early / 100


@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw_foreach"])
def test_reruns_are_equal_bit_for_bit(base):
    runs = [driven(base) for _ in range(2)]
    for model, optimizer in runs:
        train(model, optimizer, 60)
    assert_same(weights(runs[0][0]), weights(runs[1][0]))
    assert runs[0][1].stats.counts == runs[1][1].stats.counts
    assert runs[0][1].stats.counts["accepted"] > 0


def test_a_function_may_be_negative():
    """A negative log-likelihood is: nothing is special about zero."""
    shifted = lambda predictions, targets: (predictions - targets).square().mean() - 100  # noqa: E731
    model, optimizer = driven(loss=shifted)
    train(model, optimizer, 40)
    assert optimizer.stats.counts["accepted"] > 0


def test_a_function_may_hold_tensors_of_the_models_type():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    _, optimizer = driven(loss=loss, model=model)
    train(model, optimizer, 40, outputs=lambda model, i: (model(x), y), objective=lambda model, i: loss(model(x), y))
    assert optimizer.stats.counts["accepted"] > 0


def test_without_a_jump_the_run_is_the_bases():
    model, optimizer = driven("adamw_foreach")
    train(model, optimizer, 60, outputs=Cone(optimizer))
    assert optimizer.stats.counts["rejected_loss"] > 0 == optimizer.stats.counts["accepted"]
    assert_same(weights(model), weights(trained_plainly(60, "adamw_foreach")))


def test_stats_show_what_the_driver_has_set_itself():
    model, optimizer = driven()
    before = optimizer.stats.as_dict()
    assert (before["share"], before["wait"], before["differences"]) == (0.9, 10, 20)
    train(model, optimizer, 60)
    after = optimizer.stats.as_dict()
    assert after["accepted"] > 0
    assert after["damping"] != before["damping"]
    assert after["coefficient_norm"] > 0
    assert 0 < after["gain"] < 1


def test_the_record_of_a_jump_has_the_loss_before_it_and_the_loss_that_was_promised():
    model, optimizer = driven()
    train(model, optimizer, FIRST - 1)
    plain = make_model(dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    train(plain, SGD(plain.parameters(), lr=0.1), FIRST, start=FIRST - 1)
    train(model, optimizer, FIRST, start=FIRST - 1)
    record = optimizer.stats.latest
    values, targets = predictions(plain, FIRST - 1)
    assert record.accepted and record.step == FIRST and record.rank == record.history_len == 4
    assert record.residual_norm == pytest.approx((values - targets).square().mean().item() ** 0.5)
    assert 0 < record.predicted_residual_norm < record.residual_norm
