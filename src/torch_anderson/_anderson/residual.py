"""What a residual is: the displacement of base steps (the paper's), and the learning rates that it is proportional to.

A residual kind says what to copy before a base step, what pair (point, residual) follows from the weights after it,
and whether its pairs can be compared with those stored before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._tensors.blocks import Space

NOT_PROPORTIONAL = (torch.optim.Rprop, torch.optim.LBFGS, torch.optim.ASGD, torch.optim.Adafactor)
"""Optimizers whose step is not proportional to the learning rate."""

SAME_RATIO = 1e-9


class StepResidual:
    """r is where base steps have led, minus where they began."""

    def __init__(self, base: Optimizer, space: Space):
        self._base = base
        self._space = space
        self._proportional = not isinstance(base, NOT_PROPORTIONAL)
        self.start = space.vector()
        """The weights before the pair's first step."""
        self.point = space.vector()
        """The weights after its last step."""
        self.steps = 0
        """Base steps in the pair."""
        self.rate = 0.0
        """Largest learning rate of each step, added up: r is proportional to it."""
        self.group_rates: list[float] = []
        """Learning rates of the groups at the last step of a pair."""
        self.comparable = True
        """Whether they have kept their ratios since the last stored pair."""

    def begin(self) -> None:
        """Keep the weights before the first base step of a pair."""
        self.steps = 0
        self._space.note_gradients()
        self._space.read(self.start)

    def read(self) -> bool:
        """Read the weights after a base step. Returns whether they have changed since ``begin``.

        Off the CPU the answer would stop the device, on sharded parameters it would take all ranks: there it is taken
        to be yes, and a step of exactly zero shows at the next acceleration.
        """
        self._space.refresh()  # the base may have given the parameters other memory
        self._space.read(self.point)
        return not (self._space.settled and all(map(torch.equal, self.start, self.point)))

    def count_step(self) -> None:
        """Count a base step of the pair, with its learning rates."""
        given = [group.get("lr") for group in self._base.param_groups if group.get("anderson", True)]
        rates = [1.0 if rate is None else float(rate) for rate in given]  # None: the base chooses it by itself
        rate = max(rates, default=1.0) if self._proportional else 1.0
        self.rate = rate + self.rate if self.steps and self._proportional else rate
        self.steps += 1
        before, self.group_rates = self.group_rates, rates
        self.comparable = self.comparable and (before == rates or self._comparable(before, rates))

    def _comparable(self, before: Sequence[float], now: Sequence[float]) -> bool:
        """Whether residuals at these rates of the groups differ by a common factor; those of rate 0 say nothing."""
        if not before:
            return True
        most_before, most_now = max(before), max(now, default=0.0)
        if not self._proportional or len(before) != len(now) or not most_before or not most_now:
            return False
        pairs = ((a / most_before, b / most_now) for a, b in zip(before, now, strict=True))
        return all(abs(a - b) <= SAME_RATIO * max(a, b) for a, b in pairs)

    def norm_sq(self) -> Tensor:
        """|r|^2 on this rank; waits for the device."""
        parts = [torch.dist(a, b).double().square() for a, b in zip(self.point, self.start, strict=True)]
        weights = [block.copy_weight for block in self._space.blocks]
        return torch.stack([w * part.cpu() for w, part in zip(weights, parts, strict=True)]).sum()

    def largest_entry(self) -> Tensor:
        """|r| in the maximum norm, on the device."""
        parts = [torch.dist(a, b, p=torch.inf) for a, b in zip(self.point, self.start, strict=True) if len(a)]
        return largest(parts) if parts else self.start[0].new_zeros(())


def largest(numbers: Sequence[Tensor]) -> Tensor:
    """The largest of several tensors without dimensions, on the device of the first."""
    if len(numbers) == 1:
        return numbers[0]
    return torch.stack([number.to(numbers[0]) for number in numbers]).amax()
