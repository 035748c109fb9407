"""Jumps along the tangent: against dense Levenberg-Marquardt, SciPy, closed forms and autograd's Hessians."""

import math

import pytest
import scipy.optimize
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy, huber_loss
from torch.optim import SGD, Adam
from training import weights

from torch_anderson import GaussNewton, Objective, Term
from torch_anderson._gauss_newton import jump
from torch_anderson._gauss_newton import losses as loss_functions
from torch_anderson._gauss_newton.jacobian import Memory
from torch_anderson._gauss_newton.losses import Convex, Squares
from torch_anderson._gauss_newton.residuals import Residuals
from torch_anderson._ranks.ranks import Ranks

X = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(-1, 1)


def network(outputs=1, width=6, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, outputs)).to(dtype)


def fit_sine(u, x):
    return u(x) - torch.sin(3 * x.sum())


def measured(model, function=fit_sine, loss=None, points=X, fitted=20, weight=2.0):
    """The linearization of one jump on given samples, with the first of them fitted."""
    objective = Objective(model, only=Term(function, points, weight=weight, loss=loss))
    residuals = Residuals(objective, list(model.parameters()), Ranks())
    samples = {"only": points if isinstance(points, tuple) else (points,)}
    residuals.prepare(residuals.read(), samples, {"only": fitted})
    return jump.measure(residuals, residuals.batch(samples, {"only": fitted}), residuals.read(), Memory())


def dense(model, function, points, weight=2.0):
    """Residuals as a function of flat weights, scaled such that the loss is |r|^2; from functional_call alone."""
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)
    sizes = [math.prod(shape) for shape in shapes]

    def residual(flat):
        named = {n: part.view(s) for n, part, s in zip(names, flat.split(sizes), shapes, strict=True)}
        found = [function(lambda z: functional_call(model, named, (z[None],))[0].squeeze(), x) for x in points]
        return torch.stack(found).reshape(-1) * math.sqrt(weight / len(points))

    return residual, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("momentum", [0.0, 1.0])
@pytest.mark.parametrize("damping", [1e-1, 1e-4])
def test_a_jump_is_that_of_dense_levenberg_marquardt_with_momentum(momentum, damping):
    model = network()
    residual, w = dense(model, fit_sine, X[:20])
    r, slopes = residual(w), torch.autograd.functional.jacobian(residual, w)
    before = momentum * torch.linspace(-0.01, 0.01, len(w), dtype=torch.float64)
    eye = torch.eye(len(w), dtype=torch.float64)
    expected = jump.MOMENTUM * before + torch.linalg.solve(
        slopes.T @ slopes + damping * eye, slopes.T @ (r - jump.MOMENTUM * slopes @ before)
    )
    found = measured(model)
    assert found.fitted_loss == pytest.approx(float(r @ r))
    curve = jump.fit(found, before, damping, 0.25, Memory())
    torch.testing.assert_close(curve.jump, expected, rtol=1e-7, atol=1e-10)
    left = r - slopes @ expected
    assert curve.promised == pytest.approx(float(left @ left))


