"""The numbers that the driver adapts: lengths, damping, rows, and who makes the next step.

Costs are counted in gradients, never in seconds: reruns make the same decisions, and so do all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

from .jump import SHORTEST, Found
from .rows import Layout

DAMPING = 1e-3
"""Damping, relative to the loss of the fitted samples ..."""
ALL_FITTED = 0.05
"""... and its least value if there are no others, by which a search could notice jumps that fit these alone."""
CEILING = 1e-2
"""Its largest value without ``boost``, relative to the sum of squared lengths of rows. Outputs that are to become large
begin with a loss far above it, which would damp all directions."""
EASE, STIFFEN, STIFFEST = 3.0, 3.0, 1e6
"""Factors by which additional damping falls after an accepted jump, and grows after a refused one; and its largest
value. At a minimum all jumps are refused, but the samples or the function may change later."""
MEMORY = 0.95
"""Smoothing of the falls of the loss on fitted and unseen samples."""
LOW, HIGH = 0.6, 0.75
"""Fall on unseen samples over that on fitted ones: below, there are too few rows; above, more than needed."""
GROWTH = 1.04
"""Factor by which the number of rows changes from one jump to the next."""
FEWEST = 10
"""Jumps before the number of rows changes."""

PATIENCE = 0.2
"""Part of the base's gain that is enough for jumps to go on: a single base step gains more than the next ones."""
RARER = 4
"""Factor between the numbers of jumps after which the base makes a step to compare with."""
LONGEST_WAIT = 500
"""Most base steps between two jumps that cannot be tried."""
ROWS_COST = 2.0
"""Cost of a row, in gradients of one sample."""
GRADIENT_FLOPS, OVERHEAD = 6, 66_000
"""Operations for each weight in a gradient of one sample, and its further costs as a number of weights."""
SMOOTHING = 0.85
"""Smoothing of rates from one jump to the next."""
BUDGET = 0.3
"""Share of all cost that jumps take at first; a limit while base steps gain more than they do."""
MORE, LESS = 1.25, 1.5
"""The share grows and shrinks by these factors ..."""
LEAST_SHARE = 0.02
"""... down to this one."""
FORWARD_COST = 1 / 3
"""Cost of a forward pass without a graph, in gradients."""


@dataclass
class GaussNewtonState:
    """All numbers of a checkpoint, besides vectors and counters; in this order."""

    share: float = BUDGET
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
    """Whether a longer jump was expected to be better the last time."""
    boost: float = 1.0
    """Additional damping."""
    blocks: float = 1.0
    """Rows, in multiples of the first number."""
    fall_fitted: float = 0.0
    """Falls of log(loss) on fitted samples, over about 20 jumps."""
    fall_unseen: float = 0.0
    """Those on samples that were not fitted."""
    cost: float = 1.0
    """Cost of the last jump, in gradients."""
    jump_rate: float = 0.0
    """Gain of jumps for a unit of cost. Gains are falls of log(loss)."""
    base_rate: float = 0.0
    """Gain of a base step."""
    disturbed: bool = False
    """Whether other code has written to the parameters since the last jump, before or between base steps."""

    def gauges(self) -> dict[str, float]:
        """The settings that the driver adapts, by name."""
        return {"length": self.length, "boost": self.boost, "blocks": self.blocks, "wait": self.wait}

    @property
    def compares(self) -> bool:
        """Whether the base makes a step before the next jump, to compare with."""
        return self.jumps + 1 >= self.next_trial

    @property
    def whole_blocks(self) -> int:
        """Rows, in multiples of the first number."""
        return max(1, round(self.blocks))

    def damping(self, loss: float, trace: float, all_fitted: bool) -> float:
        """The damping for the loss of the fitted samples; grows with the number of rows."""
        part = max(DAMPING * self.whole_blocks, ALL_FITTED if all_fitted else 0.0)
        return min(part * loss, CEILING * trace) * self.boost

    def accept(self, found: Found) -> None:
        """Adapt length and damping to a jump that was made."""
        self.boost = max(1.0, self.boost / EASE)
        self.length = max(found.best.length, SHORTEST)
        self.longer = found.wanted > found.best.length

    def refuse(self) -> None:
        """Adapt length and damping to a jump that found no lower loss."""
        self.boost = min(self.boost * STIFFEN, STIFFEST)
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
        """Wait after a jump that could not be tried for as many base steps as were made since the last one that was."""
        self.wait = self.since + min(max(self.since, 1), LONGEST_WAIT)

    def book_base(self, gain: float) -> None:
        """Enter what the base steps since the last jump gained.

        A single step counts little, as it gains more than those after it; many steps together replace what was measured
        before.
        """
        steps = max(self.since, 1)
        self.base_rate += (1 - SMOOTHING**steps) * (gain / steps - self.base_rate)
        self.end_comparison()

    def end_comparison(self) -> None:
        """Plan the next comparison if the base steps were made for one."""
        if self.compares:
            self.next_trial = RARER * (self.jumps + 1)

    def book_jump(self, gain: float) -> None:
        """Enter what the last jump gained."""
        self.jump_rate += (1 - SMOOTHING) * (gain / self.cost - self.jump_rate)

    def decide(self) -> None:
        """Choose how many base steps to make before the next jump: none as long as jumps pay."""
        self.since = 0
        if self.pays:
            self.share, self.wait = max(BUDGET, min(self.share * MORE, 0.9)), 0
        else:
            self.share = max(self.share / LESS, LEAST_SHARE)
            self.wait = ceil(self.cost * (1 - self.share) / self.share)

    @property
    def pays(self) -> bool:
        """Whether jumps go on."""
        return self.jump_rate >= PATIENCE * self.base_rate or self.base_rate <= 0


def jump_cost(order: int, layout: Layout, part: float, forwards: float) -> float:
    """Cost of a jump, in gradients on all its samples: algebra, rows, and forward passes.

    ``order`` is that of the system to solve, ``part`` the number of rows for each sample.
    """
    algebra = order * layout.product / GRADIENT_FLOPS / (layout.gradient + OVERHEAD)
    return (algebra + ROWS_COST) * part + forwards


def fall(before: float, after: float) -> float:
    """The fall of log(loss); relative to the larger of both where a loss is not positive.

    >>> fall(4.0, 4.0), fall(-1.0, -2.0), fall(0.0, 0.0)
    (0.0, 0.5, 0.0)
    """
    if before > 0 and after > 0:
        return log(before / after)
    return (before - after) / (max(abs(before), abs(after)) or 1.0)
