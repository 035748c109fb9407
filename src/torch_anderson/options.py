"""The options of ``Anderson``, checked once."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .discrepancy import Discrepancy
    from .storage import Storage

CHOICES: dict[str, tuple[Any, ...]] = {
    "mixing": ("paper", "anderson"),
    "residual": ("step", "cycle"),
    "average_criterion": ("paper", "detrended"),
    "solver": ("gram", "qr"),
    "safeguard": ("descent", "loss", "residual", None),
    "on_accept": ("keep", "reset_momentum"),
}
POWERS = (3, 10, 30)
"""Averages of the weights over about the last 1/4, 1/11 and 1/31 of all steps, however long training takes."""
SMALLEST = {"history_size": 1, "period": 1, "store_period": 1, "warmup": 0, "average_window": 0}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Described, with their defaults, in ``Anderson``."""

    history_size: int
    period: int
    store_period: int
    relaxation: float
    mixing: str
    warmup: int
    residual: str
    average_window: int
    average_tolerance: float
    average_criterion: str
    regularization: float | str
    solver: str
    max_jump: float
    safeguard: str | None
    on_accept: str
    discrepancy: "Discrepancy | None" = None
    storage: "Storage | None" = None

    def __post_init__(self) -> None:
        for name, smallest in SMALLEST.items():
            value = getattr(self, name)
            if not is_integer(value) or value < smallest:
                self._refuse(name, f"an integer of at least {smallest}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                self._refuse(name, f"one of {', '.join(map(repr, choices))}")
        self._check_real("relaxation", lambda x: 0 < x <= 1, "a number above 0 and at most 1")
        self._check_real("average_tolerance", lambda x: x >= 0, "a number of at least 0")
        if self.regularization != "adaptive":
            self._check_real("regularization", lambda x: 0 <= x < float("inf"), "a finite number from 0, or 'adaptive'")
        self._check_real("max_jump", lambda x: x > 0, "a number above 0, or infinity for no limit")
        self._check_together()

    @property
    def window_rows(self) -> int:
        """Vectors kept for averaging: the window, or the one sum of an in-cycle mean."""
        return min(self.average_window, 1) if self.residual == "cycle" else self.average_window

    @property
    def cycle_length(self) -> int:
        """Base steps in one residual; 0 stands for steps, less for no residual but directions, some of them jumps."""
        if self.discrepancy:
            return -1 - self.discrepancy.jumps
        return self.period if self.residual == "cycle" else 0

    @property
    def cycle_progress(self) -> float:
        """The part of a cycle's way that its end has made: the mean of the last iterates lags by half its window."""
        return 1 - max(self.average_window - 1, 0) / (2 * self.period) if self.residual == "cycle" else 1.0

    @property
    def rows(self) -> dict[str, tuple[str, int]]:
        """Matrices kept for a parameter: the option that says how many rows they have, and the number."""
        if self.discrepancy is None:
            return {"map_diffs": ("history_size", self.history_size), "window": ("average_window", self.window_rows)}
        trains, evaluates = self.discrepancy.trains, self.discrepancy.evaluates
        directions = self.discrepancy.history_size + self.discrepancy.jumps + 2 if trains else 0
        averages = len(POWERS) if evaluates else 0
        return {"directions": ("history_size, jumps or use", directions), "averages": ("use", averages)}

    def _check_together(self) -> None:
        if self.residual == "cycle":
            if self.safeguard == "residual":
                self._refuse("safeguard", "'descent', 'loss' or None with residual='cycle'")
            if self.store_period != 1:
                self._refuse("store_period", "1 with residual='cycle', which stores one pair a period")
            if self.average_window > self.period:
                self._refuse("average_window", f"at most period={self.period} with residual='cycle'")
        elif self.average_criterion == "detrended" and 0 < self.average_window < 4:
            self._refuse("average_window", "at least 4 (or 0) with average_criterion='detrended'")

    def _check_real(self, name: str, allowed: Any, described: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not allowed(value):
            self._refuse(name, described)

    def _refuse(self, name: str, allowed: str) -> None:
        raise ValueError(f"Invalid {name}: {getattr(self, name)!r}. Allowed: {allowed}.")


def is_integer(value: Any) -> bool:
    """Whether a value counts something; True and False do not."""
    return isinstance(value, int) and not isinstance(value, bool)
