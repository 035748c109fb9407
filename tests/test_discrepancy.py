"""The discrepancy driver against SciPy, NumPy and values worked out by hand."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from driven import EAGER, Cone, driven, predictions, quadratic, train, trained_plainly
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize as scipy_minimize
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from torch.optim import SGD
from training import assert_counters_add_up, assert_same, make_model, weights

from torch_anderson import Anderson, Discrepancy
from torch_anderson.discrepancy import Squares, read
from torch_anderson.subspace import LEAST_DAMPING, MOST_DAMPING, held_out_gain, minimize, next_damping

RATE, DAMPING = 0.05, 0.1


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def levenberg_marquardt(values, columns, damping):
    """argmin |values + columns' a|^2 + damping * sum |column_i|^2 a_i^2, by one least-squares problem."""
    penalty = np.sqrt(damping) * np.diag(np.linalg.norm(columns, axis=1))
    right = np.concatenate([-values, np.zeros(len(columns))])
    return np.linalg.lstsq(np.vstack([columns.T, penalty]), right, rcond=None)[0]


# ------------------------------------------------------------------------------- one acceleration, by hand


def two_residuals(model):
    """Of different sizes, so that each mean counts."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(10, 4)
    return model(x) - x.sum(1, keepdim=True).sin(), 2 * model(x[:3]) - 1


def mean_squares(tensors):
    return sum(t.square().mean() for t in tensors)


def until_the_first_acceleration(model, outputs, loss):
    """Weights after each plain step, the last gradient, and where the acceleration led."""
    optimizer = Anderson(SGD(model.parameters(), lr=RATE), discrepancy=Discrepancy(loss, **EAGER, damping=DAMPING))
    path = []
    while not optimizer.stats.counts["attempted"]:
        optimizer.zero_grad()
        found = outputs(model)
        mean_squares(found if loss == "residual" else [found[0] - found[1]]).backward()
        gradient = flat(p.grad for p in model.parameters())
        path.append(flat(model.parameters()) - RATE * gradient)
        optimizer.step(outputs=lambda: outputs(model))
    assert optimizer.stats.counts["accepted"] == 1
    return path, gradient, flat(model.parameters())


def residual_vector(model, outputs, loss):
    """Whose squares add up to the loss, as a function of flat weights."""
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


@pytest.mark.parametrize(("loss", "outputs"), [("mse", predictions), ("residual", two_residuals)])
def test_an_acceleration_is_levenberg_marquardt_in_the_directions_of_training(loss, outputs):
    model = make_model(dtype=torch.float64)
    path, gradient, arrived = until_the_first_acceleration(model, outputs, loss)
    differences = [b - a for a, b in pairwise(path)][-EAGER["history_size"] :]
    directions = torch.stack([*differences, -RATE * gradient, gradient])
    at = residual_vector(model, outputs, loss)
    columns = directions @ jacrev(at)(path[-1]).detach().T
    coefficients = levenberg_marquardt(at(path[-1]).detach().numpy(), columns.numpy(), DAMPING)
    jump = torch.from_numpy(coefficients) @ directions
    torch.testing.assert_close(arrived - path[-1], jump, rtol=1e-4, atol=1e-5 * float(jump.norm()))


CLASSES = torch.arange(24) * 7 % 3
CONVEX = {
    "cross_entropy": ("cross_entropy", CLASSES, cross_entropy),
    "function": (binary_cross_entropy_with_logits, one_hot(CLASSES).double(), binary_cross_entropy_with_logits),
}


@pytest.mark.parametrize("damping", [1e-6, 0.1, 1.0])
@pytest.mark.parametrize("kind", CONVEX)
def test_convex_losses_are_minimised_in_the_coefficients_as_by_scipy(kind, damping):
    loss, targets, function = CONVEX[kind]
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(24, 3, generator=generator, dtype=torch.float64)  # far from what they should be
    columns = torch.randn(4, 72, generator=generator, dtype=torch.float64)
    found = read(loss, (logits, targets))
    model = found.misfit.model(found.values, columns)
    penalty = damping * model.hessian.sum(0).diagonal().numpy()

    def objective(a):
        moved = logits + (torch.as_tensor(a) @ columns).view_as(logits)
        return float(function(moved, targets)) + 0.5 * float(penalty @ np.square(np.asarray(a)))

    best = scipy_minimize(objective, np.zeros(4), method="BFGS").fun
    ours = minimize(found.misfit, found.values, columns, model, damping, lambda x: x)
    assert objective(ours.coefficients) - best <= 1e-2 * (objective(np.zeros(4)) - best)


@pytest.mark.parametrize("name", ["mse", "huber", "smooth_l1", "poisson_nll", "soft_margin"])
def test_losses_of_the_library_have_the_curvature_that_autograd_finds(name):
    function = getattr(nn.functional, f"{name}_loss")
    generator = torch.Generator().manual_seed(0)
    values, targets, *columns = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    targets = targets.sign()
    hessian = torch.autograd.functional.hessian(lambda v: function(v, targets), values)
    columns = torch.stack(columns)
    model = read(function, (values, targets)).misfit.model(values, columns)
    torch.testing.assert_close(model.hessian[0], columns @ hessian @ columns.T)


def test_several_tensors_count_by_their_own_means():
    found = read("residual", [torch.tensor([3.0, 1.0]), torch.tensor(2.0), torch.tensor([[2j, 0j, 0j, 0j]])])
    assert found.misfit.loss(found.values) == pytest.approx(5 + 4 + 1)


@pytest.mark.parametrize("samples", range(2, 9))
def test_both_halves_of_a_batch_have_samples_however_small_it_is(samples):
    half = read("residual", torch.zeros(samples, 3)).misfit.half.view(samples, 3)
    assert (half == half[:, :1]).all()  # a sample is in one of them as a whole
    assert abs(2 * int(half[:, 0].sum()) - samples) <= 1


def test_the_held_out_gain_is_that_of_each_half_with_coefficients_of_the_other():
    generator = torch.Generator().manual_seed(0)
    values, columns = torch.randn(30, generator=generator), torch.randn(3, 30, generator=generator)
    half = torch.arange(30) % 3 == 0
    gains = []
    for fit, judge in ((half, ~half), (~half, half)):
        a = levenberg_marquardt(values[fit].double().numpy(), columns[:, fit].double().numpy(), DAMPING)
        before = values[judge].double().numpy()
        gains.append(np.log(before @ before / np.square(before + a @ columns[:, judge].double().numpy()).sum()))
    model = Squares(half).model(values, columns)
    assert held_out_gain(model, DAMPING) == pytest.approx(min(gains), rel=1e-9)


def test_noise_is_not_fitted_when_half_of_the_batch_judges():
    """Targets without any pattern: whatever fits one half makes the other worse."""
    torch.manual_seed(0)
    model = nn.Linear(30, 1).double()
    nn.init.zeros_(model.weight)
    x, y = torch.randn(40, 30, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)
    _, optimizer = driven(model=model, held_out=True, damping=1e-8)
    objective = lambda model, i: (model(torch.randn(40, 30, dtype=torch.float64)) - torch.randn(40, 1)).square().mean()  # noqa: E731
    train(model, optimizer, 20, outputs=lambda model, i: (model(x), y), objective=objective)
    assert optimizer.stats.counts["rejected_held_out"] > 0


# --------------------------------------------------------------------------------------- small rules, by hand


def test_damping_follows_how_well_the_promise_was_kept():
    kept, middling, poor, broken = (next_damping(0.1, 1.0, fall) for fall in (1.0, 0.5, 0.01, -1.0))
    assert kept < 0.1 == middling < poor < broken
    assert next_damping(0.1, 1.0, float("nan")) == broken
    assert next_damping(LEAST_DAMPING, 1.0, 1.0) == LEAST_DAMPING
    assert next_damping(MOST_DAMPING, 1.0, -1.0) == MOST_DAMPING


def test_accelerations_that_never_help_become_rare():
    model, optimizer = driven()
    outputs = Cone(optimizer)
    train(model, optimizer, 40, outputs=outputs)
    early = optimizer.stats.counts["extra_evaluations"]
    train(model, optimizer, 160, start=40, outputs=outputs)
    late = optimizer.stats.counts["extra_evaluations"] - early
    assert optimizer.stats.counts["accepted"] == 0 < early
    assert late / 120 < early / 40


# ------------------------------------------------------------------------------------------- whole problems


def test_least_squares_are_solved_to_rounding_error_by_a_few_accelerations():
    a, b, x, base = quadratic()
    optimizer = Anderson(base, discrepancy=Discrepancy("mse", **{**EAGER, "history_size": 12}, damping=1e-10))
    for _ in range(40):
        optimizer.zero_grad()
        (a @ x - b).square().mean().backward()
        optimizer.step(outputs=lambda: (a @ x, b))
    expected = torch.linalg.lstsq(a, b.unsqueeze(1)).solution[:, 0]
    assert optimizer.stats.counts["accepted"] <= 20
    assert float((x.detach() - expected).norm() / expected.norm()) < 1e-10


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), rate=st.floats(0.01, 0.5), probe=st.sampled_from(["difference", "secant"]))
def test_accepted_jumps_lower_the_loss_of_their_batch_and_others_leave_the_plain_step(seed, rate, probe):
    model, plain = make_model(seed, torch.float64), make_model(seed, torch.float64)
    options = Discrepancy("mse", **EAGER, probe=probe)
    optimizer = Anderson(SGD(model.parameters(), lr=rate), discrepancy=options)
    reference = SGD(plain.parameters(), lr=rate)
    for i in range(12):
        plain.load_state_dict(model.state_dict())
        accepted = optimizer.stats.counts["accepted"]
        train(model, optimizer, i + 1, start=i)
        train(plain, reference, i + 1, start=i)
        after, before = ((p - y).square().mean().item() for p, y in (predictions(model, i), predictions(plain, i)))
        if optimizer.stats.counts["accepted"] > accepted:
            assert after < before * (1 + 1e-12)
        else:
            assert_same(weights(model), weights(plain))
    assert optimizer.stats.counts["attempted"] > 0
    assert_counters_add_up(optimizer)


@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw_foreach"])
def test_reruns_are_equal_bit_for_bit(base):
    runs = [driven(base) for _ in range(2)]
    for model, optimizer in runs:
        train(model, optimizer, 30)
    assert_same(weights(runs[0][0]), weights(runs[1][0]))
    assert runs[0][1].stats.counts == runs[1][1].stats.counts
    assert runs[0][1].stats.counts["accepted"] > 0


def test_a_function_may_be_negative():
    """A negative log-likelihood is: nothing is special about zero."""
    shifted = lambda predictions, targets: (predictions - targets).square().mean() - 100  # noqa: E731
    model, optimizer = driven(loss=shifted, held_out=None)
    train(model, optimizer, 12)
    assert optimizer.stats.counts["accepted"] > 0


def test_a_function_may_hold_tensors_of_the_models_type():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    _, optimizer = driven(loss=loss, model=model)
    train(model, optimizer, 12, outputs=lambda model, i: (model(x), y), objective=lambda model, i: loss(model(x), y))
    assert optimizer.stats.counts["accepted"] > 0


def test_momentum_is_forgotten_at_a_jump_if_asked_for():
    model = make_model(dtype=torch.float64)
    base = SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = Anderson(base, discrepancy=Discrepancy("mse", **EAGER), on_accept="reset_momentum")
    while not optimizer.stats.counts["accepted"]:
        train(model, optimizer, 1)
    assert all(not base.state[p]["momentum_buffer"].any() for p in model.parameters())


def test_without_a_jump_the_run_is_the_bases():
    model, optimizer = driven("adamw_foreach")
    train(model, optimizer, 30, outputs=Cone(optimizer))
    assert optimizer.stats.counts["rejected_loss"] > 0 == optimizer.stats.counts["accepted"]
    assert_same(weights(model), weights(trained_plainly(30, "adamw_foreach")))


def test_stats_show_what_the_driver_has_set_itself():
    model, optimizer = driven()
    before = optimizer.stats.as_dict()
    assert (before["share"], before["wait"], before["differences"]) == (0.9, 2, 4)
    train(model, optimizer, 20)
    after = optimizer.stats.as_dict()
    assert after["accepted"] > 0
    assert after["damping"] != before["damping"]
    assert after["coefficient_norm"] > 0
