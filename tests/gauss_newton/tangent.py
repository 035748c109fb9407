"""What the tests of tangent jumps train: a decay equation, solved by a small network."""

import torch
from torch import nn
from torch.func import grad
from torch.optim import Adam

from torch_anderson import GaussNewton, Objective, Term


def network(dtype=torch.float64, *layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), *layers, nn.Linear(8, 1)).to(dtype)


def decay(u, t):
    return grad(u)(t).sum() + u(t)


def at_zero(u, t):
    return u(t) - 1


class Points:
    """A sampler that can be pickled, and remembers what it drew."""

    def __init__(self, dtype=torch.float64):
        self.dtype, self.drawn = dtype, []

    def __call__(self, count):
        self.drawn.append(torch.rand(count, 1, dtype=self.dtype))
        return self.drawn[-1]


def equation(model, sampler=None, **changed):
    dtype = next(model.parameters()).dtype
    terms = {
        "inside": Term(decay, sampler or Points(dtype), count=30),
        "start": Term(at_zero, torch.zeros(1, 1, dtype=dtype), weight=2.0),
    }
    return Objective(model, **terms | changed)


def driven(dtype=torch.float64, base=lambda p: Adam(p, lr=1e-3), **options):
    model = network(dtype)
    torch.manual_seed(1)
    return model, GaussNewton(base(model.parameters()), **options), equation(model)


def train(optimizer, objective, steps):
    return [float(optimizer.step(objective)) for _ in range(steps)]
