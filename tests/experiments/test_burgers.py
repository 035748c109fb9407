"""The Burgers tasks: exact solutions, derivatives that go forward, points, and what a run reports."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from experiments.solutions import cole_hopf
from experiments.tasks.burgers import Burgers2d, Burgers2dFixed, Burgers100d, BurgersNd
from experiments.tasks.domains import Product, boundary_points, generator, uniform_points
from experiments.tasks.pinn import Network, Operator

NU = 0.01 / math.pi
TASKS = (Burgers2d, Burgers2dFixed, Burgers100d, BurgersNd)
SMALL = {"boundary_points": 40, "interior_points": 100}


def started(task, seed=0):
    torch.manual_seed(seed)
    return task.start(seed)


def derivative(u: Tensor, points: Tensor) -> Tensor:
    return torch.autograd.grad(u.sum(), points, create_graph=True, allow_unused=True, materialize_grads=True)[0]


def operator_by_autograd(function, points: Tensor, viscosity: float = NU) -> Tensor:
    """L(u) by nested differentiation, the slow twin."""
    points = points.clone().requires_grad_()
    u = function(points)
    first = derivative(u, points)
    result = first[:, -1] + u * first[:, :-1].sum(1)
    for axis in range(points.shape[1] - 1):
        result = result - viscosity * derivative(first[:, axis], points)[:, axis]
    return result


# The exact solutions


def test_cole_hopf_has_converged_in_the_number_of_nodes():
    x, t = np.meshgrid(np.linspace(-1, 1, 201), np.linspace(0, 1, 101), indexing="ij")
    assert np.abs(cole_hopf(x, t, NU) - cole_hopf(x, t, NU, nodes=200)).max() < 1e-12


def test_cole_hopf_keeps_its_initial_and_boundary_values():
    x, t = np.linspace(-1, 1, 101), np.linspace(0, 1, 51)
    assert cole_hopf(x, 0, NU) == pytest.approx(-np.sin(np.pi * x), abs=1e-14)
    assert cole_hopf(np.array([[-1], [0], [1]]), t, NU) == pytest.approx(0, abs=1e-13)


def test_cole_hopf_solves_the_equation():
    """Central differences of fourth order; the shock is as thin as the viscosity, so the step is much smaller."""
    h = 1e-4
    x, t = np.meshgrid(np.linspace(-0.9, 0.9, 37), np.linspace(0.1, 0.9, 9), indexing="ij")
    first, second = np.array([1, -8, 0, 8, -1]) / 12 / h, np.array([-1, 16, -30, 16, -1]) / 12 / h**2
    along_x = np.stack([cole_hopf(x + k * h, t, NU) for k in range(-2, 3)], -1)
    along_t = np.stack([cole_hopf(x, t + k * h, NU) for k in range(-2, 3)], -1)
    residual = along_t @ first + along_x[..., 2] * (along_x @ first) - NU * (along_x @ second)
    assert np.abs(residual).max() < 1e-4 * np.abs(along_x @ first).max()


def test_cole_hopf_agrees_with_the_method_of_lines():
    """Fourier modes in space, for a viscosity at which few are enough, and SciPy's integrator in time."""
    x = np.arange(-64, 64) / 64
    wave = 1j * np.pi * np.fft.fftfreq(128, 1 / 128)

    def velocity(_, u):
        return np.fft.ifft(0.05 * wave**2 * np.fft.fft(u) - wave * np.fft.fft(u * u) / 2).real

    solution = solve_ivp(velocity, (0, 0.5), -np.sin(np.pi * x), method="DOP853", rtol=1e-11, atol=1e-11)
    assert cole_hopf(x, 0.5, 0.05) == pytest.approx(solution.y[:, -1], abs=1e-8)


@pytest.mark.parametrize("dimensions", (2, 3, 6, 100))
def test_forcing_is_the_operator_applied_to_the_product(dimensions):
    equation = Product(dimensions, NU, torch.float64, samples=2, random=generator(0))
    points = torch.cat([draw(6, dimensions, generator(1)) for draw in (uniform_points, boundary_points)])
    expected = operator_by_autograd(equation.exact, points).detach()
    # In 100 dimensions the values are tiny, and must still be right.
    assert torch.allclose(equation.forcing(points), expected, rtol=1e-9, atol=1e-12 * float(expected.abs().min()))
    assert bool((equation.exact(points[7::2]) == 0).all())


