"""``Objective`` and ``Term``: residuals of single samples, as a closure for any optimizer."""

import math

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacrev, jvp
from torch.optim import LBFGS, SGD, Adam

from torch_anderson import GaussNewton, Objective, Term

EX = torch.tensor([1.0, 0.0], dtype=torch.float64)
NU = 0.01 / math.pi


def burgers(u, point):
    (u_x, u_t), (u_xx, _) = jvp(grad(u), (point,), (EX,))
    return u_t + u(point) * u_x - NU * u_xx


def known(u, point, value):
    return u(point) - value


def points(count):
    return torch.rand(count, 2, dtype=torch.float64) * 2 - 1


def edge(count):
    found = points(count)
    found[:, 1] = 0
    return found, -torch.sin(math.pi * found[:, 0])


def network(outputs=1, *layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 10), nn.Tanh(), *layers, nn.Linear(10, outputs)).double()


def equation(model, **changed):
    """Without retained samples, so that runs can be compared with others that draw theirs by hand."""
    terms = {
        "interior": Term(burgers, points, count=40, retain=False),
        "edge": Term(known, edge, count=10, weight=3.0, retain=False),
    }
    return Objective(model, **terms | changed)


def burgers_by_autograd(model, x):
    """The same residual, the ordinary way."""
    x = x.clone().requires_grad_()
    u = model(x)[:, 0]
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return slope[:, 1] + u * slope[:, 0] - NU * bend[:, 0]


def loss_by_autograd(model, inner, rim):
    interior = burgers_by_autograd(model, inner).square().mean()
    return interior + 3.0 * (model(rim[0])[:, 0] - rim[1]).square().mean()


# ------------------------------------------------------------------------------------------------------- the loss


def test_loss_and_gradients_are_those_of_the_ordinary_way():
    model, twin = network(), network()
    torch.manual_seed(1)
    inner, rim = points(40), edge(10)
    expected = loss_by_autograd(twin, inner, rim)
    expected.backward()
    torch.manual_seed(1)
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), 9.0)  # of an earlier step
    loss = equation(model)()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_several_residuals_of_a_sample_add_up(kind):
    model = network(3)
    x = points(7)

    def function(u, point):
        first, rest = u(point)[0], jacrev(u)(point)
        return {"a": first, "b": rest} if kind is dict else kind([first, rest])

    jacobians = torch.stack([torch.autograd.functional.jacobian(model, row[None])[0, :, 0] for row in x])
    expected = model(x)[:, 0].square().mean() + jacobians.square().sum((1, 2)).mean()
    closure = Objective(model, only=Term(function, x)).draw()
    torch.testing.assert_close(closure.loss(), expected)


def test_u_is_a_scalar_for_one_output_and_a_vector_for_several():
    shapes = []
    for outputs in (1, 3):
        function = lambda u, point: shapes.append(u(point).shape) or u(point)  # noqa: E731
        Objective(network(outputs), only=Term(function, points, count=5))()
    assert shapes == [(), (3,)]


def test_second_derivatives_may_be_taken_as_a_whole():
    model, x = network(), points(6)
    found = Objective(model, only=Term(lambda u, point: hessian(u)(point).trace(), x)).draw().loss()
    bends = [torch.autograd.functional.hessian(lambda z: model(z[None])[0, 0], row).trace() for row in x]
    torch.testing.assert_close(found.detach(), torch.stack(bends).square().mean())


def test_complex_residuals_count_by_their_absolute_values():
    model, x = network(2), points(6)
    found = Objective(model, only=Term(lambda u, point: torch.view_as_complex(u(point)), x)).draw()
    torch.testing.assert_close(found.loss(), model(x).square().sum(1).mean())


def test_dropout_gives_each_sample_its_own_mask():
    model = network(1, nn.Dropout(0.5))
    closure = Objective(model, only=Term(lambda u, point: u(point), torch.ones(50, 2).double())).draw()
    assert len(closure._outputs("only", closure.bound["only"])[0].unique()) > 10


# ------------------------------------------------------------------------------------------------------- the samples


def recorded(drawn):
    def sampler(count):
        drawn.append(points(count))
        return drawn[-1]

    return sampler


def test_a_call_draws_anew_and_a_drawn_closure_keeps_its_samples():
    drawn = []
    objective = equation(network(), interior=Term(burgers, recorded(drawn), count=20))
    objective()
    objective()
    assert len(drawn) == 2 and not torch.equal(*drawn)
    closure = objective.draw()
    assert closure().item() == closure().item()
    assert len(drawn) == 3


def test_samples_of_a_data_loader_replace_those_of_a_term():
    drawn = []
    model = network()
    objective = equation(model, interior=Term(burgers, recorded(drawn), count=20))
    batch, rim = points(13), edge(4)
    closure = objective(interior=batch, edge=rim)
    torch.testing.assert_close(closure.loss(), loss_by_autograd(model, batch, rim))
    assert not drawn
    assert objective(edge=rim)() > 0
    assert len(drawn) == 1


