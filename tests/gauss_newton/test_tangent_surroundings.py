"""What users do around jumps along the tangent: other losses, samples and functions that change, unusual calls."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import huber_loss
from torch.optim import SGD, Adam

from torch_anderson import GaussNewton, Objective, Term
from torch_anderson._gauss_newton.residuals import Residuals, TermResiduals

X = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(-1, 1)


def network(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()


def sine(u, x):
    return u(x) - torch.sin(3 * x.sum())


def train(optimizer, objective, steps):
    for _ in range(steps):
        loss = optimizer.step(objective)
    return float(loss)


def test_after_a_minimum_jumps_solve_another_problem():
    """At a minimum every jump is rejected, each with more damping than the last."""
    model = network()
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-4))
    train(optimizer, Objective(model, fit=Term(lambda u, x: u(x) - x.sum(), X[:3])), 90)
    assert train(optimizer, Objective(model, fit=Term(sine, X[::5])), 60) < 1e-4


# Losses that are no squares


def with_outliers():
    """A straight line with noise, of which every fifth value is far off."""
    torch.manual_seed(0)
    x = torch.randn(100, 2, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0]).double() + 0.1 * torch.randn(100).double()
    y[::5] += 20 * torch.rand(20).double()
    return x, y


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: huber_loss(z, torch.zeros_like(z)),
        lambda z: torch.log(torch.cosh(z)),
        lambda z: (1 + z**2).sqrt(),
    ],
    ids=["huber", "log cosh", "smooth absolute value"],
)
def test_a_robust_loss_is_minimised_as_by_lbfgs(loss):
    """Outliers have steep losses with little curvature or none."""
    x, y = with_outliers()
    models = [nn.Linear(2, 1).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    found = train(
        GaussNewton(SGD(models[0].parameters(), lr=1e-6)),
        Objective(models[0], fit=Term(lambda u, a, b: u(a) - b, (x, y), loss=loss)),
        60,
    )
    lbfgs = torch.optim.LBFGS(models[1].parameters(), max_iter=500, tolerance_change=0.0, line_search_fn="strong_wolfe")

    def closure():
        lbfgs.zero_grad()
        value = torch.vmap(loss)(models[1](x)[:, 0] - y).mean()
        value.backward()
        return value

    lbfgs.step(closure)
    assert found == pytest.approx(float(closure()), rel=1e-4)


def test_base_steps_that_lower_a_negative_loss_are_not_undone():
    """Without curvature and with values below 0, as here, all steps are the base's."""
    ends = []
    for wrap in (lambda base: base, GaussNewton):
        model = network()
        objective = Objective(model, fit=Term(sine, X, loss=lambda z: z.abs() - 3))
        ends.append(train(wrap(Adam(model.parameters(), lr=1e-2)), objective, 200) + 3)
    assert ends[1] < 1.05 * ends[0]


def test_absolute_values_are_minimised():
    model = network()
    objective = Objective(model, fit=Term(sine, X, loss=torch.abs))
    assert train(GaussNewton(Adam(model.parameters())), objective, 100) < 1e-3


def test_a_loss_of_several_numbers_is_refused():
    model = network()
    objective = Objective(model, fit=Term(sine, X, loss=lambda z: torch.stack((z, z)) ** 2))
    with pytest.raises(TypeError, match="2 numbers"):
        GaussNewton(SGD(model.parameters(), lr=0.1)).step(objective)


# Samples and functions


def test_points_may_require_gradients():
    model = network()
    term = Term(sine, lambda k: torch.rand(k, 1, dtype=torch.float64, requires_grad=True), count=50)
    assert train(GaussNewton(Adam(model.parameters())), Objective(model, fit=term), 40) < 1e-3


def test_fixed_samples_may_be_overwritten():
    model, targets = network(), X[:, 0].clone()
    objective = Objective(model, fit=Term(lambda u, x, y: u(x) - y, (X, targets)))
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    assert train(optimizer, objective, 20) < 1e-4
    targets.copy_(-X[:, 0])
    assert float(optimizer.step(objective)) > 0.1
    assert train(optimizer, objective, 30) < 1e-3
    assert float((model(X)[:, 0] + X[:, 0]).square().mean()) < 1e-3


def test_a_term_may_be_replaced():
    model = network()
    objective = Objective(model, fit=Term(lambda u, x: u(x) - x.sum(), X))
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    train(optimizer, objective, 20)
    objective.terms["fit"] = Term(sine, X)
    assert train(optimizer, objective, 60) < 1e-3
    assert float((model(X)[:, 0] - torch.sin(3 * X[:, 0])).square().mean()) < 1e-3