def test_norm_of_the_product_is_the_known_one_and_that_of_quadrature():
    assert math.sqrt(Product(100, NU, torch.float64, 2, generator(0)).mean_square) == pytest.approx(2.0e-14, rel=0.02)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    grid = torch.tensor(list(product(nodes, nodes, (nodes + 1) / 2)))
    weight = torch.tensor(list(product(weights, weights, weights))).prod(-1) / 8
    equation = Product(3, NU, torch.float64, 2, generator(0))
    assert equation.mean_square == pytest.approx(float((weight * equation.exact(grid) ** 2).sum()), rel=1e-12)


@pytest.mark.parametrize("dimensions", (3, 100))
def test_relative_error_sees_a_solution_that_random_points_miss(dimensions):
    equation = Product(dimensions, NU, torch.float64, samples=4000, random=generator(0))
    size = math.sqrt(equation.mean_square)

    def error(function):
        return equation.errors(function)["relative_l2"]

    assert error(lambda points: equation.exact(points)) == 0
    assert error(lambda points: points.new_zeros(len(points))) == pytest.approx(1, rel=0.03)
    assert error(lambda points: 0.5 * equation.exact(points)) == pytest.approx(0.5, rel=0.03)
    assert error(lambda points: points.new_full((len(points),), 100 * size)) == pytest.approx(100, rel=0.03)


# Derivatives that go forward


@pytest.mark.parametrize("activation", ("tanh", "relu"))
@pytest.mark.parametrize(("dimensions", "width", "depth"), ((2, 20, 8), (2, 5, 1), (4, 12, 3), (12, 6, 2), (30, 10, 3)))
def test_operator_and_gradients_equal_nested_differentiation(activation, dimensions, width, depth):
    torch.manual_seed(0)
    network = Network(dimensions, width, depth, activation, torch.float64)
    for layer in network.layers:
        torch.nn.init.normal_(layer.bias, std=0.3)
    operator = Operator(network, viscosity=0.3)
    operator.chunk = 17
    points, forcing = uniform_points(40, dimensions, generator(0)), torch.randn(40, dtype=torch.float64)

    expected = operator_by_autograd(network, points, 0.3)
    assert torch.allclose(operator(points), expected, rtol=1e-10, atol=1e-10)
    loss = (expected - forcing).square().mean()
    gradients = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)
    ours = operator.mean_square(points, forcing)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-12)
    for parameter, gradient, our in zip(
        network.parameters(), gradients, torch.autograd.grad(ours, list(network.parameters())), strict=True
    ):
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        assert torch.allclose(our, gradient, rtol=1e-10, atol=1e-10 * float(gradient.abs().max() + 1))


def test_relu_has_no_laplacian():
    network = Network(2, 20, 3, "relu", torch.float64)
    points = uniform_points(50, 2, generator(0))
    assert torch.equal(Operator(network, 0.0)(points), Operator(network, 1e6)(points))


def test_degenerate_first_layers_keep_the_laplacian_exact():
    """Rows that repeat, vanish or point along the diagonal: their span has fewer dimensions than there are rows."""
    torch.manual_seed(0)
    network = Network(9, 4, 2, "tanh", torch.float64)
    with torch.no_grad():
        network.layers[0].weight[1] = network.layers[0].weight[0]
        network.layers[0].weight[2] = 0
        network.layers[0].weight[3] = 1
    points = uniform_points(20, 9, generator(0))
    assert torch.allclose(Operator(network, 1.0)(points), operator_by_autograd(network, points, 1.0), rtol=1e-10)


def test_operator_follows_weights_that_were_replaced_and_reports_nan():
    network = Network(3, 5, 2, "tanh", torch.float64)
    operator, points = Operator(network, NU), uniform_points(5, 3, generator(0))
    before = operator(points)
    for parameter in network.parameters():
        parameter.data = 2 * parameter.data
    assert torch.allclose(operator(points), operator_by_autograd(network, points), rtol=1e-10)
    assert not torch.allclose(operator(points), before)
    network.layers[0].weight.data[:] = math.nan
    assert bool(operator(points).isnan().all())


# Points


@pytest.mark.parametrize("cls", TASKS)
def test_batches_depend_on_the_seed_and_the_held_step_alone(cls):
    task = cls(hold=10, **SMALL)
    one, two = started(task), started(task)
    later = two.batch(25)
    for step in (0, 9, 20, 29):
        one.loss(step)
    assert all(torch.equal(a, b) for a, b in zip(one.batch(29), later, strict=True))
    assert not torch.equal(one.batch(9).interior, one.batch(10).interior)
    assert torch.equal(one.batch(9).interior, two.batch(0).interior)
    assert not torch.equal(one.batch(0).interior, started(task, seed=1).batch(0).interior)


def test_fixed_points_stay():
    problem = started(Burgers2dFixed(**SMALL))
    assert problem.batch(0) is problem.batch(2999)
    assert problem.batch(0).interior.dtype == torch.float64


