"""What the tests of the discrepancy driver train: the model of ``training``, driven by its outputs."""

import torch
from torch.optim import SGD
from training import BASES, batch, loss_of, make_model, weights

from torch_anderson import Anderson, Discrepancy

EAGER = {
    "history_size": 4,
    "store_period": 1,
    "period": 2,
    "jumps": 2,
    "budget": 0.9,
    "held_out": False,
    "use": "training",
}
"""Jumps early and often."""
ASIDE = {**EAGER, "use": "evaluation", "forward_cost": 0.02}
"""Training goes on undisturbed; weights to evaluate with are looked for every few steps."""
BOTH = {**EAGER, "use": "both", "forward_cost": 0.02}
"""Both at once."""


def driven(base="sgd", loss="mse", dtype=torch.float64, model=None, **options):
    """A model and its optimizer."""
    model = model or make_model(dtype=dtype)
    return model, Anderson(BASES[base](model.parameters()), discrepancy=Discrepancy(loss, **{**EAGER, **options}))


def predictions(model, i=0):
    """(predictions, targets) on a batch."""
    x, y = batch(i, next(model.parameters()).dtype)
    return model(x), y


def train(model, optimizer, steps, start=0, outputs=predictions, objective=loss_of):
    """Steps ``start`` to ``steps``; ``outputs(model, i)`` are given with step i, ``None`` for none."""
    for i in range(start, steps):
        optimizer.zero_grad()
        objective(model, i).backward()
        given = {"outputs": lambda i=i: outputs(model, i)} if outputs and isinstance(optimizer, Anderson) else {}
        optimizer.step(**given)


def trained_plainly(steps, base="sgd", dtype=torch.float64, model=None, objective=loss_of):
    """The model after as many steps of the base alone."""
    model = model or make_model(dtype=dtype)
    train(model, BASES[base](model.parameters()), steps, objective=objective)
    return model


def evaluated(model, optimizer):
    """The weights to evaluate with, where there are any."""
    if not optimizer.options.discrepancy.evaluates:
        return []
    with optimizer.accelerated_weights():
        return weights(model)


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
    """A linear model, its data, and SGD with a stable rate for the mean of squares."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    b = torch.randn(rows, generator=generator, dtype=torch.float64)
    weights = torch.nn.Parameter(torch.zeros(columns, dtype=torch.float64))
    return a, b, weights, SGD([weights], lr=0.5 * rows / float(torch.linalg.matrix_norm(a, 2) ** 2))
