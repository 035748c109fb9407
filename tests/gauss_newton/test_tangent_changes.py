"""What may change during a run with jumps along the tangent: data, terms, constants, weights, shapes, devices."""

import gc
import weakref

import numpy as np
import pytest
import torch
from pretended import NAME as DEVICE
from pretended import move, on_device
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.utils._pytree import tree_map

from torch_anderson import GaussNewton, Objective, Term

X = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(-1, 1)
SINE, COSINE = torch.sin(3 * X[:, 0]), torch.cos(3 * X[:, 0])


def network(width=12):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()


def points(count):
    return torch.rand(count, 1).double()


def misfit(u, x, y):
    return u(x) - y


def train(optimizer, objective, steps):
    for _ in range(steps):
        loss = optimizer.step(objective)
    return float(loss)


def trained(objective, steps=10):
    optimizer = GaussNewton(Adam(objective.model.parameters(), lr=1e-2))
    train(optimizer, objective, steps)
    return optimizer


def mse(model, targets):
    return float((model(X)[:, 0] - targets).square().mean().detach())


# ------------------------------------------------------------------------------------------------- data and terms


def test_a_term_with_other_data_is_fitted_to_these():
    objective = Objective(network(), fit=Term(misfit, (X, SINE)))
    optimizer = trained(objective)
    objective.terms["fit"] = Term(misfit, (X, COSINE))
    assert float(optimizer.step(objective)) > 0.1
    train(optimizer, objective, 40)
    assert mse(objective.model, COSINE) < 1e-4


def test_data_that_numpy_overwrites_are_read_again():
    targets = SINE.numpy().copy()
    objective = Objective(network(), fit=Term(misfit, (X, torch.from_numpy(targets))))
    optimizer = trained(objective)
    np.negative(targets, out=targets)
    assert float(optimizer.step(objective)) > 0.1
    train(optimizer, objective, 40)
    assert mse(objective.model, -SINE) < 1e-4


def test_a_checkpoint_does_not_bring_its_data():
    first = Objective(network(), fit=Term(misfit, (X, SINE)))
    trained(first)
    second = Objective(first.model, fit=Term(misfit, (X, COSINE)))
    second.load_state_dict(first.state_dict())
    trained(second, 40)
    assert mse(second.model, COSINE) < 1e-4


def test_terms_come_and_go():
    objective = Objective(network(), fit=Term(misfit, (X, SINE)))
    optimizer = trained(objective)
    objective.terms["mean"] = Term(lambda u, x: u(x) - 1, X)
    assert train(optimizer, objective, 20) > 0.1  # both cannot hold
    del objective.terms["fit"]
    assert train(optimizer, objective, 40) < 1e-4
    assert mse(objective.model, 1.0) < 1e-4


def test_a_term_that_comes_back_has_its_own_rows():
    model = network()
    terms = {"a": Term(misfit, (X, SINE)), "b": Term(lambda u, x: u(x / 2 + 2) + 1, X)}
    objective = Objective(model, **terms)
    optimizer = trained(objective, 5)
    del objective.terms["a"]
    train(optimizer, objective, 1)
    objective.terms["a"] = terms["a"]
    assert train(optimizer, objective, 30) < 1e-4


def test_the_first_loss_after_a_change_is_the_true_one():
    factor = torch.ones((), dtype=torch.float64)
    objective = Objective(network(), fit=Term(lambda u, x, y: u(x) - factor * y, (X, SINE)))
    optimizer = trained(objective)
    factor.fill_(-1.0)  # nobody is told
    expected = mse(objective.model, -SINE)
    assert train(optimizer, objective, 1) == pytest.approx(expected) and expected > 0.1


def test_a_checkpoint_does_not_bring_residuals_of_another_function():
    first = Objective(network(), fit=Term(misfit, (X, SINE)))
    trained(first)
    second = Objective(first.model, fit=Term(lambda u, x, y: u(x) + y, (X, SINE)))
    second.load_state_dict(first.state_dict())
    expected = mse(second.model, -SINE)
    assert train(GaussNewton(SGD(second.model.parameters(), lr=0.1)), second, 1) == pytest.approx(expected)


