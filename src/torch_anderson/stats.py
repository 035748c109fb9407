"""What happened: counters, and a record of the latest acceleration."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import ClassVar

from .least_squares import condition_number

SKIPPED = (
    *("short_history", "converged", "nonfinite", "no_gain", "noisy", "no_loss"),
    *("no_outputs", "nonfinite_outputs", "outputs_wrote", "outputs_changed", "random_outputs", "other_rank"),
)
REJECTED = ("nonfinite", "too_long", "descent", "loss", "residual", "outside_write", "held_out")
COUNTS = (
    "attempted",
    "accepted",
    *(f"rejected_{cause}" for cause in REJECTED),
    *(f"skipped_{cause}" for cause in SKIPPED),
    "averaged",
    "restarts",
    "extra_evaluations",
)


@dataclass(frozen=True)
class Acceleration:
    """One acceleration in numbers, as hooks get it."""

    step: int
    """The base step after which it was made."""
    residual_norm: float
    """|r|"""
    predicted_residual_norm: float
    """|r - R g|"""
    rank: int
    """Columns in use."""
    history_len: int
    """Columns of R."""
    coefficient_norm: float
    """|g|"""
    step_ratio: float = 0.0
    """|candidate - w| / |r|; 0 if no candidate was formed."""
    cause: str = ""
    """Empty if the weights jumped, else why not: a name from ``SKIPPED`` or ``REJECTED``."""
    gram: list[list[float]] | None = field(default=None, repr=False, compare=False)
    """Lower triangle of R'R up to a factor, newest column first; absent in a record from a checkpoint."""

    @property
    def accepted(self) -> bool:
        """Whether the weights jumped."""
        return not self.cause

    @property
    def gain(self) -> float:
        """Predicted over present residual norm: near 0, a linear model of training explains the residual; near 1,
        it explains nothing."""
        return self.predicted_residual_norm / self.residual_norm if self.residual_norm else 0.0

    @property
    def condition_number(self) -> float:
        """Of the columns of R scaled to length 1, worked out when asked for."""
        return nan if self.gram is None else condition_number(self.gram)

    def as_dict(self) -> dict[str, float]:
        """All numbers, ready for a logger."""
        derived = {"gain": self.gain, "condition_number": self.condition_number}
        return dict(zip(NUMBERS, map(float, self.numbers()), strict=True)) | derived

    def numbers(self) -> list[float]:
        """The fields named in ``NUMBERS``."""
        return [getattr(self, name) for name in NUMBERS]


NUMBERS = (
    "step",
    "residual_norm",
    "predicted_residual_norm",
    "rank",
    "history_len",
    "coefficient_norm",
    "step_ratio",
)


@dataclass(frozen=True)
class Pending:
    """A jump that waits for the next residual."""

    norm: float
    """|r / lr| before the jump."""
    record: Acceleration

    LENGTH: ClassVar[int] = 1 + len(NUMBERS)

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "Pending | None":
        """The inverse of ``as_numbers``."""
        norm, step, residual_norm, predicted, rank, history_len, coefficient_norm, step_ratio = numbers
        record = Acceleration(
            int(step), residual_norm, predicted, int(rank), int(history_len), coefficient_norm, step_ratio
        )
        return cls(norm, record) if norm >= 0 else None

    @classmethod
    def as_numbers(cls, pending: "Pending | None") -> list[float]:
        """For a checkpoint; a negative norm means that nothing is pending."""
        return [pending.norm, *pending.record.numbers()] if pending else [-1.0] * cls.LENGTH


@dataclass
class Stats:
    """Counters over a run. ``attempted`` is ``accepted`` + all rejected + one that may be pending."""

    counts: Counter[str] = field(default_factory=Counter)
    history_bytes: int = 0
    describe: Callable[[], Acceleration] | None = field(default=None, repr=False)
    """Works out ``latest``, once."""
    gauges: Callable[[], dict[str, float]] = field(default=dict, repr=False)
    """What the driver has set itself at present, by name."""
    _latest: Acceleration | None = field(default=None, repr=False)

    @property
    def latest(self) -> Acceleration | None:
        """The latest acceleration."""
        if self.describe:
            self._latest, self.describe = self.describe(), None
        return self._latest

    def set_counts(self, values: Iterable[float]) -> None:
        """All counters, in the order of ``COUNTS``."""
        self.counts = Counter(dict(zip(COUNTS, map(int, values), strict=True)))

    def as_dict(self) -> dict[str, float]:
        """All of it as flat floats, ready for a logger.

        >>> Stats().as_dict()["accepted"]
        0.0
        """
        flat = {name: float(self.counts[name]) for name in COUNTS}
        flat["history_bytes"] = float(self.history_bytes)
        return flat | self.gauges() | (self.latest.as_dict() if self.latest else {})
