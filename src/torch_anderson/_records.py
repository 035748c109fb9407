"""What happened: counters, and a record of the latest jump."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import nan
from typing import Self

import torch

SKIPPED = (
    *("short_history", "converged", "nonfinite", "outside_write", "no_gain", "noisy", "no_descent", "no_loss"),
    *("no_objective", "given_samples", "nonfinite_outputs", "outputs_wrote", "random_outputs", "constant_outputs"),
    *("other_rank", "outside_parameters", "no_rows"),
)
REJECTED = ("nonfinite", "too_long", "gradient", "loss", "residual", "outside_write")
COUNTS = (
    "attempted",
    "accepted",
    *(f"rejected_{cause}" for cause in REJECTED),
    *(f"skipped_{cause}" for cause in SKIPPED),
    "averaged",
    "restarts",
    "extra_evaluations",
)

NUMBERS = (
    "step",
    "residual_norm",
    "predicted_residual_norm",
    "rank",
    "history_len",
    "coefficient_norm",
    "step_ratio",
)
"""The fields of a record that are numbers."""


@dataclass(frozen=True)
class JumpRecord:
    """One acceleration in numbers, as hooks receive it."""

    step: int
    """The base step after which it was computed."""
    residual_norm: float
    """|r|, or the length of the gradient; for ``GaussNewton`` the square root of the loss."""
    predicted_residual_norm: float
    """|r - R g|"""
    rank: int
    """Columns in use."""
    history_len: int
    """Columns of R."""
    coefficient_norm: float
    """|g|"""
    step_ratio: float = 0.0
    """|candidate - w| / |r|; 0 if there was no candidate."""
    cause: str = ""
    """Empty if the weights jumped, otherwise the reason: a name from ``SKIPPED`` or ``REJECTED``."""
    gram: list[list[float]] | None = field(default=None, repr=False, compare=False)
    """Lower triangle of R'R up to a factor, newest column first; absent in a record from a checkpoint."""

    @classmethod
    def from_numbers(cls, values: Iterable[float]) -> Self:
        """A record from its ``NUMBERS``, as a checkpoint has them."""
        step, residual, predicted, rank, length, coefficients, ratio = values
        return cls(int(step), residual, predicted, int(rank), int(length), coefficients, ratio)

    @property
    def accepted(self) -> bool:
        """Whether the weights jumped."""
        return not self.cause

    @property
    def length(self) -> float:
        """Length of the jump, |candidate - w|."""
        return self.step_ratio * self.residual_norm

    @property
    def gain(self) -> float:
        """Predicted over present residual norm.

        Near 0, a linear model of training explains the residual; near 1, it explains nothing.
        """
        return self.predicted_residual_norm / self.residual_norm if self.residual_norm else 0.0

    @property
    def condition_number(self) -> float:
        """Condition number of the columns of R scaled to length 1, computed on demand."""
        return nan if self.gram is None else condition_number(self.gram)

    def as_dict(self) -> dict[str, float]:
        """All numbers, ready for a logger."""
        derived = {"gain": self.gain, "condition_number": self.condition_number}
        return {name: float(getattr(self, name)) for name in NUMBERS} | derived


def condition_number(gram: list[list[float]]) -> float:
    """Condition number of columns scaled to unit length, from the lower triangle of R'R; infinite if dependent.

    >>> round(condition_number([[4.0], [1.2, 1.0]]), 6)
    2.0
    """
    matrix = torch.zeros(len(gram), len(gram), dtype=torch.float64)
    for i, row in enumerate(gram):
        matrix[i, : i + 1] = torch.tensor(row[: i + 1], dtype=torch.float64)
    scale = matrix.diagonal().rsqrt()
    scaled = matrix * scale.unsqueeze(-1) * scale
    if not scaled.isfinite().all():
        return float("inf")
    eigenvalues = torch.linalg.eigvalsh(scaled)
    return float((eigenvalues[-1] / eigenvalues[0].clamp_min(0.0)).sqrt())


@dataclass
class Stats:
    """Counters over a run. ``attempted`` is ``accepted`` + all rejected + one that may be pending."""

    counts: Counter[str] = field(default_factory=Counter)
    history_bytes: int = 0
    latest: JumpRecord | None = field(default=None, repr=False)
    """The latest acceleration."""
    gauges: Callable[[], dict[str, float]] = field(default=dict, repr=False)
    """Settings that the accelerator adapts, by name."""

    def counters(self) -> list[float]:
        """All counters, in the order of ``COUNTS``."""
        return [float(self.counts[name]) for name in COUNTS]

    def set_counters(self, values: Iterable[float]) -> None:
        """Undo ``counters``."""
        self.counts = Counter(dict(zip(COUNTS, map(int, values), strict=True)))

    def as_dict(self) -> dict[str, float]:
        """Everything as flat floats, ready for a logger.

        >>> Stats().as_dict()["accepted"]
        0.0
        """
        flat = dict(zip(COUNTS, self.counters(), strict=True))
        flat["history_bytes"] = float(self.history_bytes)
        return flat | self.gauges() | (self.latest.as_dict() if self.latest else {})
