"""Weights to evaluate with: the mixture of present weights and averages that a batch likes best."""

from collections.abc import Sequence
from math import exp, isfinite

import torch

from .discrepancy import Outputs
from .subspace import Reduce

SPEED = 0.5
"""How far one batch moves the shares: at most by this in the exponent."""
FLOOR = 1e-3
"""No share falls below this, so that it can come back."""
SMOOTHING = 0.9
"""Of the spread of slopes from batch to batch."""


class Mixture:
    """Shares that add up to 1, learnt by exponentiated gradients: each batch lets those grow that lower its loss.

    Batches come before they are trained on, so that they judge what has not seen them in this epoch.
    """

    def __init__(self, points: int) -> None:
        self.shares = [1 / points] * points
        self.spread = 0.0

    def learn(self, outputs: Sequence[Outputs], reduce: Reduce) -> None:
        """Take in a batch, by its outputs at each point; those of a mixture are taken to be the mixture of them."""
        rows = torch.stack([output.values for output in outputs]).double()
        slopes = outputs[0].misfit.slopes(rows.new_tensor(self.shares) @ rows)
        products = reduce(rows @ slopes).tolist()
        if not all(map(isfinite, products)):
            return
        lowest = min(products)
        self.spread = max(max(products) - lowest, SMOOTHING * self.spread)
        if not self.spread:
            return
        grown = [
            max(share * exp(-SPEED * (slope - lowest) / self.spread), FLOOR)
            for share, slope in zip(self.shares, products, strict=True)
        ]
        self.shares = [share / sum(grown) for share in grown]

    def numbers(self) -> list[float]:
        """For a checkpoint."""
        return [self.spread, *self.shares]

    def set_numbers(self, numbers: Sequence[float]) -> None:
        """The inverse."""
        self.spread, *self.shares = numbers
