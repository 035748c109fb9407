"""The numbers that are adapted from jump to jump: length, damping, samples, and the steps between jumps.

Gains are falls of log(loss), costs are counted in gradients on all samples of a jump, never in seconds: reruns make the
same decisions, and so do all ranks. A rate is a gain for a unit of cost.

    damping   min(10^-3 blocks loss, 10^-2 trace(J J')) boost, with the loss of the fitted samples; ``State.damping``
    blocks    rows, in multiples of those of the first jump: more of them while the loss falls less on samples that
              are not fitted; ``State.adapt_rows``, ``plan_samples``
    wait      base steps until the next jump: none while the rate of jumps is at least a fifth of that of base steps,
              otherwise cost (1 - share) / share; ``State.record_jump_gain``
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, sqrt

from .jump import SHORTEST, Linearization
from .residuals import Residuals

# -------------------------------------------------------------------------------------------- length and damping

DAMPING = 1e-3
"""Damping for each block of rows, relative to the loss of the fitted samples ..."""
ALL_FITTED_DAMPING = 0.05
"""... and its least value if there are no other samples, which would show that a jump fits its samples alone."""
MOST_DAMPING = 1e-2
"""Its largest value before ``boost``, relative to the sum of squared lengths of rows. Outputs that are to become large
begin with a loss far above it, which would damp all directions."""
BOOST, MOST_BOOST = 3.0, 1e6
"""Factor by which additional damping grows after a refused jump, and falls after an accepted one; and its largest
value. At a minimum all jumps are refused, but the samples or the function may change later."""

# ---------------------------------------------------------------------------------------------------------- rows

FALLS_MEMORY = 0.95
"""Part of the falls of the loss up to one jump that counts at the next: about 20 jumps are remembered."""
FEW_ROWS_GAP, MANY_ROWS_GAP = 0.6, 0.75
"""Fall on unseen samples over that on fitted ones: below, there are too few rows; above, more than needed."""
GROWTH = 1.04
"""Factor by which the number of rows changes from one jump to the next."""
ADAPTS_FROM = 10
"""The first jump after which the number of rows changes."""

# ----------------------------------------------------------------------------------------------- jumps or base steps

ENOUGH = 0.2
"""Part of the rate of base steps at which jumps go on: the single base step of a comparison gains more than many do."""
COMPARISONS = 4
"""The base makes a step for comparison before jumps whose number is a power of this."""
MOST_POSTPONED = 500
"""Most base steps between two jumps that cannot be tried."""
RATE_MEMORY = 0.85
"""Part of a rate that is kept when one more jump or base step has been measured."""
SHARE, MOST_SHARE, LEAST_SHARE = 0.3, 0.9, 0.02
"""Share of all cost that jumps take when base steps begin to gain more than they do; its limits."""
SHARE_GROWTH, SHARE_DECAY = 1.25, 1.5
"""Factors by which the share grows after a jump that pays, and shrinks after one that does not."""

# ---------------------------------------------------------------------------------------------------------- costs

ROW_COST = 2.0
"""Cost of a row, in gradients of one sample."""
FORWARD_COST = 1 / 3
"""Cost of a forward pass without a graph, in gradients."""
WEIGHT_FLOPS, SAMPLE_WEIGHTS = 6, 66_000
"""Operations for each weight in a gradient of one sample, and its further costs as a number of weights."""

# ------------------------------------------------------------------------------------------------ numbers of samples

FIRST_ROWS = 500
"""Rows that the first jump fits, if there are as many; if samples can be drawn, at least as many as weights up to this,
whatever number a gradient uses: with too few, jumps fit the noise of their samples."""
MOST_ROWS = 2.0
"""Most rows, in multiples of the number of weights ..."""
MOST_BYTES = 400e6
"""... and most memory for them."""
FITTED_SHARE = 1 / 3
"""Share of drawn samples that are fitted; of fixed ones all may be, as there are no others."""
FEW_ROWS, FEW_ENTRIES = 3.0, 1e7
"""Fixed samples are all fitted from the first jump on if they have at most so many rows for each weight, and their
Jacobian so many entries: what early jumps on a part of few samples break, later ones do not mend, as no other samples
come."""
LEAST_OF_TERM = 0.05
"""Least part of the rows that a term has, if it has as many samples: a term is a mean, whatever their number."""
LEAST_UNSEEN = 2
"""Fewest blocks of samples that are drawn besides those that are fitted."""


@dataclass
class State:
    """All numbers of a checkpoint, besides vectors and counters; in this order."""

    steps: int = 0
    """Steps that changed parameters: the base's, and accepted jumps."""
    jumps: int = 0
    """Jumps that were tried, since the start or the last reset."""
    since: int = 0
    """Base steps since the last jump."""
    wait: int = 0
    """Base steps to make after the last jump, before the next one."""
    disturbed: bool = False
    """Whether other code has written to the parameters since the last jump, before or between base steps."""
    end_loss: float = 0.0
    """Loss at the end of the last jump, before other code could write to the parameters."""
    length: float = 0.125
    """Length of the last jump."""
    longer: bool = True
    """Whether a longer jump was expected to be better the last time."""
    boost: float = 1.0
    """Factor of additional damping."""
    blocks: float = 1.0
    """Rows, in multiples of the first number."""
    fitted_fall: float = 0.0
    """Falls of log(loss) on fitted samples, over about 20 jumps."""
    unseen_fall: float = 0.0
    """Those on samples that were not fitted."""
    jump_rate: float = 0.0
    """Gain of jumps for a unit of cost."""
    base_rate: float = 0.0
    """Gain of a base step, whose cost is 1."""
    share: float = SHARE
    """Share of all cost that jumps may take while base steps gain more."""

    def gauges(self) -> dict[str, float]:
        """The settings that are adapted, by name."""
        return {"length": self.length, "boost": self.boost, "blocks": self.blocks, "wait": self.wait}

    @property
    def whole_blocks(self) -> int:
        """Rows, in whole multiples of the first number."""
        return max(1, round(self.blocks))

    def damping(self, loss: float, trace: float, all_fitted: bool) -> float:
        """The damping for the loss of the fitted samples; grows with the number of rows."""
        part = max(DAMPING * self.whole_blocks, ALL_FITTED_DAMPING if all_fitted else 0.0)
        return min(part * loss, MOST_DAMPING * trace) * self.boost

    def accept(self, length: float, longer: bool) -> None:
        """Adapt length and damping to a jump that was made; ``longer`` says whether a longer one was expected."""
        self.boost = max(1.0, self.boost / BOOST)
        self.length = max(length, SHORTEST)
        self.longer = longer

    def refuse(self) -> None:
        """Adapt length and damping to a jump that found no lower loss."""
        self.boost = min(self.boost * BOOST, MOST_BOOST)
        self.length = max(self.length / 2, SHORTEST)
        self.longer = False

    def adapt_rows(self, fitted: float, unseen: float, most: float) -> None:
        """Fit more samples while the loss falls far less on unseen ones, fewer while it falls nearly as much."""
        self.fitted_fall = FALLS_MEMORY * self.fitted_fall + fitted
        self.unseen_fall = FALLS_MEMORY * self.unseen_fall + unseen
        if self.jumps < ADAPTS_FROM:
            return
        gap = self.unseen_fall / max(self.fitted_fall, 1e-9)
        if gap < FEW_ROWS_GAP:
            self.blocks = min(self.blocks * GROWTH, most)
        elif gap > MANY_ROWS_GAP:
            self.blocks = max(self.blocks / GROWTH, 1.0)

    @property
    def compares(self) -> bool:
        """Whether the base makes a step before the next jump, to compare with."""
        number = self.jumps + 1
        return number > 1 and COMPARISONS ** round(log(number, COMPARISONS)) == number

    def record_base_gain(self, gain: float) -> None:
        """Enter what the base steps since the last jump gained.

        A single step counts little, as it gains more than those after it; many steps together replace what was measured
        before.
        """
        steps = max(self.since, 1)
        self.base_rate += (1 - RATE_MEMORY**steps) * (gain / steps - self.base_rate)

    def record_jump_gain(self, gain: float, cost: float) -> None:
        """Enter what a jump gained, and choose how many base steps to make before the next: none while jumps pay."""
        self.jump_rate += (1 - RATE_MEMORY) * (gain / cost - self.jump_rate)
        self.since = 0
        if self.jump_rate >= ENOUGH * self.base_rate or self.base_rate <= 0:
            self.share, self.wait = max(SHARE, min(self.share * SHARE_GROWTH, MOST_SHARE)), 0
        else:
            self.share = max(self.share / SHARE_DECAY, LEAST_SHARE)
            self.wait = ceil(cost * (1 - self.share) / self.share)

    def postpone(self) -> None:
        """Wait after a jump that could not be tried for as many base steps as were made since the last one that was."""
        self.wait = self.since + min(max(self.since, 1), MOST_POSTPONED)