def test_a_checkpoint_is_made_after_a_term_was_removed():
    objective = Objective(
        network(), fit=Term(lambda u, x: u(x), points, count=9), more=Term(lambda u, x: u(x), points, count=9)
    )
    trained(objective, 3)
    del objective.terms["more"]
    objective.load_state_dict(objective.state_dict())
    assert set(objective.retained) == {"fit"}


def test_all_fixed_samples_are_fitted_after_drawn_ones_and_after_a_reset():
    model = network(100)
    optimizer = trained(Objective(model, fit=Term(lambda u, x: u(x), points, count=60)), 5)
    many = torch.rand(800, 1).double()
    optimizer.step(Objective(model, fit=Term(lambda u, x: u(x), many)))
    assert optimizer.stats.latest.rank == 800
    optimizer.reset_history()
    optimizer.step(Objective(model, fit=Term(lambda u, x: u(x), many)))
    assert optimizer.stats.latest.rank == 800


def test_rows_of_one_objective_do_not_make_too_many_for_another():
    model = network()
    optimizer = trained(Objective(model, fit=Term(lambda u, x: u(x), points, count=60)), 1)
    optimizer._driver.state.blocks = 100.0
    optimizer.step(Objective(model, fit=Term(lambda u, x: u(x), points, count=60)))
    assert optimizer.stats.latest.rank < 600  # 500, rounded to blocks


def test_each_objective_is_compared_with_its_function():
    sign = 1.0
    model = network()
    one = Objective(model, fit=Term(lambda u, x, y: u(x) - sign * y, (X, SINE)))
    other = Objective(model, fit=Term(lambda u, x: 0.01 * (u(x) - x.sum()), X + 5))
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    for k in range(40):
        sign = 1.0 if k < 4 else -1.0
        optimizer.step(one)
        optimizer.step(other)
    expected = mse(model, -SINE)
    assert float(optimizer.step(one)) == pytest.approx(expected)


def test_a_term_may_get_samples_of_another_form():
    objective = Objective(network(), fit=Term(lambda u, x: u(x) - x.sum(), points, count=50))
    optimizer = trained(objective)
    objective.terms["fit"] = Term(misfit, lambda k: (X[:1].repeat(k, 1), SINE[:1].repeat(k)), count=50)
    assert train(optimizer, objective, 20) < 1e-6


def test_other_optimizers_see_new_points_after_jumps():
    objective = Objective(network(), fit=Term(lambda u, x: u(x), points, count=20))
    trained(objective)
    seen = [objective.draw().bound["fit"][0] for _ in range(5)]
    assert len(torch.cat(seen).unique()) == 100


def test_retained_points_leave_room_for_new_ones():
    term = Term(lambda u, x: u(x), points, count=20, retain=True)
    objective = Objective(network(), fit=term)
    trained(objective)  # jumps have used and retained many more
    seen = [objective.draw().bound["fit"][0] for _ in range(5)]
    assert len(torch.cat(seen).unique()) >= 50


# ------------------------------------------------------------------------------------- constants, weights, shapes


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_buffer_may_be_replaced(shape):
    model = Scaled()
    objective = Objective(model, fit=Term(lambda u, x, y: u(x) - model.scale * y, (X, SINE)))
    optimizer = trained(objective)
    model.scale = torch.full(shape, -1.0, dtype=torch.float64)
    train(optimizer, objective, 40)
    assert mse(model, -SINE) < 1e-4


