"""From records to numbers: targets, and the gradients or the processor time needed to reach them.

A run that does not reach its target counts against us on both sides of a ratio: as twice the allowed gradients where it
is ours, as the allowed gradients where it is the one we compare with. Where both fail, the pair is left out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean, median
from typing import Any

from ..methods import DESCENTS as METHODS
from ..methods import LBFGS_HISTORIES
from .problems import BASES, FAMILY, PROBLEMS, Problem

Record = Mapping[str, Any]
Place = tuple[str, int]
"""Problem and seed: what methods are compared on."""
Counts = Mapping[int, float]
"""Seed -> gradients to target; infinite where it was not reached."""
WITHIN = 1.1
"""A target, where the problem names no other: this many times the lowest loss that any method found."""
LAST = 10
"""A run is judged at its end by the lowest of so many last losses: a single one may be a jump on trial."""
STEADY = 1.5
"""A base is stable if its last losses are below this many times its lowest."""
CLOSE = 1.001
"""Base and accelerated base race to this many times the base's lowest loss."""
LBFGS = tuple(f"lbfgs-{history}" for history in LBFGS_HISTORIES)


def place(record: Record) -> Place:
    """Where a run belongs."""
    return record["problem"], record["seed"]


def finite_losses(record: Record) -> list[float]:
    """The losses of a run, without the last one if the run diverged."""
    return [loss for loss in record["losses"] if loss is not None and math.isfinite(loss)]


def diverged(record: Record) -> bool:
    """Whether the loss stopped being a finite number."""
    return len(finite_losses(record)) < len(record["losses"])


def lowest(records: Iterable[Record]) -> dict[Place, float]:
    """The lowest loss that any method found, by problem and seed."""
    found: dict[Place, float] = {}
    for each in records:
        best = min(finite_losses(each), default=math.inf)
        found[place(each)] = min(found.get(place(each), math.inf), best)
    return found


def targets(records: Sequence[Record]) -> dict[Place, float]:
    """The loss to reach, by problem and seed."""
    optima = {place(each): each["optimum"] for each in records}
    return {where: target(where[0], best, optima[where]) for where, best in lowest(records).items()}


def target(problem: str, best: float, optimum: float | None) -> float:
    """The loss to reach, from the lowest one found and the optimum where it is known."""
    excess = PROBLEMS[problem].excess
    return WITHIN * best if excess is None or optimum is None else optimum + excess


def gradients_to(record: Record, loss: float) -> float:
    """How many gradients were computed up to the first with a loss this low; infinite if there is none."""
    counted = enumerate(record["losses"], 1)
    return next((count for count, each in counted if each is not None and each <= loss), math.inf)


def middle(counts: Iterable[float]) -> float:
    """The median; infinite where half of the numbers or more are.

    >>> middle([3, math.inf, 1]), middle([3, math.inf])
    (3, inf)
    """
    ordered = sorted(counts)
    both = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return math.inf if math.inf in both else median(both)


def shown(count: float) -> str:
    """A number of gradients in a table.

    >>> shown(16.0), shown(16.5), shown(math.inf)
    ('16', '16.5', '-')
    """
    return f"{count:g}" if math.isfinite(count) else "-"


def end(record: Record) -> float:
    """The loss that a run ends with; infinite if it diverged."""
    return math.inf if diverged(record) else min(record["losses"][-LAST:])


def stable(record: Record) -> bool:
    """Whether a run neither diverged nor bounces at its end."""
    return not diverged(record) and max(record["losses"][-LAST:]) <= STEADY * min(record["losses"])


@dataclass(frozen=True)
class Summary:
    """Ratios in short."""

    mean: float
    """Geometric."""
    worst: float
    pairs: int
    failed: int
    """Pairs in which ours did not reach the target."""
    left_out: int
    """Pairs in which neither did."""


def summary(ratios: Iterable[float], failed: int = 0, left_out: int = 0) -> Summary:
    """Summarize ratios; mean and maximum are NaN if there are none."""
    values = list(ratios)
    if not values:
        return Summary(math.nan, math.nan, 0, failed, left_out)
    return Summary(geometric_mean(values), max(values), len(values), failed, left_out)