def test_a_function_that_torch_func_cannot_differentiate_makes_plain_steps():
    class Strange(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.tanh()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, slope):
            raise RuntimeError("no derivative by torch.func")

    model = network()
    objective = Objective(model, fit=Term(lambda u, x: Strange.apply(u(x)), X))
    objective.checked = dict(objective.terms)
    optimizer = GaussNewton(SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="no derivative"):  # the base needs it too
        optimizer.step(objective)
    assert optimizer.stats.counts["skipped_no_rows"] == 1


def test_prelu_does_not_stop_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.PReLU(), nn.Linear(8, 1)).double()
    optimizer = GaussNewton(Adam(model.parameters(), lr=1e-2))
    objective = Objective(model, fit=Term(sine, X))
    first = float(optimizer.step(objective))
    assert train(optimizer, objective, 100) < 0.5 * first


def test_an_empty_residual_and_a_model_of_two_outputs_are_refused():
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    for model, function, problem in (
        (network(), lambda u, x: u(x)[None][:0], "no number"),
        (Two(1, 1).double(), sine, "returned tuple"),
    ):
        with pytest.raises(TypeError, match=problem):
            GaussNewton(SGD(model.parameters(), lr=0.1)).step(Objective(model, fit=Term(function, X)))


# Calls


def test_an_objective_after_plain_steps_is_solved_along_the_tangent():
    model = network()
    optimizer, objective = GaussNewton(Adam(model.parameters())), Objective(model, fit=Term(sine, X))
    for _ in range(5):
        optimizer.zero_grad()
        (model(X)[:, 0] - torch.sin(3 * X[:, 0])).square().mean().backward()
        optimizer.step()
    assert train(optimizer, objective, 60) < 1e-4


def test_plain_steps_in_between_do_not_keep_jumps_away():
    model = network()
    optimizer, objective = GaussNewton(SGD(model.parameters(), lr=1e-3)), Objective(model, fit=Term(sine, X))
    for _ in range(50):
        loss = optimizer.step(objective)
        optimizer.zero_grad()
        (model(X)[:, 0] - torch.sin(3 * X[:, 0])).square().mean().backward()
        optimizer.step()
    assert loss < 1e-4
    assert optimizer.stats.counts["accepted"] > 30


def test_it_says_that_groups_without_jumps_are_left_to_the_base(caplog):
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "anderson": False}]
    with caplog.at_level(logging.WARNING, "torch_anderson"):
        train(GaussNewton(Adam(groups)), Objective(model, fit=Term(sine, X)), 3)
    assert sum("trained by the base alone" in record.message for record in caplog.records) == 1


def test_many_outputs_of_a_sample_take_no_more_memory_than_their_rows():
    """The traced rows of a sample are compared with others by two sums, not by all its rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 5), nn.Tanh(), nn.Linear(5, 100)).double()
    objective = Objective(model, fit=Term(lambda u, x: u(x) - x, torch.randn(20, 100, dtype=torch.float64)))
    names = [name for name, _ in model.named_parameters()]
    term = TermResiduals(objective, "fit", names, [])
    sizes = []
    some_rows = term.some_rows
    term.some_rows = lambda *arguments: sizes.append(some_rows(*arguments)) or sizes[-1]
    term.prepare([p.detach() for p in model.parameters()], (torch.randn(20, 100, dtype=torch.float64),), traces=True)
    assert term.factors is not None
    assert {found.shape[0] for found in sizes} == {8}


def test_objectives_that_take_turns_are_traced_once_each(monkeypatch):
    traced, prepare = [], Residuals.prepare
    monkeypatch.setattr(Residuals, "prepare", lambda self, *args: traced.append(self.objective) or prepare(self, *args))
    model = network()
    first, second = (Objective(model, fit=Term(sine, some)) for some in (X[:30], X[10:]))
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    for _ in range(4):
        train(optimizer, first, 1)
        train(optimizer, second, 1)
    assert optimizer.stats.counts["attempted"] >= 6
    assert traced == [first, second]


def test_samples_of_a_step_that_failed_do_not_serve_the_next_one():
    model = network()

    def broken(u, x):
        raise RuntimeError("no residual today")

    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    with pytest.raises(RuntimeError, match="no residual today"):
        optimizer.step(Objective(model, fit=Term(broken, X))(fit=X))
    model(X).square().mean().backward()
    optimizer.step()
    assert optimizer.stats.counts["skipped_no_objective"] == 1


def test_an_objective_that_was_set_in_a_closure_that_failed_does_not_serve_the_next_step():
    model = network()
    optimizer, objective = GaussNewton(SGD(model.parameters(), lr=1e-3)), Objective(model, fit=Term(sine, X))

    def closure():
        optimizer.set_batch(objective)
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match="no loss today"):
        optimizer.step(closure)
    model(X).square().mean().backward()
    optimizer.step()
    assert optimizer.stats.counts["skipped_no_objective"] == 1 and not optimizer.stats.counts["attempted"]