@pytest.mark.parametrize("make", [lambda p: Adam(p, lr=1e-2), lambda p: LBFGS(p, max_iter=5)], ids=["adam", "lbfgs"])
def test_it_is_a_closure_for_other_optimizers(make):
    model = network()
    objective = equation(model, interior=Term(burgers, points(40)), edge=Term(known, edge(10)))
    optimizer = make(model.parameters())
    before = objective.draw().loss().item()
    for _ in range(20):
        optimizer.step(objective)
    assert objective.draw().loss().item() < 0.9 * before


def test_buffers_stay_what_they_are_under_vmap():
    """The modules are called within vmap and grad: what is kept of their buffers must survive both."""
    model = network(1, nn.BatchNorm1d(10)).eval()
    with torch.no_grad():
        model[2].running_mean.uniform_()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    objective = equation(model)
    for _ in range(30):
        optimizer.step(objective)
    assert optimizer.stats.counts["attempted"] > 0
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())
    assert all(type(buffer) is torch.Tensor for buffer in model.buffers())


# ------------------------------------------------------------------------------------------------------- what is wrong

REFUSED = {
    "no function": (lambda: Term(3, points, count=5), TypeError, "Invalid function: 3"),
    "no samples": (lambda: Term(known, None), TypeError, "Invalid samples: NoneType"),
    "samples without rows": (lambda: Term(known, torch.tensor(1.0)), ValueError, "one row for each"),
    "no sample": (lambda: Term(known, torch.zeros(0, 2)), ValueError, "at least one sample"),
    "unequal rows": (lambda: Term(known, (torch.zeros(3, 2), torch.zeros(4))), ValueError, r"\(3, 2\), \(4,\)"),
    "no count": (lambda: Term(known, points), ValueError, "`count` is needed"),
    "a count of 0": (lambda: Term(known, points, count=0), ValueError, "Invalid count: 0"),
    "a count of given samples": (lambda: Term(known, points(3), count=3), ValueError, "Invalid count: 3"),
    "a weight of 0": (lambda: Term(known, points(3), weight=0), ValueError, "Invalid weight: 0"),
    "no model": (lambda: Objective(points, a=Term(known, points(3))), TypeError, "Invalid model: function"),
    "no term": (lambda: Objective(network()), ValueError, "at least one"),
    "a function as term": (lambda: Objective(network(), a=burgers), TypeError, "Invalid term 'a': function"),
    "an unknown term": (lambda: equation(network())(inside=points(3)), TypeError, "'inside'.*'interior', 'edge'"),
    "a batch of numbers": (lambda: equation(network())(interior=[1.0]), TypeError, "samples of 'interior': list"),
    "too few samples": (lambda: draw(lambda count: points(count - 1)), ValueError, "'interior'.*19 samples.*20"),
    "a sampler of nothing": (lambda: draw(lambda count: None), TypeError, "sampler of 'interior'.*NoneType"),
    "a sampler of numbers": (lambda: draw(lambda count: 1.0), TypeError, "sampler of 'interior'.*float"),
}


def draw(sampler):
    equation(network(), interior=Term(burgers, sampler, count=20))()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


def gradient_by_autograd(u, point):
    x = point.clone()
    return torch.autograd.grad(u(x), x, create_graph=True)[0].sum()


FUNCTIONS = {
    "a number": (lambda u, point: 1.0, TypeError, "'only' returned float"),
    "nothing": (lambda u, point: None, TypeError, "'only' returned NoneType"),
    "an empty tuple": (lambda u, point: (), TypeError, "'only' returned nothing"),
    "integers": (lambda u, point: (u(point) > 0).long(), TypeError, "'only' returned integers"),
    "no dependence": (lambda u, point: point.sum(), ValueError, "'only' does not depend on the model's weights"),
    "a detached output": (lambda u, point: u(point).detach(), ValueError, "'only' does not depend on the model's"),
    "not finite": (lambda u, point: u(point) / 0, ValueError, "'only' is not finite"),
    "a number made of a tensor": (lambda u, point: u(point).item(), RuntimeError, "term 'only'.*one sample"),
    "a choice by if": (lambda u, point: u(point) if u(point) > 0 else point.sum(), RuntimeError, "torch.where"),
    "autograd in vmap": (gradient_by_autograd, RuntimeError, "torch.func"),
    "the user's error": (lambda u, point: {}["missing"], KeyError, "missing"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_no_residual_is_refused_with_advice(name):
    function, error, message = FUNCTIONS[name]
    with pytest.raises(error, match=f"(?s){message}"):
        Objective(network(), only=Term(function, points, count=5))()
