"""What accelerations cost and gain, in counts, never in seconds: reruns decide alike, and so do all ranks."""

from dataclasses import dataclass
from math import ceil

SMOOTHING = 0.7
"""Of gains from one acceleration to the next."""
MORE, LESS = 1.25, 1.5
"""The share grows and shrinks by these factors."""
MOST = 2.0
"""In budgets."""
LEAST_SHARE = 0.02


@dataclass
class Ledger:
    """How long to wait for the next acceleration. A gradient costs 1; gains are in log(loss)."""

    budget: float
    share: float
    """Of all cost, what accelerations may take at present."""
    jump_rate: float = 0.0
    """Gained by a unit of cost in accelerations."""
    base_rate: float = 0.0
    """Gained by a base step."""
    wait: int = 0
    """Base steps until the next acceleration."""

    @classmethod
    def opened(cls, budget: float, period: int) -> "Ledger":
        """Before the first acceleration."""
        return cls(budget, budget, wait=period)

    def enter(self, cost: float, gain: float, base_gain: float, steps: int, period: int) -> None:
        """Book an acceleration with its gain, and what the base gained in its steps before it."""
        self.jump_rate += (1 - SMOOTHING) * (gain / cost - self.jump_rate)
        self.base_rate += (1 - SMOOTHING) * (base_gain / max(steps, 1) - self.base_rate)
        pays = gain > 0 and self.jump_rate > self.base_rate
        self.share = min(self.share * MORE, MOST * self.budget, 0.9) if pays else max(self.share / LESS, LEAST_SHARE)
        self.wait = max(period, ceil(cost * (1 - self.share) / self.share))

    def numbers(self) -> list[float]:
        """For a checkpoint."""
        return [self.share, self.jump_rate, self.base_rate, float(self.wait)]

    @classmethod
    def from_numbers(cls, budget: float, numbers: list[float]) -> "Ledger":
        """The inverse."""
        share, jump_rate, base_rate, wait = numbers
        return cls(budget, share, jump_rate, base_rate, int(wait))
