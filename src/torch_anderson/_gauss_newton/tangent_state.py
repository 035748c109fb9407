"""The numbers that the tangent driver adapts: lengths, damping, rows, and who makes the next step.

Costs are counted in gradients, never in seconds: reruns decide alike, and so do all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .search import SHORTEST, Found

DAMPING = 1e-3
"""Damping, relative to the loss of the fitted samples."""
EASE, STIFFEN = 3.0, 3.0
"""Factors by which additional damping falls after an accepted jump, and grows after a refused one."""
MEMORY = 0.95
"""Smoothing of the falls of the loss on fitted and unseen samples."""
LOW, HIGH = 0.6, 0.75
"""Fall on unseen samples over that on fitted ones: below, there are too few rows; above, more than needed."""
GROWTH = 1.04
"""Factor by which the number of rows changes from one jump to the next."""
FEWEST = 10
"""Jumps before the number of rows changes."""

SMOOTHING = 0.85
"""Smoothing of gains for a unit of cost."""
MORE, LESS, LEAST_SHARE = 1.25, 1.5, 0.02
"""Factors by which the share of jumps in the cost grows and shrinks while the base competes, and its least value."""
PATIENCE = 0.2
"""Part of the base's gain that is enough for jumps to go on: a single base step gains more than the next ones."""
RARER = 4
"""Factor between the numbers of jumps after which the base makes a step to compare with."""
LONGEST_WAIT = 500
"""Most base steps between two jumps that cannot be tried."""
ROWS_COST, ALGEBRA = 2.0, 1 / 250
"""Cost of rows, in gradients on as many samples, and of a number in their Gram matrix, in those of one sample."""
FIRST_WAIT = 10
"""Base steps before the first jump where every step has other samples."""


@dataclass
class TangentState:
    """All numbers of a checkpoint, besides vectors and counters; in this order."""

    share: float
    """Share of all cost that jumps may take while base steps gain more."""
    k: int = 0
    """Steps that changed parameters, the base's or jumps."""
    jumps: int = 0
    """Jumps that were tried."""
    since: int = 0
    """Base steps since the last jump."""
    wait: int = 0
    """Base steps until the next jump."""
    next_trial: int = 4
    """The jump before which the base makes a step to compare with."""
    length: float = 0.125
    """Length of the last jump."""
    longer: bool = True
    """Whether the last jump wanted to be longer."""
    boost: float = 1.0
    """Additional damping."""
    blocks: float = 1.0
    """Rows, in multiples of the first number."""
    fall_fitted: float = 0.0
    """Falls of log(loss) on fitted samples, over about 20 jumps."""
    fall_unseen: float = 0.0
    """Those on samples that were not fitted."""
    pending: bool = False
    """Whether other samples have to tell what the last jump was worth."""
    cost: float = 1.0
    """Cost of the last jump, in gradients."""
    jump_rate: float = 0.0
    """Gain of jumps for a unit of cost. Gains are falls of log(loss)."""
    base_rate: float = 0.0
    """Gain of a base step."""

    @property
    def compares(self) -> bool:
        """Whether the base makes a step before the next jump, to compare with."""
        return self.jumps + 1 >= self.next_trial

    @property
    def whole_blocks(self) -> int:
        """Rows, in multiples of the first number."""
        return max(1, round(self.blocks))

    def damping(self, loss: float) -> float:
        """The damping for the loss of the fitted samples; grows with the square of the number of rows."""
        return DAMPING * self.whole_blocks**2 * loss * self.boost

    def accept(self, found: Found) -> None:
        """Adapt length and damping to a jump that was made."""
        self.boost = max(1.0, self.boost / EASE)
        self.length = max(found.best.length, SHORTEST)
        self.longer = found.wanted > found.best.length

    def refuse(self) -> None:
        """Adapt length and damping to a jump that found no lower loss."""
        self.boost *= STIFFEN
        self.length = max(self.length / 2, SHORTEST)
        self.longer = False

    def adapt_rows(self, fitted: float, unseen: float, most: float) -> None:
        """Fit more samples while the loss falls far less on unseen ones, fewer while it falls nearly as much."""
        self.fall_fitted = MEMORY * self.fall_fitted + fitted
        self.fall_unseen = MEMORY * self.fall_unseen + unseen
        if self.jumps < FEWEST:
            return
        gap = self.fall_unseen / max(self.fall_fitted, 1e-9)
        if gap < LOW:
            self.blocks = min(self.blocks * GROWTH, most)
        elif gap > HIGH:
            self.blocks = max(self.blocks / GROWTH, 1.0)

    def postpone(self) -> None:
        """Wait longer after a jump that could not be tried."""
        self.since, self.wait = 0, min(max(2 * self.wait, 1), LONGEST_WAIT)

    def book_base(self, gain: float) -> None:
        """Enter what the base steps since the last jump gained."""
        self.base_rate += (1 - SMOOTHING) * (gain / max(self.since, 1) - self.base_rate)
        if self.compares:
            self.next_trial = RARER * (self.jumps + 1)

    def book_jump(self, gain: float) -> None:
        """Enter what the last jump gained."""
        self.jump_rate += (1 - SMOOTHING) * (gain / self.cost - self.jump_rate)

    def decide(self, budget: float, noisy: bool) -> None:
        """Choose how many base steps to make before the next jump: none as long as jumps pay."""
        self.since = 0
        if self.pays(noisy):
            self.share, self.wait = max(budget, min(self.share * MORE, 0.9)), 0
        else:
            self.share = max(self.share / LESS, LEAST_SHARE)
            self.wait = ceil(self.cost * (1 - self.share) / self.share)

    def pays(self, noisy: bool) -> bool:
        """Whether jumps go on. Where every step has other samples, they must have gained on those of the next."""
        enough = self.jump_rate >= PATIENCE * self.base_rate
        return (enough and self.jump_rate > 0) if noisy else (enough or self.base_rate <= 0)


def jump_cost(rows: int, weights: int, fitted: float, samples: int, forwards: float) -> float:
    """Cost of a jump, in gradients on all its samples: algebra, rows of a part of them, and forward passes."""
    return ALGEBRA * rows * min(rows, weights) / samples + fitted * ROWS_COST + forwards
