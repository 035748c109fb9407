"""What the tests of ``GaussNewton`` train: the model of ``training``, driven by its outputs."""

import torch
from torch.optim import SGD
from training import BASES, batch, loss_of, make_model

from torch_anderson import GaussNewton
from torch_anderson._gauss_newton.state import FIXED

EAGER = {"budget": 0.9}
"""Jumps as often as possible: at step 16, and then every 10 steps while jumps pay."""
FIRST = 16
"""The step with the first jump: the one after three points are stored, every 5 steps."""


def driven(base="sgd", loss="mse", dtype=torch.float64, model=None, **options):
    """A model and its optimizer, which takes samples to be the same at all steps and makes its jumps at once."""
    model = model or make_model(dtype=dtype)
    optimizer = GaussNewton(BASES[base](model.parameters()), loss=loss, **{**EAGER, **options})
    optimizer._driver.state.samples = FIXED
    return model, optimizer


def predictions(model, i=0):
    """(predictions, targets) on a batch."""
    x, y = batch(i, next(model.parameters()).dtype)
    return model(x), y


def train(model, optimizer, steps, start=0, outputs=predictions, objective=loss_of):
    """Steps ``start`` to ``steps``; ``outputs(model, i)`` are given with step i, ``None`` for none."""
    for i in range(start, steps):
        optimizer.zero_grad()
        objective(model, i).backward()
        given = {"outputs": lambda i=i: outputs(model, i)} if outputs and isinstance(optimizer, GaussNewton) else {}
        optimizer.step(**given)


def trained_plainly(steps, base="sgd", dtype=torch.float64, model=None, objective=loss_of):
    """The model after as many steps of the base alone."""
    model = model or make_model(dtype=dtype)
    train(model, BASES[base](model.parameters()), steps, objective=objective)
    return model


def assert_counters_add_up(optimizer):
    flat = optimizer.stats.as_dict()
    rejected = sum(value for name, value in flat.items() if name.startswith("rejected_"))
    assert flat["attempted"] == flat["accepted"] + rejected


class Cone:
    """Outputs that are best at the weights after the base step: their loss rises in every direction."""

    def __init__(self, optimizer, outputs=predictions):
        self.outputs, self.reference = outputs, None
        optimizer.base.register_step_post_hook(self.forget)

    def forget(self, *_):
        self.reference = None

    def __call__(self, model, i):
        present = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        self.reference = present.clone() if self.reference is None else self.reference
        values, targets = self.outputs(model, i)
        return targets + 0 * values + 1 + (present - self.reference).norm() / self.reference.norm(), targets


def quadratic(rows=40, columns=12, seed=0):
    """A linear model of condition about 20, its data, and SGD with a stable rate for the mean of squares."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    a *= torch.logspace(0, -1, columns, dtype=torch.float64)
    b = torch.randn(rows, generator=generator, dtype=torch.float64)
    weights = torch.nn.Parameter(torch.zeros(columns, dtype=torch.float64))
    return a, b, weights, SGD([weights], lr=0.5 * rows / float(torch.linalg.matrix_norm(a, 2) ** 2))
