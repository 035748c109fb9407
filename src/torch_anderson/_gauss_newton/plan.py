"""How many samples a jump fits, and how many it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .residuals import Residuals
from .term import Term

MOST_ROWS = 2.0
"""Most rows, in multiples of the number of weights ..."""
MOST_BYTES = 400e6
"""... and most memory for them."""
ROWS = 500
"""Rows that the first jump fits, if there are as many; if samples can be drawn, at least as many as weights up to this,
whatever number a gradient uses: with too few, jumps fit the noise of their samples."""
DRAWN, FIXED = 1 / 3, 1.0
"""Shares of samples that are fitted: drawn ones, and fixed ones, which are all there are."""
FIT_ALL, FEW = 1e7, 3.0
"""Fixed samples are all fitted from the first jump on if their Jacobian has no more entries than this and no more rows
than so many times the weights: what early jumps on a part of few samples break, later ones do not mend, as no other
samples come."""
LEAST = 0.05
"""Least part of the rows that a term has, if it has as many samples: a term is a mean, whatever their number."""
UNSEEN = 2
"""Fewest blocks of samples that are drawn besides those that are fitted."""


@dataclass
class Plan:
    """Numbers of samples by the names of terms."""

    fitted: dict[str, int]
    total: dict[str, int]
    rows: int
    """Residuals of the fitted samples."""
    most: float
    """The largest useful number of blocks."""


def planned(residuals: Residuals, blocks: int, most_rows: float) -> Plan:
    """Choose numbers of samples for rows that are ``blocks`` times those of the first jump."""
    terms, sizes = residuals.objective.terms, {name: term.size for name, term in residuals.terms.items()}
    there = {name: _available(term) for name, term in terms.items()}
    share = {name: FIXED if term.fixed else DRAWN for name, term in terms.items()}
    rows = sum(share[name] * there[name] * max(sizes[name], 1) for name in terms)
    growing = not all(term.fixed for term in terms.values())
    fewest = max(rows, residuals.n) if growing else rows
    first = min(fewest, ROWS, most_rows) / rows
    most = max(1.0, most_rows / rows / first) if growing else ceil(1 / first)
    few = rows <= min(FEW * residuals.n, FIT_ALL / residuals.n)
    blocks = ceil(most) if few and not growing else min(blocks, max(1, round(most)))
    fitted, total = {}, {}
    for name, term in terms.items():
        least = LEAST * first * rows / max(sizes[name], 1)
        block = max(
            1, round(first * share[name] * there[name]), round(min(least, there[name]) if term.fixed else least)
        )
        fitted[name] = min(blocks * block, there[name]) if term.fixed else blocks * block
        total[name] = there[name] if term.fixed else max(there[name], (blocks + max(UNSEEN, blocks // 2)) * block)
    count = sum(sizes[name] * fitted[name] for name in terms)
    return Plan(fitted, total, count, most)


def _available(term: Term) -> int:
    """Samples of a gradient."""
    return term.count or len(term.samples[0])  # type: ignore[index, arg-type]
