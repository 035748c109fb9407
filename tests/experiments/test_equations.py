"""The study of equations: solutions, references, surrogates and methods."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import vmap

from experiments import solutions
from experiments.equations import problems as eq
from experiments.equations import race, surrogates
from experiments.equations.problems import PROBLEMS
from experiments.equations.race import Entry
from experiments.methods import SOLVERS
from experiments.optimizers import missing
from experiments.solvers import quasi_newton
from experiments.solvers.levenberg_marquardt import Residuals, bundles
from experiments.solvers.traced import TracedLoss
from torch_anderson import Objective

# Equations and their solutions


def residuals(term, u, count=40):
    """Of a term at some samples, with a function in the place of the model."""
    samples = term.draw("some", None if term.fixed else count)
    found = vmap(lambda *sample: term.function(u, *sample))(*samples)
    return torch.stack(found if isinstance(found, tuple) else (found,))


EXACT = {
    "convection": solutions.convection, "reaction": solutions.reaction, "helmholtz": solutions.helmholtz,
    "poisson3d": solutions.product_of_sines, "poisson10d": solutions.sum_of_cosines,
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_all_residuals_vanish_on_the_exact_solution(name):
    case, u = PROBLEMS[name].build(), EXACT[name]
    for label, term in case.terms.items():
        # The bell curve of the reaction is periodic up to its tail, exp(-8).
        allowed = 1e-3 if (name, label) == ("reaction", "sides") else 1e-10
        assert residuals(term, u).abs().max() < allowed, label
    assert torch.allclose(vmap(u)(case.points[:100]), case.expected[:100], atol=1e-14)


def test_a_wrong_function_has_residuals():
    case = PROBLEMS["helmholtz"].build()
    assert residuals(case.terms["interior"], lambda x: 1.01 * solutions.helmholtz(x)).abs().max() > 0.1


def cole_hopf(point):
    """The solution of Burgers' equation at one point, with derivatives."""
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.hermite.hermgauss(200))
    y = point[1] - torch.sqrt(4 * eq.VISCOSITY * point[0]) * nodes
    exponent = -torch.cos(math.pi * y) / (2 * math.pi * eq.VISCOSITY)
    factors = torch.exp(exponent - exponent.detach().max()) * weights
    return -(torch.sin(math.pi * y) * factors).sum() / factors.sum()


@pytest.mark.parametrize("name", ["burgers2d", "burgers2d-fixed"])
def test_the_residual_of_burgers_equation_vanishes_on_its_solution(name):
    case = PROBLEMS[name].build()
    # Early, the quadrature's nodes have large derivatives by time.
    points = torch.rand(40, 2, dtype=torch.float64) * torch.tensor([0.9, 2.0]) + torch.tensor([0.1, -1.0])
    residual = vmap(lambda point: case.terms["interior"].function(cole_hopf, point))(points)
    assert residual.abs().max() < 1e-7
    assert residuals(case.terms["edges"], cole_hopf).abs().max() < 1e-10
    assert torch.allclose(vmap(cole_hopf)(case.points[::97]), case.expected[::97], atol=1e-12)


