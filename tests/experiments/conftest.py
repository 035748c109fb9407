"""Fixtures of the experiments' tests."""

import itertools
import os
import time
from pathlib import Path

import pytest
import torch

from experiments.equations import surrogates
from experiments.equations.case import Case, Problem, network, zero
from experiments.equations.problems import PROBLEMS
from experiments.solvers import quasi_newton
from torch_anderson import Term

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def importable_elsewhere(monkeypatch):
    """Processes that tests start in other folders find the experiments, which are not installed."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def pretended_time(monkeypatch):
    """Every look at the clock takes 1/1024 s, without rounding: runs have the same steps on every machine."""
    looks = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: next(looks) / 1024)


def tiny_equation():
    """u' = cos on [-1, 1], u(0) = 0."""
    points = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
    terms = {
        "inside": Term(
            lambda u, x: torch.func.grad(u)(x).sum() - torch.cos(x).sum(),
            lambda count: 2 * torch.rand(count, 1, dtype=torch.float64) - 1,
            count=20,
        ),
        "start": Term(zero, torch.zeros(1, 1, dtype=torch.float64), weight=2.0),
    }
    return Case(network(1, 5, 1), terms, points, torch.sin(points[:, 0]))


def tiny_table():
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y = torch.cat([torch.sin(2 * x), x**2], 1)
    return surrogates.regression((x, y, x[1::3] + 0.01, y[1::3]), 5, 1)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(quasi_newton, "WARM_UP", 20)
    equation = Problem(name="tiny", title="tiny", group="burgers", build=tiny_equation)
    table = Problem(name="table", title="table", group="surrogates", build=tiny_table, drawn=False)
    monkeypatch.setitem(PROBLEMS, "tiny", equation)
    monkeypatch.setitem(PROBLEMS, "table", table)