def fall(before: float, after: float) -> float:
    """The fall of log(loss); relative to the larger of both where a loss is not positive.

    >>> fall(4.0, 4.0), fall(-1.0, -2.0), fall(0.0, 0.0)
    (0.0, 0.5, 0.0)
    """
    if before > 0 and after > 0:
        return log(before / after)
    return (before - after) / (max(abs(before), abs(after)) or 1.0)


def jump_cost(model: Linearization, trials: int) -> float:
    """Cost of a jump with so many trials, in gradients on all its samples: algebra, rows, and forward passes."""
    (rows, weights), layout, batch = model.rows.shape, model.rows.layout, model.batch
    probes = 1 if model.all_fitted else 3  # evaluations of the fitted samples in ``fit``
    forwards = (probes * (batch.fitted_count / batch.count) + 1 + trials) * FORWARD_COST
    algebra = min(rows, weights) * layout.product_cost / WEIGHT_FLOPS / (layout.gradient_cost + SAMPLE_WEIGHTS)
    return (algebra + ROW_COST) * (rows / batch.count) + forwards


@dataclass
class Plan:
    """Numbers of samples of a jump, by the names of terms."""

    fitted: dict[str, int]
    total: dict[str, int]
    most_blocks: float
    """The largest useful number of blocks."""


