"""Numbers that a residual reads from elsewhere: a change is noticed at the next jump, whatever they are."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD

from torch_anderson import GaussNewton, Objective, Term
from torch_anderson._gauss_newton.residuals import Residuals

X = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(-1, 1)
FACTOR = 1.0


class Settings:
    factor = 1.0


@dataclass(slots=True)
class Slots:
    factor: float = 1.0


class Equation:
    """Residuals as methods, with a coefficient that is computed."""

    def __init__(self):
        self.half = 0.5

    @property
    def factor(self):
        return 2 * self.half

    def amplitude(self):
        return self.factor

    def __call__(self, u, x):
        return u(x) - self.amplitude() * torch.sin(3 * x.sum())


class Scaled(nn.Module):
    """A network with a number for an attribute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.factor = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double(), 1.0

    def forward(self, x):
        return self.factor * self.net(x)


def target(x, factor):
    return factor * torch.sin(3 * x.sum())


def a_global(model):
    def change(value):
        global FACTOR
        FACTOR = value

    change(1.0)
    return lambda u, x: u(x) - FACTOR * torch.sin(3 * x.sum()), change


def an_attribute_of_a_class(model):
    Settings.factor = 1.0
    return lambda u, x: u(x) - target(x, Settings.factor), lambda value: setattr(Settings, "factor", value)


def a_closure(model):
    factor = 1.0

    def change(value):
        nonlocal factor
        factor = value

    return lambda u, x: u(x) - target(x, factor), change


def an_entry(model):
    settings = {"physics": [1.0]}
    return lambda u, x: u(x) - target(x, settings["physics"][0]), partial(settings["physics"].__setitem__, 0)


def a_nested_attribute(model):
    settings = SimpleNamespace(physics=SimpleNamespace(factor=1.0))
    return lambda u, x: u(x) - target(x, settings.physics.factor), partial(setattr, settings.physics, "factor")


def a_slot(model):
    settings = Slots()
    return lambda u, x: u(x) - target(x, settings.factor), partial(setattr, settings, "factor")


def a_called_object(model):
    equation = Equation()
    return equation, lambda value: setattr(equation, "half", value / 2)


def a_bound_method(model):
    equation = Equation()
    return equation.__call__, lambda value: setattr(equation, "half", value / 2)


def an_argument(model):
    settings = [1.0]
    return partial(lambda settings, u, x: u(x) - target(x, settings[0]), settings), partial(settings.__setitem__, 0)


def another_tensor(model):
    settings = SimpleNamespace(factor=torch.ones((), dtype=torch.float64))
    change = lambda value: setattr(settings, "factor", torch.full((), value, dtype=torch.float64))  # noqa: E731
    return lambda u, x: u(x) - target(x, settings.factor), change


def a_numpy_number(model):
    numpy = pytest.importorskip("numpy")
    settings = SimpleNamespace(factor=numpy.float32(1.0))
    return lambda u, x: u(x) - target(x, float(settings.factor)), lambda v: setattr(
        settings, "factor", numpy.float32(v)
    )


def an_attribute_of_the_model(model):
    return lambda u, x: u(x) - torch.sin(3 * x.sum()), partial(setattr, model, "factor")


KINDS = [
    *(a_global, an_attribute_of_a_class, a_closure, an_entry, a_nested_attribute, a_slot, a_called_object),
    *(a_bound_method, an_argument, another_tensor, a_numpy_number, an_attribute_of_the_model),
]


def built(kind):
    model = Scaled()
    function, change = kind(model)
    return Objective(model, fit=Term(function, X)), GaussNewton(SGD(model.parameters(), lr=1e-3)), change


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_number_that_changes_is_noticed_at_the_next_jump(kind):
    objective, optimizer, change = built(kind)
    for step in range(20):
        if step in (5, 6, 12):
            change(1.0 + step / 10)
        true = objective.draw().loss().item()
        assert float(optimizer.step(objective)) == pytest.approx(true, rel=1e-9)
    assert optimizer.stats.counts["accepted"] > 10


def test_a_number_that_changes_at_every_step_costs_no_trace_and_that_is_said(monkeypatch, caplog):
    traced, prepare = [], Residuals.prepare

    def noticing(self, *args, **options):
        traced.append(options.get("traces", True))
        return prepare(self, *args, **options)

    monkeypatch.setattr(Residuals, "prepare", noticing)
    objective, optimizer, change = built(a_closure)
    for step in range(15):
        change(1.0 + step / 10)
        optimizer.step(objective)
    assert traced[0] and not any(traced[1:])
    assert caplog.text.count("changes from jump to jump") == 1
    for _ in range(20):  # it stays: a trace pays again
        optimizer.step(objective)
    assert traced[-1] and optimizer._driver.traces[0].terms["fit"].factors


def test_writes_to_a_tensor_are_seen_without_another_trace(monkeypatch):
    traced, prepare = [], Residuals.prepare
    monkeypatch.setattr(Residuals, "prepare", lambda self, *args, **more: traced.append(prepare(self, *args, **more)))
    model, factor = Scaled(), torch.ones((), dtype=torch.float64)
    objective = Objective(model, fit=Term(lambda u, x: u(x) - target(x, factor), X))
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    for _ in range(10):
        factor.add_(0.1)
        true = objective.draw().loss().item()
        assert float(optimizer.step(objective)) == pytest.approx(true, rel=1e-9)
    assert len(traced) == 1


def test_a_function_that_names_classes_of_torch_is_looked_at():
    """``torch.Tensor`` has ``tolist`` and ``size``, as arrays have, but is none."""
    kind = torch.Tensor

    def residual(u, x):
        assert isinstance(x, kind)
        return u(x) - torch.sin(3 * x.sum())

    model = Scaled()
    optimizer = GaussNewton(SGD(model.parameters(), lr=0.01))
    objective = Objective(model, fit=Term(residual, X))
    assert [optimizer.step(objective) for _ in range(3)][-1] < 1
    assert optimizer.stats.counts["attempted"] == 3