def interpolated(values):
    """The reference as a function near t = 1/2: polynomials of degree 8 in time, Fourier series in space."""
    times, count = len(values) - 1, values.shape[1]
    rows = np.arange(times // 2 - 4, times // 2 + 5)
    waves = torch.from_numpy(np.fft.rfft(values[rows])[:, : count // 2] / count)
    nodes = torch.from_numpy(rows / times)
    factors = torch.full((count // 2,), 2.0, dtype=torch.float64)
    factors[0] = 1.0
    others = [torch.cat([nodes[:i], nodes[i + 1 :]]) for i in range(len(nodes))]

    def u(point):
        basis = torch.stack([((point[0] - o) / (n - o)).prod() for n, o in zip(nodes, others, strict=True)])
        angle = math.pi * torch.arange(count // 2, dtype=torch.float64) * (point[1] + 1)
        real, imaginary = (part.to(torch.float64).T @ basis for part in (waves.real, waves.imag))
        return (factors * (real * torch.cos(angle) - imaginary * torch.sin(angle))).sum()

    return u


@pytest.mark.parametrize(
    "name, values, allowed",
    [
        ("allen-cahn", lambda: solutions.allen_cahn(512, 200, 10), 1e-6),
        ("kdv", lambda: solutions.korteweg_de_vries(512, 1600, 10), 1e-6),
    ],
)
def test_the_residual_vanishes_on_the_spectral_reference(name, values, allowed):
    case, u = PROBLEMS[name].build(), interpolated(values())
    points = torch.rand(30, 2, dtype=torch.float64) * torch.tensor([0.002, 2.0]) + torch.tensor([0.499, -1.0])
    assert vmap(lambda point: case.terms["interior"].function(u, point))(points).abs().max() < allowed
    # Values and derivatives at both ends of the period are the same.
    sides = points.clone()
    sides[:, 1] = -1
    found = vmap(lambda point: torch.stack(case.terms["sides"].function(u, point)))(sides)
    assert found.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["allen-cahn", "kdv"])
def test_a_reference_starts_with_the_first_values_and_has_its_grid(name):
    case = PROBLEMS[name].build()
    points, values = case.terms["start"].draw("start", 20)
    first = case.points[:, 0] == 0
    places, expected = case.points[first, 1], case.expected[first]
    nearest = (points[:, 1:] - places).abs().argmin(1)
    assert (points[:, 0] == 0).all()
    step = float(places[1] - places[0])
    assert (values - expected[nearest]).abs().max() < 4 * step
    assert len(case.points) == len(case.expected) == first.sum() * 101


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_the_references_converge_like_spectral_methods():
    ac = [solutions.allen_cahn(n, 10, 50)[:, :: n // 128] for n in (512, 1024, 2048)]
    assert relative(ac[0], ac[2]) < 3e-7 and relative(ac[1], ac[2]) < 3e-9
    assert relative(ac[2], solutions.allen_cahn(2048, 10, 100)[:, ::16]) < 1e-9, "steps in time"
    kdv = [solutions.korteweg_de_vries(n, 10, 800)[:, :: n // 128] for n in (128, 256, 512)]
    assert relative(kdv[0], kdv[2]) < 1e-4 and relative(kdv[1], kdv[2]) < 1e-10


def test_the_exponential_step_has_order_four():
    """On u' = u^2 - 2 u, whose solution is known."""
    exact = 2 / (1 + math.exp(2.0))  # from u(0) = 1
    errors = []
    for steps in (10, 20):
        found = solutions.integrate(
            np.ones_like, np.full(3, -2.0 + 0j), lambda w: np.fft.rfft(np.fft.irfft(w, 4) ** 2), 1, steps
        )
        errors.append(abs(found[-1, 0] - exact))
    assert 13 < errors[0] / errors[1] < 19


# Surrogates


def test_a_surrogate_is_standardised_by_its_training_rows_and_judged_on_others():
    random = np.random.default_rng(3)
    inputs, targets = random.normal(5, 2, (100, 2)), random.normal(-3, 7, (100, 2))
    x, y, x_test, y_test = surrogates.split(inputs, targets)
    assert len(x) == 75 and len(x_test) == 25
    assert torch.allclose(y.mean(0), torch.zeros(2, dtype=y.dtype), atol=1e-12) and torch.allclose(
        y.std(0, correction=0), torch.ones(2, dtype=y.dtype)
    )
    both = torch.cat([y, y_test])
    assert len(torch.unique(both, dim=0)) == 100, "no row is in both parts"
    case = surrogates.regression((x, y, x_test, y_test), 4, 1)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.zero_()
        case.model[-1].bias.copy_(y_test.mean(0))
    assert case.error() == pytest.approx(1.0), "the mean has an error of one standard deviation"


@pytest.mark.parametrize("name", ["fluid", "engine"])
def test_the_real_data_are_what_they_should_be(name):
    for package in PROBLEMS[name].needs:
        if missing("", (package,)):
            pytest.skip(f"no module {package}")
    case = PROBLEMS[name].build()
    x, y = case.terms["fit"].samples
    assert x.isfinite().all() and y.isfinite().all() and len(x) > 700
    if name == "fluid":
        from CoolProp.CoolProp import PropsSI

        assert PropsSI("Dmass", "T", 400.0, "P", 1e6, surrogates.FLUID) == pytest.approx(
            1e6 * 0.0440098 / (8.31446 * 400.0), rel=0.05
        ), "close to an ideal gas"


def test_a_missing_package_leaves_its_problem_out_with_a_message(monkeypatch, capsys):
    monkeypatch.setitem(PROBLEMS, "fluid", replace(PROBLEMS["fluid"], needs=("no_such_module",)))
    asked = race.plan(["fluid", "reaction"], ["adam"], [0], 1.0)
    assert {entry.problem for entry in asked} == {"reaction"}
    message = capsys.readouterr().err
    assert "no_such_module" in message and ".[surrogates]" in message


# Methods


@pytest.mark.parametrize("name", SOLVERS)
def test_every_method_learns(name, tiny, pretended_time):
    method = SOLVERS[name]
    if reason := missing(name, method.needs):
        pytest.skip(reason)
    for problem in ("tiny", "table"):
        if method.applies(PROBLEMS[problem]):
            rate = method.rates[-2 if len(method.rates) > 1 else 0]
            seconds = 0.4 if method.family else 0.04  # 400 steps of the first order, 40 of others
            record = Entry(problem, name, rate, 0, seconds).measure()
            assert record["steps"] > 1 and record["errors"][-1] < 0.9 * PROBLEMS[problem].build().error()
            assert record["times"][-1] >= seconds and len(record["times"]) == len(record["errors"])


def test_methods_with_traced_losses_are_left_out_where_tracing_crashes():
    names = [name for name, method in SOLVERS.items() if not method.applies(PROBLEMS["kdv"])]
    assert {"adam-lbfgs", "ssbroyden", "adam-traced", "soap-traced"} <= {*names}
    assert SOLVERS["ssbroyden"].applies(PROBLEMS["burgers2d"])


def test_a_traced_loss_is_the_objective():
    torch.manual_seed(0)
    for name in ("allen-cahn", "burgers2d-fixed"):
        case = PROBLEMS[name].build()
        objective = Objective(case.model, **case.terms)
        drawn = objective.draw()
        loss = drawn()
        gradients = [p.grad.clone() for p in case.model.parameters()]
        closure = TracedLoss(objective).on(drawn.draw())
        for _ in range(2):  # traced, and from the trace
            assert closure().item() == pytest.approx(loss.item(), rel=1e-12)
            for parameter, gradient in zip(case.model.parameters(), gradients, strict=True):
                assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


def test_the_loss_of_levenberg_marquardt_is_the_objective():
    torch.manual_seed(0)
    case = PROBLEMS["burgers2d-fixed"].build()
    found = Residuals(case)(bundles(case.terms))
    assert found.square().sum(1).mean().item() == pytest.approx(Objective(case.model, **case.terms)().item(), rel=1e-12)


def some_update(tau_phi, monkeypatch):
    """A matrix before and after an update, the step and the change of the gradient."""
    random = np.random.default_rng(0)
    root = random.normal(size=(6, 6))
    before = root @ root.T + np.eye(6)
    step, change = random.normal(size=6), random.normal(size=6)
    change *= np.sign(step @ change)
    if tau_phi:
        monkeypatch.setattr(quasi_newton, "self_scaling", lambda b, h, n: tau_phi)
    after = before.copy()
    quasi_newton.update(after, step, change, float(step @ np.linalg.solve(before, step)))
    return before, after, step, change


def test_without_scaling_the_update_is_the_textbook_bfgs(monkeypatch):
    before, after, s, y = some_update((1.0, 1.0), monkeypatch)
    left = np.eye(6) - np.outer(s, y) / (s @ y)
    assert np.allclose(after, left @ before @ left.T + np.outer(s, s) / (s @ y), rtol=1e-10)


def test_a_self_scaled_update_meets_the_secant_equation_and_stays_positive(monkeypatch):
    _, after, s, y = some_update(None, monkeypatch)
    assert np.allclose(after @ y, s) and np.linalg.eigvalsh(after).min() > 0
    assert np.allclose(after, after.T)


class Rosenbrock(quasi_newton.Surface):
    def __init__(self):
        self.calls = 0

    def both(self, point):
        from scipy.optimize import rosen, rosen_der

        self.calls += 1
        return float(rosen(point)), rosen_der(point)


def test_self_scaled_broyden_finds_the_minimum_of_rosenbrocks_function():
    surface, inverse = Rosenbrock(), np.eye(8)
    *_, last = quasi_newton.broyden_iterations(surface, np.full(8, -1.0), inverse)
    assert np.allclose(last.point, 1.0, atol=1e-5) and surface.calls < 1000
