"""What accelerations cost and gain, in counts, never in seconds: reruns decide alike, and so do all ranks."""

from dataclasses import astuple, dataclass
from math import ceil, isnan, log, nan

SMOOTHING = 0.85
"""Of rates from one acceleration to the next."""
MORE, LESS = 1.25, 1.5
"""The share grows and shrinks by these factors."""
MOST = 2.0
"""In budgets."""
LEAST_SHARE = 0.02


@dataclass
class Ledger:
    """How long to wait for the next acceleration. A gradient costs 1; gains are falls of log(loss).

    A jump is booked when the next one is due. What was lost in between is taken from its gain: it had fitted the noise
    of its batch, or the base undid it.
    """

    budget: float
    share: float
    """Of all cost, what accelerations may take at present."""
    wait: int
    """Base steps until the next acceleration."""
    jump_rate: float = 0.0
    """Gained by a unit of cost in accelerations."""
    base_rate: float = 0.0
    """Gained by a base step."""
    loss: float = nan
    """After the last acceleration, if there was one."""
    gain: float = 0.0
    cost: float = 0.0
    """Of the last acceleration."""

    @classmethod
    def opened(cls, budget: float, period: int) -> "Ledger":
        """Before the first acceleration."""
        return cls(budget, budget, period)

    def enter(self, cost: float, before: float, after: float, steps: int, period: int) -> None:
        """Book the last acceleration and the base steps since then, and take in one that led from a loss to another."""
        if not isnan(self.loss):
            since = fall(self.loss, before)
            self.jump_rate += (1 - SMOOTHING) * ((self.gain + min(since, 0.0)) / self.cost - self.jump_rate)
            self.base_rate += (1 - SMOOTHING) * (max(since, 0.0) / max(steps, 1) - self.base_rate)
        self.loss, self.gain, self.cost = after, fall(before, after), cost
        pays = self.gain > 0 and self.jump_rate >= self.base_rate
        self.share = min(self.share * MORE, MOST * self.budget, 0.9) if pays else max(self.share / LESS, LEAST_SHARE)
        self.wait = max(period, ceil(cost * (1 - self.share) / self.share))

    def lost(self, loss: float) -> float:
        """The part of the last jump's gain that is gone when this is the loss; not a number if there was no gain."""
        return max(-fall(self.loss, loss), 0.0) / self.gain if self.gain > 0 and not isnan(self.loss) else nan

    def postpone(self, period: int) -> None:
        """Wait longer after an acceleration that came to nothing, and forget the loss before it."""
        self.loss = nan
        self.wait = min(2 * self.wait, ceil(period / LEAST_SHARE))

    def numbers(self) -> list[float]:
        """For a checkpoint."""
        return [float(x) for x in astuple(self)]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> "Ledger":
        """The inverse."""
        budget, share, wait, *rest = numbers
        return cls(budget, share, int(wait), *rest)


def fall(before: float, after: float) -> float:
    """Of log(loss); relative to the larger of both where a loss is not positive.

    >>> fall(4.0, 4.0), fall(-1.0, -2.0), fall(0.0, 0.0)
    (0.0, 0.5, 0.0)
    """
    if before > 0 and after > 0:
        return log(before / after)
    return (before - after) / (max(abs(before), abs(after)) or 1.0)