def plan_samples(residuals: Residuals, blocks: int) -> Plan:
    """Choose how many samples a jump fits, and how many it is judged by.

    The first jump fits one block: samples with about ``FIRST_ROWS`` rows in all, which terms share by their numbers of
    samples in a gradient. A jump fits ``blocks`` times as many. Of samples that are drawn, half as many others are
    drawn besides, or at least ``LEAST_UNSEEN`` blocks; fixed samples are all evaluated.
    """
    terms, n, layout = residuals.objective.terms, residuals.n, residuals.layout
    sizes = {name: max(term.size, 1) for name, term in residuals.terms.items()}  # not known before the first trace
    there = {name: term.count or len(term.samples[0]) for name, term in terms.items()}  # type: ignore[index, arg-type]
    share = {name: 1.0 if term.fixed else FITTED_SHARE for name, term in terms.items()}
    all_fixed = all(term.fixed for term in terms.values())

    numbers = MOST_BYTES / 8
    most_rows = min(max(MOST_ROWS * n, FIRST_ROWS), numbers / layout.stored)
    if layout.factored:  # the matrix J J' is larger than the factors
        most_rows = min(most_rows, sqrt(numbers))
    rows = sum(share[name] * there[name] * sizes[name] for name in terms)
    first = min(rows if all_fixed else max(rows, n), FIRST_ROWS, most_rows) / rows
    if all_fixed:
        most_blocks: float = ceil(1 / first)
        if rows <= min(FEW_ROWS * n, FEW_ENTRIES / n):
            blocks = ceil(most_blocks)
    else:
        most_blocks = max(1.0, most_rows / rows / first)
    blocks = min(blocks, max(1, round(most_blocks)))

    fitted, total = {}, {}
    for name, term in terms.items():
        least = LEAST_OF_TERM * first * rows / sizes[name]
        least = min(least, there[name]) if term.fixed else least
        block = max(1, round(first * share[name] * there[name]), round(least))
        if term.fixed:
            fitted[name], total[name] = min(blocks * block, there[name]), there[name]
        else:
            fitted[name] = blocks * block
            total[name] = max(there[name], (blocks + max(LEAST_UNSEEN, blocks // 2)) * block)
    return Plan(fitted, total, most_blocks)
