"""Graphs of residuals: nothing is computed twice, nothing different is merged, and the compiler stays unloaded."""

import subprocess
import sys
from math import inf, nan

import pytest
import torch

from torch_anderson._gauss_newton.residuals import close
from torch_anderson._gauss_newton.trace import trace


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_equal_expressions_are_computed_once():
    def function(x, y):
        return torch.tanh(x @ y) * torch.tanh(x @ y) + (x @ y)

    x, y = torch.randn(3, 4), torch.randn(4, 2)
    module = trace(function, (x, y))
    assert sorted(targets(module)) == ["aten.add.Tensor", "aten.mm.default", "aten.mul.Tensor", "aten.tanh.default"]
    torch.testing.assert_close(module(x, y), function(x, y), rtol=0, atol=0)


def test_numbers_that_are_equal_but_not_the_same_are_not_merged():
    def function(x):
        return torch.stack([torch.full_like(x, 1).sum() / x.sum(), 0.0 / x.sum(), -0.0 / x.sum(), x.sum(0), x.sum(-1)])

    x = torch.randn(3)
    found = trace(function, (x,))(x)
    assert torch.equal(torch.signbit(found), torch.signbit(function(x))) and torch.equal(found, function(x))


def test_random_numbers_are_drawn_as_often_as_written():
    def function(x):
        return torch.rand_like(x) - torch.rand_like(x)

    assert trace(function, (torch.ones(9),))(torch.ones(9)).any()


def test_the_first_jump_does_not_load_the_compiler():
    code = """if True:
        import sys, torch
        from torch_anderson import GaussNewton, Objective, Term
        model = torch.nn.Linear(2, 1)
        only = Term(lambda u, x: torch.func.grad(u)(x).sum() - u(x), lambda k: torch.rand(k, 2), count=9)
        optimizer = GaussNewton(torch.optim.Adam(model.parameters()))
        optimizer.step(Objective(model, only=only))
        assert optimizer.stats.counts["attempted"] and optimizer._driver.traces[0].terms["only"].factors
        sys.exit("torch._inductor.lowering" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("value", [2.001, inf, nan])
def test_a_trace_with_another_number_is_not_close(value):
    plain, other = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([[1.0, value]], dtype=torch.float64)
    assert close(plain, plain + 1e-9)
    assert not close(plain, other) and not close(other, plain)
    assert not close(plain, plain[:, :1])


@pytest.mark.parametrize("value", [inf, nan])
def test_numbers_that_are_not_finite_are_not_close_to_themselves(value):
    found = torch.tensor([[1.0, value]], dtype=torch.float64)
    assert not close(found, found)