@pytest.mark.parametrize("steps", range(1, 6))
def test_weights_written_before_any_step_are_the_new_start(steps):
    objective = Objective(network(), fit=Term(misfit, (X, SINE)))
    optimizer = trained(objective, steps)
    with torch.no_grad():
        for p in objective.model.parameters():
            p.zero_()
    optimizer.step(objective)  # a jump, or a base step and a jump
    lowest = float((SINE - SINE.mean()).square().mean())  # from zero weights only the last bias moves
    assert mse(objective.model, SINE) > 0.5 * lowest


def test_trained_tensors_outside_the_model_get_the_gradient_of_one_step():
    scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    model = network()
    objective = Objective(model, fit=Term(lambda u, x, y: scale * u(x) - y, (X, SINE)))
    objective()
    once = float(scale.grad)
    objective()
    expected = torch.autograd.grad((scale * model(X)[:, 0] - SINE).square().mean(), scale)[0]
    assert float(scale.grad) == once == pytest.approx(float(expected))


class Pooled(nn.Module):
    """Accepts sequences of any length."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 8).double(), nn.Linear(8, 1).double()

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)).sum(1) / x.shape[1])


def test_batches_may_have_samples_of_another_shape():
    model = Pooled()
    objective = Objective(model, fit=Term(misfit, (torch.randn(8, 5, 3).double(), torch.randn(8).double())))
    optimizer, losses = GaussNewton(SGD(model.parameters(), lr=1e-3)), []
    optimizer.register_acceleration_hook(lambda record: losses.append(record.residual_norm**2))
    for length in [5] * 4 + [7] * 4:
        x = torch.randn(24, length, 3).double()
        objective.terms["fit"] = Term(misfit, (x, x.mean((1, 2))))
        optimizer.step(objective)
    assert len(losses) >= 3 and all(loss < 10 for loss in losses)


def test_a_sampler_may_change_the_shape_of_its_samples():
    model, length = Pooled(), 5

    def draw(count):
        return torch.randn(count, length, 3).double()

    objective = Objective(model, fit=Term(lambda u, x: u(x) - x.mean(), draw, count=60))
    optimizer = trained(objective, 20)
    length = 9
    train(optimizer, objective, 1)
    samples = draw(200)
    shown = optimizer._driver.traces[0].outputs(optimizer._driver.traces[0].read(), {"fit": (samples,)})["fit"][:, 0]
    torch.testing.assert_close(shown, model(samples)[:, 0].detach() - samples.mean((1, 2)))


def test_weights_written_after_a_resume_are_the_new_start():
    objective = Objective(network(), fit=Term(misfit, (X, SINE)))
    optimizer = trained(objective, 3)
    again = Objective(network(), fit=Term(misfit, (X, SINE)))
    other = GaussNewton(Adam(again.model.parameters(), lr=1e-2))
    for new, old in ((again.model, objective.model), (again, objective), (other, optimizer)):
        new.load_state_dict(old.state_dict())
    with torch.no_grad():
        for p in again.model.parameters():
            p.zero_()
    other.step(again)  # a comparison
    assert mse(again.model, SINE) > 0.5 * float(SINE.var())


def test_one_loss_that_is_not_finite_is_skipped_and_forgotten():
    torch.manual_seed(0)
    model, broken = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), False

    def draw(count):
        x = torch.randn(count, 2)
        classes = (x > 0).sum(1)
        classes[0] = -100 if broken else classes[0]  # ignored, and the mean over nothing is NaN
        return x, classes

    objective = Objective(model, fit=Term(lambda u, x, y: (u(x), y), draw, count=100, loss=cross_entropy))
    optimizer = trained(objective, 3)
    broken = True
    optimizer.step(objective)
    broken = False
    train(optimizer, objective, 20)
    assert optimizer.stats.counts["skipped_nonfinite_outputs"] == 1
    assert all(np.isfinite(value) for value in vars(optimizer._driver.state).values())


def test_a_loss_that_is_not_finite_at_first_is_refused():
    classes = torch.full((40,), -100)
    objective = Objective(
        nn.Linear(1, 3).double(), fit=Term(lambda u, x, y: (u(x), y), (X, classes), loss=cross_entropy)
    )
    with pytest.raises(ValueError, match="loss of 'fit' is not finite"):
        objective()


# ------------------------------------------------------------------------------------------- devices, memory, messages


def objective_on_device():
    model = network()
    move(model)
    return Objective(model, fit=Term(lambda u, x: u(x) - x.sum(), X.to(DEVICE)))


@on_device
def test_losses_are_on_the_device_of_the_model_whoever_makes_the_step():
    objective = objective_on_device()
    optimizer = GaussNewton(SGD(objective.model.parameters(), lr=0.1))
    losses = [optimizer.step(objective) for _ in range(6)]
    assert {loss.device.type for loss in losses} == {DEVICE}


@on_device
def test_jumps_work_with_a_default_device():
    objective = objective_on_device()
    optimizer = GaussNewton(SGD(objective.model.parameters(), lr=0.1))
    torch.set_default_device(DEVICE)
    try:
        first = float(optimizer.step(objective))
        assert train(optimizer, objective, 10) < 1e-2 * first
    finally:
        torch.set_default_device("cpu")


@on_device
def test_a_checkpoint_from_the_host_goes_on_on_the_device():
    model = objective_on_device().model
    objective = Objective(model, fit=Term(lambda u, x: u(x) - x.sum(), lambda k: points(k).to(DEVICE), count=20))
    trained(objective)
    host = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, objective.state_dict())
    objective.load_state_dict(host)
    assert {x.device.type for kept in objective.retained.values() for x in kept.samples} == {DEVICE}
    trained(objective, 3)


def test_model_and_optimizer_are_freed_when_nobody_uses_them():
    objective = Objective(network(), fit=Term(misfit, (X, SINE)))
    optimizer = trained(objective, 3)
    found = weakref.ref(objective.model)
    gc.collect()
    gc.disable()
    try:
        del objective, optimizer
        assert found() is None
    finally:
        gc.enable()


def test_complex_parameters_are_refused_with_what_to_do():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    data = torch.randn(20, 2, dtype=torch.complex64)
    optimizer = GaussNewton(SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"complex ones.*Use Anderson"):
            optimizer.step(Objective(model, fit=Term(lambda u, x: u(x) - x, data)))


def test_weights_that_are_nan_are_not_called_written_by_a_residual(caplog):
    model = network()
    objective = Objective(model, fit=Term(misfit, (X, SINE)))
    objective()
    nn.init.constant_(model[0].weight, torch.nan)
    optimizer = trained(objective, 1)
    assert optimizer.stats.counts["skipped_nonfinite_outputs"] == 1 and "not finite" in caplog.text


def test_a_schedule_that_ends_at_zero_ends_jumps_and_says_so(caplog):
    objective = Objective(network(), fit=Term(misfit, (X, SINE)))
    optimizer = GaussNewton(SGD(objective.model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=5)
    for _ in range(10):
        optimizer.step(objective)
        schedule.step()
    assert optimizer.stats.counts["attempted"] == 5
    assert caplog.text.count("count as frozen") == 1


def test_inference_mode_is_named():
    objective = Objective(network(), fit=Term(misfit, (X, SINE)))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        trained(objective, 1)


@pytest.mark.parametrize("seed", range(2))
def test_a_clamp_after_each_step_leaves_it_about_as_good_as_its_base(seed):
    """Jumps fit the data with larger weights than the clamp leaves: what it took back counted as their gain."""
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(-1, 1)

    def last_loss(optimizer_of):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
        objective = Objective(model, fit=Term(lambda u, x: u(x) - torch.sin(4 * x.sum()), x))
        optimizer = optimizer_of(torch.optim.Adam(model.parameters(), lr=1e-2))
        for _ in range(200):
            optimizer.step(objective)
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.8, 0.8)
        return float(objective())

    assert last_loss(GaussNewton) <= 3 * last_loss(lambda base: base)
