"""Traced residuals and rows against those that torch.autograd gives for one sample after the other."""

import math

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacrev, jvp

from torch_anderson import GaussNewton, Objective, Term
from torch_anderson._gauss_newton import jacobian, residuals
from torch_anderson._gauss_newton.jacobian import Layout, Memory, Normal, Rows, symmetric_product
from torch_anderson._gauss_newton.residuals import Residuals
from torch_anderson._ranks.ranks import Ranks

NU = 0.01 / math.pi


def mlp(outputs=1, width=7):
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, outputs))


class Indexed(nn.Module):
    """Takes its inputs apart, as many PINNs do, and has a skip connection and a parameter without layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.viscosity = nn.Parameter(torch.tensor(0.3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        t, s = x[:, :1], x[:, 1:]
        hidden = torch.sin(self.first(torch.cat([t, s, t * s], 1)))
        return self.last(hidden + self.scale * torch.tanh(self.second(hidden)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Convolution(nn.Module):
    """Convolves features of one point: no product with a matrix."""

    def __init__(self):
        super().__init__()
        self.layer, self.kernel, self.last = nn.Linear(2, 8), nn.Conv1d(1, 2, 3), nn.Linear(12, 1)

    def forward(self, x):
        return self.last(self.kernel(torch.tanh(self.layer(x)).unsqueeze(1)).flatten(1).tanh())


class Attention(nn.Module):
    """Both coordinates of a point attend to each other."""

    def __init__(self):
        super().__init__()
        self.lift, self.last = nn.Linear(1, 4), nn.Linear(4, 1)
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        tokens = self.lift(x.unsqueeze(-1))
        return self.last(self.heads(tokens, tokens, tokens, need_weights=False)[0].mean(1))


def burgers(u, x):
    (u_x, u_t), (u_xx, _) = jvp(grad(u), (x,), (torch.tensor([1.0, 0.0], dtype=x.dtype),))
    return u_t + u(x) * u_x - NU * u_xx


def with_coefficient(model):
    def residual(u, x):
        return grad(u)(x)[0] - model.viscosity * u(x)

    return residual


CASES = {
    "derivatives": (mlp, burgers),
    "a trace of second derivatives": (mlp, lambda u, x: hessian(u)(x).trace()),
    "forward in forward": (mlp, lambda u, x: jvp(lambda z: jvp(u, (z,), (torch.ones_like(z),))[1], (x,), (x,))[1]),
    "several outputs": (lambda: mlp(3), lambda u, x: u(x) - x[0]),
    "several derivatives": (lambda: mlp(2), lambda u, x: (u(x)[0], jacrev(u)(x))),
    "a dictionary": (lambda: mlp(2), lambda u, x: {"a": u(x).sum(), "b": u(x) * x}),
    "complex": (lambda: mlp(2), lambda u, x: torch.view_as_complex(u(x)).exp()),
    "inputs taken apart": (Indexed, burgers),
    "an unknown coefficient": (Indexed, with_coefficient),
    "two points": (mlp, lambda u, x: u(x) - u(x + 1) + u(torch.stack([x[1], x[0]]))),
    "tied weights": (Tied, burgers),
    "convolution": (Convolution, lambda u, x: u(x) - 1),
    "normalisation": (lambda: nn.Sequential(nn.Linear(2, 6), nn.LayerNorm(6), nn.Linear(6, 1)), burgers),
    "rectified": (lambda: nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 1)), lambda u, x: u(x) ** 2 - 1),
    "attention": (Attention, lambda u, x: u(x) - 1),
    "no hidden layer": (lambda: nn.Linear(2, 1, bias=False), lambda u, x: u(x) - 1),
    "one_hot and indices": (mlp, lambda u, x: u(x * nn.functional.one_hot(torch.tensor(1), 2)) + u(x)),
}
TRACED = set(CASES) - {"convolution", "normalisation"}


def made(name, dtype=torch.float64, samples=23):
    torch.manual_seed(0)
    make, function = CASES[name]
    model = make().to(dtype)
    points = torch.rand(samples, 2, dtype=dtype)
    function = function(model) if function is with_coefficient else function
    objective = Objective(model, only=Term(function, points))
    residuals = Residuals(objective, list(model.parameters()), Ranks())
    residuals.prepare(residuals.read(), {"only": (points,)}, {"only": 10})
    return model, function, points, residuals


def by_autograd(model, function, points):
    """Residuals (k, p) and rows (k, p, n): one sample, and one backward pass, after the other."""
    model, values, rows = model.double(), [], []

    def u(z):
        found = model(z.unsqueeze(0)).squeeze(0)
        return found.reshape(()) if found.numel() == 1 else found

    for point in points.double():
        found = function(u, point)
        parts = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else (found,)
        values.append(torch.cat([(torch.view_as_real(x) if x.is_complex() else x).reshape(-1) for x in parts]))
        slopes = [torch.autograd.grad(r, model.parameters(), retain_graph=True, allow_unused=True) for r in values[-1]]
        rows.append(torch.stack([flat(slope, model) for slope in slopes]))
    return torch.stack(values).detach(), torch.stack(rows)


def flat(slopes, model):
    pairs = zip(slopes, model.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(p) if slope is None else slope).reshape(-1) for slope, p in pairs])


def of_layers(dense, residuals):
    """Dense rows of all parameters, as a place to write to."""
    layout = residuals.layout.as_dense()
    return Rows(layout, dense, [None] * len(layout.shapes))


@pytest.mark.parametrize("name", CASES)
def test_values_and_rows_are_those_of_autograd(name):
    """In blocks of 10 of 23 samples, so that the last block is filled up."""
    model, function, points, residuals = made(name)
    expected, slopes = by_autograd(model, function, points)
    term = residuals.terms["only"]
    assert (term.traced is not None and term.factors is not None) == (name in TRACED), term.untraced
    found = residuals.outputs(residuals.read(), {"only": (points,)})["only"]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    rows = torch.empty(expected.numel(), residuals.n, dtype=torch.float64)
    sums = torch.rand(term.size, len(points), term.size, dtype=torch.float64)
    residuals.rows(residuals.read(), {"only": (points,)}, {"only": sums}, of_layers(rows, residuals))
    weighed = torch.einsum("jkp,kpn->kjn", sums, slopes).reshape(-1, residuals.n)
    torch.testing.assert_close(rows, weighed, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["derivatives", "inputs taken apart", "an unknown coefficient"])
def test_a_network_in_single_precision_is_evaluated_in_double(name):
    model, function, points, residuals = made(name, torch.float32)
    expected, _ = by_autograd(model, function, points)
    found = residuals.outputs(residuals.read(), {"only": (points,)})["only"]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_function_that_needs_single_precision_gets_it():
    torch.manual_seed(0)
    model = mlp()
    matrix = torch.ones(2, 2)
    points = torch.rand(9, 2)
    objective = Objective(model, only=Term(lambda u, x: u(matrix @ x), points))
    residuals = Residuals(objective, list(model.parameters()), Ranks())
    residuals.prepare(residuals.read(), {"only": (points,)}, {"only": 9})
    assert residuals.dtype == torch.float32
    found = residuals.outputs(residuals.read(), {"only": (points,)})["only"]
    torch.testing.assert_close(found.float(), model(points @ matrix.T).detach())
    rows = torch.empty(9, residuals.n, dtype=torch.float64)
    residuals.rows(
        residuals.read(), {"only": (points,)}, {"only": torch.ones(1, 9, 1).double()}, of_layers(rows, residuals)
    )
    model(points @ matrix.T).sum().backward()
    torch.testing.assert_close(rows.sum(0).float(), torch.cat([p.grad.reshape(-1) for p in model.parameters()]))


def test_a_function_that_changes_is_noticed():
    model = mlp().double()
    factor = [1.0]
    points = torch.rand(8, 2, dtype=torch.float64)
    residuals = Residuals(
        Objective(model, only=Term(lambda u, x: factor[0] * u(x), points)), list(model.parameters()), Ranks()
    )
    here, samples = residuals.read(), {"only": (points,)}
    residuals.prepare(here, samples, {"only": 8})
    assert not residuals.changed(here, samples, residuals.outputs(here, samples))
    factor[0] = 1.5
    assert residuals.changed(here, samples, residuals.outputs(here, samples))


def test_rows_are_stored_anew_for_a_function_that_has_changed(monkeypatch):
    monkeypatch.setattr(jacobian, "FACTORS_FROM", 0)
    monkeypatch.setattr(jacobian, "_gram_cost", lambda *_: 0)
    monkeypatch.setattr(residuals, "CHECK_PERIOD", 2)
    torch.manual_seed(0)
    model, twice = mlp().double(), []
    points = torch.rand(30, 2, dtype=torch.float64)
    objective = Objective(model, only=Term(lambda u, x: u(x) + u(2 * x) - 1 if twice else u(x) - 1, points))
    optimizer = GaussNewton(torch.optim.Adam(model.parameters()))
    for step in range(20):
        twice += [True] if step == 3 else []
        optimizer.step(objective)
    assert (model(points) + model(2 * points) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (300, 120), (120, 300)])
@pytest.mark.parametrize("damping", [1e-3, 0.0])
def test_the_damped_normal_equations_are_solved_in_both_forms(shape, damping):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64)
    b = torch.randn(shape[0], generator=generator, dtype=torch.float64)
    found = Normal(Rows.of(rows), damping, Ranks(), Memory()).solve(b)
    matrix = torch.cat([rows, math.sqrt(damping) * torch.eye(shape[1], dtype=torch.float64)])
    expected = torch.linalg.lstsq(matrix, torch.cat([b, b.new_zeros(shape[1])]), driver="gelsd").solution
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_singular_systems_are_damped_until_they_can_be_solved():
    rows = torch.ones(6, 4, dtype=torch.float64)
    normal = Normal(Rows.of(rows), 0.0, Ranks(), Memory())
    torch.testing.assert_close(rows @ normal.solve(torch.ones(6).double()), torch.ones(6).double(), rtol=1e-3, atol=0)
    assert not Normal(Rows.of(0 * rows), 0.0, Ranks(), Memory()).solve(torch.ones(6).double()).any()


def test_a_symmetric_product_has_its_lower_triangle():
    rows = torch.randn(250, 30, dtype=torch.float64)
    found = symmetric_product(rows, torch.empty(250, 250, dtype=torch.float64))
    torch.testing.assert_close(found.tril(), (rows @ rows.T).tril())


@pytest.mark.parametrize("name", sorted(TRACED - {"no hidden layer"}))
def test_rows_from_factors_are_the_dense_ones(name, monkeypatch):
    """J J', J w and J' z with every weight matrix as factors, against dense rows."""
    monkeypatch.setattr(jacobian, "FACTORS_FROM", 0)
    monkeypatch.setattr(jacobian, "_gram_cost", lambda *_: 0)
    _, _, points, residuals = made(name)
    sums = torch.rand(residuals.terms["only"].size, len(points), residuals.terms["only"].size, dtype=torch.float64)
    layout, count = residuals.layout, len(points) * residuals.terms["only"].size
    assert layout.factored and any(
        len(shape) == 2 and uses for shape, uses in zip(layout.shapes, layout.uses, strict=True)
    )
    dense, factored = (Rows.empty(each, count, points.device, Memory()) for each in (layout.as_dense(), layout))
    for rows in (dense, factored):
        residuals.rows(residuals.read(), {"only": (points,)}, {"only": sums}, rows)
    w, z = torch.randn(residuals.n, dtype=torch.float64), torch.randn(count, dtype=torch.float64)
    j = dense.dense
    scale = float(j.norm())
    products = factored.products(torch.empty(count, count, dtype=torch.float64))
    torch.testing.assert_close(products.tril(), (j @ j.T).tril(), rtol=1e-12, atol=1e-12 * scale**2)
    torch.testing.assert_close(factored @ w, j @ w, rtol=1e-12, atol=1e-12 * scale * float(w.norm()))
    torch.testing.assert_close(factored.transposed_times(z), j.T @ z, rtol=1e-12, atol=1e-12 * scale * float(z.norm()))
    assert float(factored.squares()) == pytest.approx(scale**2) and float(dense.squares()) == pytest.approx(scale**2)
    solved = [Normal(rows, 0.1 * scale**2, Ranks(), Memory()).solve(z) for rows in (dense, factored)]
    torch.testing.assert_close(solved[1], solved[0], rtol=1e-8, atol=1e-10)


def test_terms_with_other_numbers_of_uses_share_the_factors_of_a_matrix(monkeypatch):
    torch.manual_seed(0)
    model = mlp().double()
    points, edges = torch.rand(11, 2, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64)
    objective = Objective(model, inside=Term(burgers, points), edges=Term(lambda u, x: u(x), edges))
    residuals = Residuals(objective, list(model.parameters()), Ranks())
    samples = {"inside": (points,), "edges": (edges,)}
    monkeypatch.setattr(jacobian, "FACTORS_FROM", 0)
    monkeypatch.setattr(jacobian, "_gram_cost", lambda *_: 0)
    residuals.prepare(residuals.read(), samples, {"inside": 8, "edges": 4})
    dense, factored = (
        Rows.empty(x, 15, points.device, Memory()) for x in (residuals.layout.as_dense(), residuals.layout)
    )
    sums = {name: torch.ones(1, len(x[0]), 1, dtype=torch.float64) for name, x in samples.items()}
    for rows in (dense, factored):
        residuals.rows(residuals.read(), samples, sums, rows)
    products = factored.products(torch.empty(15, 15, dtype=torch.float64)).tril()
    torch.testing.assert_close(products, (dense.dense @ dense.dense.T).tril(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "uses", "factors"), [((200, 200), 4, True), ((20, 20), 4, False), ((200, 2), 4, False)]
)
def test_matrices_are_factors_where_that_takes_fewer_operations(shape, uses, factors):
    rest = torch.Size([jacobian.FACTORS_FROM])
    layout = Layout.cheapest([torch.Size(shape), rest], [uses, 0])
    assert layout.uses == (uses if factors else 0, 0)
    assert layout.stored == jacobian.FACTORS_FROM + (uses * sum(shape) if factors else shape[0] * shape[1])
    assert not Layout.cheapest([torch.Size((9, 9))], [1]).factored  # small networks have dense rows


def test_constants_that_a_residual_makes_do_not_keep_it_from_float64(caplog):
    """``jvp`` refuses a float32 tangent beside float64 points: a float32 network must not end in float32 for it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
    outside = torch.tensor([1.0])
    points = torch.linspace(0, 3, 40)[:, None]

    def prepared(tangent):
        def slope(u, x):
            return torch.func.jvp(u, (x,), (tangent(x),))[1] - torch.cos(x).sum()

        objective = Objective(model, slope=Term(slope, points))
        optimizer = GaussNewton(torch.optim.Adam(model.parameters()))
        optimizer.step(objective)
        return optimizer._driver.traces[0].dtype

    assert prepared(lambda x: torch.tensor([1.0])) == torch.float64
    assert not caplog.records
    assert prepared(lambda x: outside) == torch.float32
    assert "new_tensor" in caplog.text
