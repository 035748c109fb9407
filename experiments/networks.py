"""Multilayer perceptrons, for every experiment but the residual networks."""

from itertools import pairwise

import torch
from torch import nn


def perceptron(
    *sizes: int,
    activation: type[nn.Module] = nn.ReLU,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    xavier: bool = False,
) -> nn.Sequential:
    """A multilayer perceptron; two sizes make a linear model.

    ``xavier``: normal Xavier weights and zero biases instead of torch's defaults.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        linear = nn.Linear(before, after, bias, dtype=dtype)
        if xavier:
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])