@pytest.mark.parametrize("cls", TASKS)
def test_sizes_are_the_papers_and_validation_points_are_not_trained_on(cls):
    problem = started(cls())
    assert [len(part) for part in problem.batch(0)] == [320, 320, 3200, 3200]
    assert [len(part) for part in problem.validation] == [80, 80, 800, 800]
    trained = {tuple(point) for step in range(0, 500, 100) for point in problem.batch(step).interior.tolist()}
    assert not trained & {tuple(point) for point in problem.validation.interior.tolist()}
    assert not torch.equal(problem.validation.interior, started(cls(), seed=1).validation.interior)


@pytest.mark.parametrize("dimensions", (2, 5))
def test_boundary_points_are_half_initial_and_half_on_faces(dimensions):
    points = boundary_points(1000, dimensions, generator(3))
    assert bool((points[::2, -1] == 0).all() and (points[1::2, -1] > 0).all())
    on_face = points[:, :-1].abs() == 1
    assert bool((on_face[1::2].sum(1) == 1).all()) and not bool(on_face[::2].any())
    sides = points[:, :-1][on_face]
    assert abs(float(sides.mean())) < 0.2
    assert bool((on_face.sum(0) > 500 / (dimensions - 1) * 0.7).all())


# What a run reports


@pytest.mark.parametrize("cls", TASKS)
def test_evaluation_holds_every_metric_and_the_zero_network_is_the_zero_predictor(cls):
    problem = started(cls(**SMALL))
    for parameter in problem.model.parameters():
        torch.nn.init.zeros_(parameter)
    metrics, reference = problem.evaluate(), problem.references()["zero predictor"]
    assert set(metrics) == set(reference) == set(cls.metrics)
    assert metrics["validation_mse"] == metrics["mse_u"] + metrics["mse_f"]
    for name in ("validation_mse", "mse_u", "mse_f"):
        assert metrics[name] == pytest.approx(reference[name], rel=1e-6, abs=0)
    assert metrics["relative_l2"] == pytest.approx(1, rel=0.03)


def test_zero_predictor_numbers():
    """Half of the given values are of a sine wave, whose mean square is a half; in 100 dimensions all are tiny."""
    zero = started(Burgers2d(boundary_points=20_000)).references()["zero predictor"]
    assert zero["mse_u"] == pytest.approx(0.25, rel=0.05)
    assert zero["mse_f"] == 0
    zero = started(Burgers100d()).references()["zero predictor"]
    assert 0 < zero["validation_mse"] < 1e-28


@pytest.mark.parametrize("cls", TASKS)
def test_loss_is_what_evaluation_measures_on_other_points(cls):
    problem = started(cls(**SMALL))
    problem.validation = problem.batch(0)
    assert problem.loss(0).item() == pytest.approx(problem.evaluate()["validation_mse"], rel=1e-6)


@pytest.mark.parametrize("cls", TASKS)
def test_training_lowers_the_loss(cls):
    problem = started(cls(hold=0, **SMALL))
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = problem.loss(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]


def test_pictures_show_the_solution_and_the_network():
    problem = started(Burgers2d(**SMALL))
    pictures = problem.pictures()
    assert {name: array.shape for name, array in pictures.items()} == {
        "x": (100,), "t": (60,), "exact": (100, 60), "predicted": (100, 60)
    }  # fmt: skip
    assert all(array.dtype == np.float32 for array in pictures.values())
    assert pictures["exact"][:, 0] == pytest.approx(-np.sin(np.pi * pictures["x"]), abs=1e-5)
    corner = problem.model(torch.tensor([[1.0, 0.0], [-1.0, 1.0]])).tolist()
    assert [pictures["predicted"][-1, 0], pictures["predicted"][0, -1]] == pytest.approx(corner, abs=1e-6)
    assert started(BurgersNd(**SMALL)).pictures() == {}


@pytest.mark.parametrize(
    ("settings", "names"),
    (
        ({"activation": "gelu"}, "activation"),
        ({"precision": "half"}, "precision"),
        ({"training_share": 1.0}, "training_share"),
        ({"interior_points": 1}, "interior_points"),
        ({"hold": -1}, "hold"),
        ({"width": 0}, "width"),
    ),
)
def test_wrong_settings_are_named(settings, names):
    with pytest.raises(ValueError, match=f"Invalid.*{names}"):
        Burgers2d(**settings).start(0)
    with pytest.raises(ValueError, match=f"Invalid.*{names}"):
        BurgersNd(**settings).start(0)


def test_a_companion_needs_few_dimensions():
    for dimensions in (1, 7):
        with pytest.raises(ValueError, match=f"Invalid dimensions: {dimensions}"):
            BurgersNd(dimensions=dimensions).start(0)