def test_the_second_order_solves_for_the_second_derivative_along_the_jump():
    model, damping = network(), 1e-2
    residual, w = dense(model, fit_sine, X[:20])
    slopes = torch.autograd.functional.jacobian(residual, w)
    curve = jump.fit(measured(model), torch.zeros_like(w), damping, 1e-3, Memory())
    second = torch.func.jvp(lambda z: torch.func.jvp(residual, (z,), (curve.jump,))[1], (w,), (curve.jump,))[1]
    eye = torch.eye(len(w), dtype=torch.float64)
    expected = torch.linalg.solve(slopes.T @ slopes + damping * eye, slopes.T @ second)
    torch.testing.assert_close(curve.second_order, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def test_the_third_order_solves_for_the_third_order_along_the_curve():
    model, damping = network(), 1e-2
    residual, w = dense(model, fit_sine, X[:20])
    slopes = torch.autograd.functional.jacobian(residual, w)
    curve = jump.fit(measured(model), torch.zeros_like(w), damping, 1e-2, Memory())

    def along(*directions):
        function = residual
        for direction in directions:
            function = lambda z, f=function, d=direction: torch.func.jvp(f, (z,), (d,))[1]  # noqa: E731
        return function(w)

    third = 3 * along(curve.jump, curve.second_order) - along(curve.jump, curve.jump, curve.jump)
    eye = torch.eye(len(w), dtype=torch.float64)
    expected = torch.linalg.solve(slopes.T @ slopes + damping * eye, slopes.T @ third)
    torch.testing.assert_close(curve.third_order, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


class One(nn.Module):
    """A network whose output is its only weight."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))

    def forward(self, x):
        return self.w * x


def fitted_one(function, w, damping, length, samples=2):
    """The curve of a jump for residuals of one weight, fitted to the first of equal samples."""
    found = measured(One(w), function, points=torch.ones(samples, 1).double(), fitted=1, weight=1.0)
    return jump.fit(found, torch.zeros(1).double(), damping, length, Memory())


def test_geodesic_acceleration_follows_a_parabola_in_closed_form():
    """r = (w, w + c w^2 - 1) with one weight: r'' = 2 c jump^2 in the second residual alone."""
    c, w, damping = 0.7, 0.5, 0.1
    curve = fitted_one(lambda u, x: (u(x), u(x) + c * u(x) ** 2 - 1), w, damping, length=0.5)
    slope = 1 + 2 * c * w
    normal = 1 + slope**2 + damping
    step = (w + slope * (w + c * w**2 - 1)) / normal
    bend = slope * 2 * c * step**2 / normal
    assert float(curve.jump) == pytest.approx(step)
    assert float(curve.second_order) == pytest.approx(bend)
    assert float(curve.third_order) == pytest.approx(slope * 3 * 2 * c * step * bend / normal, rel=0.1)


def test_without_unseen_samples_the_curve_is_of_second_order():
    curve = fitted_one(lambda u, x: torch.exp(u(x)) - 1, 0.8, 0.0, 0.02, samples=1)
    assert float(curve.second_order) != 0 and float(curve.third_order) == 0


def test_along_the_curve_a_residual_falls_in_proportion_to_the_length_to_third_order():
    """r = e^w - 1: without damping w(a) = log((1 - a) e^w + a), so that r(w(a)) = (1 - a) r."""
    w, length = 0.8, 0.02
    curve = fitted_one(lambda u, x: torch.exp(u(x)) - 1, w, 0.0, length)
    ends = [math.log((1 - a) * math.exp(w) + a) for a in (0.1, 0.2, 0.4)]
    found = [w - float(curve.displacement(a)) for a in (0.1, 0.2, 0.4)]
    errors = [abs(one - other) for one, other in zip(found, ends, strict=True)]
    assert errors[0] < 1e-4
    assert 12 < errors[1] / errors[0] < 22, "fourth order"
    assert 12 < errors[2] / errors[1] < 22, "fourth order"


@pytest.mark.parametrize("kind", ["cross_entropy", "huber", "squares as a function"])
def test_other_losses_have_the_generalised_gauss_newton_matrix_of_autograd(kind):
    model = network(3)
    target = torch.arange(30) % 3 if kind == "cross_entropy" else torch.sin(3 * X).expand(30, 3)
    loss = {
        "cross_entropy": cross_entropy,
        "huber": lambda z, y: huber_loss(z, y, delta=5.0),
        "squares as a function": lambda z, y: (z - y).square().sum(),
    }[kind]
    found = measured(model, lambda u, x, y: (u(x), y), loss, (X, target), 30)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    sizes = [p.numel() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]

    def outputs(w):
        named = {n: x.view(p.shape) for n, x, p in zip(names, w.split(sizes), model.parameters(), strict=True)}
        return functional_call(model, named, (X,))

    def total(z):
        return 2.0 * torch.stack([loss(a, b) for a, b in zip(z, target, strict=True)]).mean()

    slopes = torch.autograd.functional.jacobian(outputs, flat).reshape(-1, len(flat))
    z = outputs(flat).detach()
    curvature = torch.autograd.functional.hessian(total, z).reshape(z.numel(), z.numel())
    gradient = torch.autograd.functional.jacobian(total, z).reshape(-1)
    assert found.loss == pytest.approx(float(total(z)))
    rows = found.rows.dense
    torch.testing.assert_close(2 * rows.T @ rows, slopes.T @ curvature @ slopes, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(2 * rows.T @ found.rhs, slopes.T @ gradient, rtol=1e-8, atol=1e-8)


def test_losses_along_parabolas_are_those_of_their_outputs():
    torch.manual_seed(0)
    start, slope, bend = torch.randn(3, 5, 2, dtype=torch.float64)
    lengths = torch.tensor([0.1, 0.7], dtype=torch.float64)
    convex = Convex(lambda z: z.square().sum(), torch.Size([2]), ())
    expected = [(start + a * slope + a**2 * bend).square().sum() for a in lengths]
    for loss in (Squares(), convex):
        torch.testing.assert_close(loss.along(start, slope, bend, lengths), torch.stack(expected))


def trained(model, objective, steps=60, base=lambda p: Adam(p, lr=1e-3), **options):
    optimizer = GaussNewton(base(model.parameters()), **options)
    losses = [float(optimizer.step(objective)) for _ in range(steps)]
    return optimizer, losses


def test_fixed_samples_are_fitted_as_well_as_by_scipy():
    model = network(width=4)
    residual, w = dense(model, fit_sine, X)

    def numpy(function):
        return lambda flat: function(torch.from_numpy(flat)).detach().numpy()

    jacobian = numpy(lambda flat: torch.func.jacrev(residual)(flat))
    expected = scipy.optimize.least_squares(numpy(residual), w.numpy(), jacobian, method="lm", max_nfev=60)
    optimizer, losses = trained(model, Objective(model, only=Term(fit_sine, X, weight=2.0)))
    assert losses[-1] <= 2 * 2 * expected.cost + 1e-12
    assert optimizer.stats.counts["accepted"] > 20


def test_linear_least_squares_are_solved_to_rounding_error():
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    points = torch.randn(60, 4, dtype=torch.float64)
    values = points @ torch.arange(4.0).double() + 0.1 * torch.randn(60, dtype=torch.float64)
    matrix = torch.cat([points, torch.ones(60, 1).double()], 1)
    expected = torch.linalg.lstsq(matrix, values).solution
    objective = Objective(model, only=Term(lambda u, x, y: u(x) - y, (points, values)))
    trained(model, objective, 40)
    torch.testing.assert_close(torch.cat([model.weight[0], model.bias]).detach(), expected, rtol=1e-6, atol=1e-6)


def test_a_classifier_is_fitted_below_what_its_base_reaches():
    torch.manual_seed(1)
    points = torch.randn(120, 1, dtype=torch.float64)
    classes = (points[:, 0] > 0.3).long() + (points[:, 0] > 1).long()
    term = Term(lambda u, x, y: (u(x), y), (points, classes), loss=cross_entropy)
    model, plain = network(3), network(3)
    _, losses = trained(model, Objective(model, only=term), 40)
    base = Adam(plain.parameters(), lr=1e-2)
    objective = Objective(plain, only=term)
    expected = [float(base.step(objective).detach()) for _ in range(200)]
    assert losses[0] == pytest.approx(expected[0])
    assert losses[-1] < 0.2 * expected[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_equation_is_solved_by_drawn_samples_in_any_type(dtype):
    """u'' = -u with two values given; a float32 network keeps nearly all of the accuracy."""
    model = network(width=12, dtype=dtype)

    def residual(u, x):
        return grad(lambda z: grad(lambda y: u(y).sum())(z).sum())(x).sum() + u(x)

    ends = torch.tensor([[0.0], [1.5]], dtype=dtype)
    objective = Objective(
        model,
        inside=Term(residual, lambda count: 1.5 * torch.rand(count, 1, dtype=dtype), count=60),
        ends=Term(lambda u, x, y: u(x) - y, (ends, torch.sin(ends[:, 0])), weight=5.0),
    )
    trained(model, objective, 80)
    x = torch.linspace(0, 1.5, 50, dtype=dtype)
    error = (model(x[:, None])[:, 0] - torch.sin(x)).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 1e-6)


def test_parameters_without_influence_and_dead_units_are_no_obstacle():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        model[0].bias.fill_(-10.0)  # no unit is ever active
    _, losses = trained(model, Objective(model, only=Term(fit_sine, X)), 20)
    assert all(map(math.isfinite, losses)) and losses[-1] <= losses[0]
    assert all(x.isfinite().all() for x in weights(model))


def test_weights_of_terms_are_factors_of_the_loss():
    """The mean of two values, weighted 3 to 1."""
    model = nn.Linear(1, 1, bias=False).double()
    one = torch.ones(1, 1, dtype=torch.float64)
    objective = Objective(
        model, a=Term(lambda u, x: u(x) - 1, one, weight=3.0), b=Term(lambda u, x: u(x) - 5, one, weight=1.0)
    )
    trained(model, objective, 20, lambda p: SGD(p, lr=1e-3))
    assert model.weight.item() == pytest.approx(2.0)


@pytest.mark.parametrize("at_once", [1, 100, 10**6])
def test_losses_along_a_parabola_are_those_at_its_points(at_once, monkeypatch):
    monkeypatch.setattr(loss_functions, "OUTPUTS_AT_ONCE", at_once)
    torch.manual_seed(0)
    start, slope, bend = torch.randn(3, 7, 4, dtype=torch.float64)
    labels, lengths = torch.randint(4, (7,)), torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    convex = Convex(cross_entropy, torch.Size([4]), (labels,))
    points = [start + a * slope + a**2 * bend for a in lengths]
    expected = [float(cross_entropy(outputs, labels, reduction="sum")) for outputs in points]
    assert convex.along(start, slope, bend, lengths).tolist() == pytest.approx(expected)


def test_a_loss_may_write_to_what_it_is_given():
    def loss(output, target):
        difference = target.clone()
        difference -= output
        return difference.square().sum()

    model = network()
    term = Term(lambda u, x, y: (u(x), y), (X, torch.sin(3 * X[:, 0])), loss=loss)
    optimizer = GaussNewton(Adam(model.parameters()))
    losses = [float(optimizer.step(Objective(model, only=term))) for _ in range(3)]
    assert optimizer.stats.counts["accepted"] == 3 and losses[-1] < losses[0]
