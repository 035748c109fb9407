"""Short runs that test further claims of the paper, and the commands that make them.

They have a quarter of the length of the paper profile or less, and a few seeds, to test trends of a factor of two
and more. All together take about 15 minutes on one core.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from .provenance import seed_ranges
from .runner import Spec


@dataclass(frozen=True)
class Part:
    """Methods on a task with some settings fixed and some swept; each combination is run once per seed."""

    methods: tuple[str, ...]
    fixed: Mapping[str, Any]
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    task: str = "admissions"

    def overrides(self) -> Iterator[dict[str, Any]]:
        """The settings of each combination."""
        for values in product(*self.sweep.values()):
            yield {**self.fixed, **dict(zip(self.sweep, values, strict=True))}

    def command(self, seeds: Sequence[int]) -> str:
        """The command that makes exactly these runs."""
        words = ["python -m experiments run", self.task, "--method", *self.methods, f"--seeds {seed_ranges(seeds)}"]
        words += ["--profile paper", "--set", *(f"{name}={value}" for name, value in self.fixed.items())]
        if self.sweep:
            words += ["--sweep", *(f"{name}={','.join(map(str, values))}" for name, values in self.sweep.items())]
        return " ".join(words)


@dataclass(frozen=True)
class Study:
    """The runs that one or more claims need."""

    about: str
    parts: tuple[Part, ...]
    seeds: Sequence[int] = range(10, 15)

    def specs(self) -> list[Spec]:
        """All runs, seed by seed, so that an interrupted study has complete seeds."""
        return [
            Spec(part.task, method, seed, overrides=overrides)
            for seed in self.seeds
            for part in self.parts
            for overrides in part.overrides()
            for method in part.methods
        ]

    def commands(self) -> list[str]:
        """Commands of ``python -m experiments run`` that make these runs."""
        return [part.command(self.seeds) for part in self.parts]


SHORT = {"steps": 3750}
"""A quarter of the paper profile of admissions."""
HARD = SHORT | {"relaxation": 1.0}
"""Full jumps: the paper's relaxation of 0.1 is mostly a smaller learning rate."""
WIDE = {"steps": 500, "width": 128}
"""Wide enough for arithmetic to dominate the calls; long enough for histories to fill before times are measured."""


def each(period: int) -> dict[str, int]:
    """Settings that store and accelerate every ``period`` steps."""
    return {"period": period, "store_period": period}


STUDIES = {
    "batch-size": Study(
        "Oscillations against batch size, and their effect on the gain of Anderson.",
        (
            Part(("base",), SHORT, {"batch_size": (10, 20, 40, 80, 160)}),
            Part(("anderson",), HARD | {"period": 10}, {"batch_size": (10, 40, 160)}),
        ),
    ),
    "collinearity": Study(
        "Condition number of R against period and store_period, with the paper's small jumps: large ones can blow up.",
        (
            Part(("anderson",), SHORT | {"store_period": 1}, {"period": (1, 2, 5, 10, 20)}),
            Part(("anderson",), SHORT | {"period": 20}, {"store_period": (1, 2, 5, 10, 20)}),
        ),
        range(10, 13),
    ),
    "average-window": Study(
        "Oscillations and speed against the window of the average, and at the equivalent learning rate.",
        (
            Part(("base",), SHORT | {"evaluate_every": 5}),
            Part(("average", "matched-average"), SHORT | {"evaluate_every": 5}, {"average_window": (2, 5, 10, 20)}),
        ),
    ),
    "tolerance": Study(
        "How often the average is taken against its tolerance, and without noise.",
        (
            Part(("anderson+average",), {"steps": 2000}, {"average_tolerance": (0.1, 0.3, 1.0, 3.0, 10.0)}),
            Part(("anderson+average",), {"steps": 2000, "batch_size": 400}),
        ),
        range(10, 13),
    ),
    "stability": Study(
        "Anderson with full jumps, more and less often, with and without the paper's safeguard.",
        (
            Part(("base",), SHORT),
            Part(("anderson",), HARD | {"store_period": 1}, {"period": (1, 2, 5, 10, 20)}),
            Part(("anderson",), HARD | {"store_period": 1, "safeguard": "residual"}, {"period": (1, 10)}),
        ),
    ),
    "limit": Study(
        "A period longer than the run.",
        (Part(("base",), {"steps": 500}), Part(("anderson",), {"steps": 500} | each(10**6))),
        range(10, 13),
    ),
    "cost": Study(
        "Time against history_size and period, on a network of 34,000 parameters.",
        (
            Part(("base",), WIDE),
            Part(("anderson",), WIDE, {"history_size": (4, 8, 16, 32)}),
            *(Part(("anderson",), WIDE | each(period) | {"history_size": 4}) for period in (4, 16)),
        ),
        range(10, 13),
    ),
}
"""By name, as ``python -m experiments study NAME`` runs them."""
