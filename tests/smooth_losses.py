"""Smooth losses, and a loop that descends them with gradients or closures."""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def quadratic(n=8, condition=100.0, seed=0):
    """A parameter and the loss (w - c)'A(w - c) / 2, with A and c."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    matrix = basis @ torch.diag(torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)) @ basis.T
    centre = torch.randn(n, generator=generator, dtype=torch.float64)
    w = nn.Parameter(torch.zeros(n, dtype=torch.float64))
    return w, lambda: 0.5 * (w - centre) @ matrix @ (w - centre), matrix, centre


def train(optimizer, loss_of, steps, closure=False):
    """The losses at the weights of each gradient."""
    losses = []

    def evaluate():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    return losses


def softmax_regression(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    classes = (inputs @ torch.randn(8, 3, generator=generator, dtype=torch.float64)).argmax(1)
    torch.manual_seed(seed)
    model = nn.Linear(8, 3).double()

    def loss():
        return cross_entropy(model(inputs), classes) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    return model, loss