class Scores:
    """All runs of the family, ready for questions."""

    def __init__(self, records: Iterable[Record]) -> None:
        # A run that was made twice counts once.
        unique = {(*place(each), each["method"], each["rate"]): each for each in records}
        self.records = list(unique.values())

    @cached_property
    def goals(self) -> dict[Place, float]:
        """The loss to reach, by problem and seed."""
        return targets(self.records)

    @cached_property
    def problems(self) -> list[Problem]:
        """Those with runs, in the order of the family."""
        names = {each["problem"] for each in self.records}
        return [problem for problem in FAMILY if problem.name in names]

    @cached_property
    def _by_kind(self) -> dict[tuple[str, str, float | None], dict[int, Record]]:
        found: dict[tuple[str, str, float | None], dict[int, Record]] = {}
        for each in self.records:
            found.setdefault((each["problem"], each["method"], each["rate"]), {})[each["seed"]] = each
        return found

    def runs(self, problem: str, method: str, rate: float | None = None) -> dict[int, Record]:
        """Seed -> run."""
        return self._by_kind.get((problem, method, rate), {})

    def rates(self, problem: str, method: str) -> list[float | None]:
        """The learning rates that there are runs with, ascending."""
        found = [rate for name, each, rate in self._by_kind if (name, each) == (problem, method)]
        return sorted(found, key=lambda rate: rate or 0.0)

    def methods(self, problem: str) -> list[str]:
        """Those with runs on a problem."""
        there = {method for name, method, _ in self._by_kind if name == problem}
        return [method for method in METHODS if method in there]

    def counts(self, problem: str, method: str, rate: float | None = None) -> dict[int, float]:
        """Seed -> gradients to target."""
        runs = self.runs(problem, method, rate)
        return {seed: gradients_to(each, self.goals[place(each)]) for seed, each in runs.items()}

    def best(self, problem: str, methods: Iterable[str]) -> tuple[str, float | None] | None:
        """The method with the rate that needs the fewest gradients, geometric mean over seeds; None without runs."""
        kinds = [(method, rate) for method in methods for rate in self.rates(problem, method)]
        allowed = PROBLEMS[problem].gradients
        return min(kinds, key=lambda kind: mean_count(self.counts(problem, *kind), 2 * allowed), default=None)

    def over_best(self, others: Sequence[str], problems: Sequence[Problem], bases: Sequence[str] = BASES) -> Summary:
        """Gradients of ours, every base at each of its rates, over those of the best of the other methods."""
        ratios, failed, left_out = [], 0, 0
        for problem in problems:
            against = self.best(problem.name, others)
            theirs = self.counts(problem.name, *against) if against else {}
            for mine in self._ours(problem.name, bases):
                pairs = [(mine[seed], theirs[seed]) for seed in mine.keys() & theirs.keys()]
                ratios += [ratio(*pair, problem.gradients) for pair in pairs if math.isfinite(min(pair))]
                failed += sum(math.isinf(ours) for ours, _ in pairs)
                left_out += sum(math.isinf(min(pair)) for pair in pairs)
        return summary(ratios, failed, left_out)

    def _ours(self, problem: str, bases: Sequence[str]) -> list[dict[int, float]]:
        methods = [f"anderson-{base}" for base in bases]
        return [self.counts(problem, method, rate) for method in methods for rate in self.rates(problem, method)]

    def over_base(self, problems: Sequence[Problem], measure: str, bases: Sequence[str] = BASES) -> dict[str, float]:
        """Ours over the base at the same rate and seed, where the base is stable; by a name for each pair.

        ``measure``: "loss", that at the end, or "gradients", those to come close to the base's lowest loss.
        """
        compare = {"loss": loss_ratio, "gradients": gradient_ratio}[measure]
        found = {}
        for problem in problems:
            for base in bases:
                for rate in self.rates(problem.name, base):
                    alone, with_us = (self.runs(problem.name, each, rate) for each in (base, f"anderson-{base}"))
                    for seed in sorted(alone.keys() & with_us.keys()):
                        if stable(alone[seed]):
                            name = f"{problem.name}, {base} lr {rate:g}, seed {seed}"
                            found[name] = compare(with_us[seed], alone[seed])
        return found


def ratio(ours: float, theirs: float, allowed: int) -> float:
    """Gradients of ours over theirs, where at least one has reached the target.

    >>> ratio(10, 20, 300), ratio(math.inf, 300, 300), ratio(150, math.inf, 300)
    (0.5, 2.0, 0.5)
    """
    return (2 * allowed if math.isinf(ours) else ours) / min(theirs, allowed)


def mean_count(counts: Counts, unreached: float) -> float:
    """Geometric mean over seeds, with this number where the target was not reached."""
    return geometric_mean(min(count, unreached) for count in counts.values())


def loss_ratio(ours: Record, base: Record) -> float:
    """The loss that ours ends with over the base's."""
    return end(ours) / end(base)


def gradient_ratio(ours: Record, base: Record) -> float:
    """Gradients to come close to the base's lowest loss, ours over the base's."""
    loss = CLOSE * min(base["losses"])
    return ratio(gradients_to(ours, loss), gradients_to(base, loss), len(base["losses"]))
