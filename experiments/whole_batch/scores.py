"""From records to numbers: targets, the gradients or the processor time needed to reach them, and ratios to the base.

A run that does not reach its target counts against us on both sides of a ratio: as twice the allowed gradients where it
is ours, as the allowed gradients where it is the one we compare with. Where both fail, the pair is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, isinf, nan

from ..methods import DESCENTS as METHODS
from ..methods import LBFGS_HISTORIES
from ..scores import Rate, Record, Records
from ..statistics import geometric_mean, reached_at
from .problems import BASES, PROBLEMS, Problem

Place = tuple[str, int]
"""Problem and seed: what methods are compared on."""
ByBatch = Mapping[tuple[str, str, int], Mapping[str, list[float]]]
"""Problem, base and batch size -> measure -> values, one for each seed."""
WITHIN = 1.1
"""A target, where the problem names no other: this many times the lowest loss that any method found."""
LAST = 10
"""A run is judged at its end by the lowest of so many last losses: a single one may be a jump on trial."""
STEADY = 1.5
"""A base is stable if its last losses are below this many times its lowest."""
CLOSE = 1.001
"""Base and accelerated base race to this many times the base's lowest loss."""
LBFGS = tuple(f"lbfgs-{history}" for history in LBFGS_HISTORIES)


def finite_losses(record: Record) -> list[float]:
    """The losses of a run, without the last one if the run diverged."""
    return [loss for loss in record["losses"] if loss is not None and isfinite(loss)]


def diverged(record: Record) -> bool:
    """Whether the loss stopped being a finite number."""
    return len(finite_losses(record)) < len(record["losses"])


def gradients_to(record: Record, loss: float) -> float:
    """How many gradients were computed up to the first with a loss this low; infinite if there is none."""
    return reached_at(range(1, len(record["losses"]) + 1), record["losses"], loss)


def shown(count: float) -> str:
    """A number of gradients in a table.

    >>> shown(16.0), shown(16.5), shown(inf)
    ('16', '16.5', '-')
    """
    return f"{count:g}" if isfinite(count) else "-"


def stable(record: Record) -> bool:
    """Whether a run neither diverged nor bounces at its end."""
    return not diverged(record) and max(record["losses"][-LAST:]) <= STEADY * min(record["losses"])


def ratio(ours: float, theirs: float, allowed: int) -> float:
    """Gradients of ours over theirs, where at least one has reached the target.

    >>> ratio(10, 20, 300), ratio(inf, 300, 300), ratio(150, inf, 300)
    (0.5, 2.0, 0.5)
    """
    return (2 * allowed if isinf(ours) else ours) / min(theirs, allowed)


def end(record: Record) -> float:
    """The loss that a run ends with; infinite if it diverged."""
    return inf if diverged(record) else min(record["losses"][-LAST:])


def loss_ratio(ours: Record, base: Record) -> float:
    """The loss that ours ends with over the base's."""
    return end(ours) / end(base)


def gradient_ratio(ours: Record, base: Record) -> float:
    """Gradients to come close to the base's lowest loss, ours over the base's."""
    loss = CLOSE * min(base["losses"])
    return ratio(gradients_to(ours, loss), gradients_to(base, loss), len(base["losses"]))


@dataclass(frozen=True)
class Summary:
    """Ratios in short."""

    mean: float
    """Geometric; NaN without pairs, as the worst is."""
    worst: float
    pairs: int
    failed: int
    """Pairs in which ours did not reach the target."""
    left_out: int
    """Pairs in which neither did."""


class Scores(Records[Problem]):
    """All runs of the family, ready for questions."""

    def __init__(self, records: Iterable[Record]) -> None:
        # A run that was made twice counts once.
        unique = {(each["problem"], each["method"], each["rate"], each["seed"]): each for each in records}
        super().__init__(unique.values(), PROBLEMS, METHODS)

    @cached_property
    def goals(self) -> dict[Place, float]:
        """The loss to reach, by problem and seed: near the optimum if that is known, else near the lowest found."""
        lowest: dict[Place, float] = {}
        optima: dict[Place, float | None] = {}
        for each in self.records:
            place = each["problem"], each["seed"]
            lowest[place] = min([lowest.get(place, inf), *finite_losses(each)])
            optima[place] = each["optimum"]
        goals = {}
        for place, best in lowest.items():
            excess, optimum = PROBLEMS[place[0]].excess, optima[place]
            goals[place] = WITHIN * best if excess is None or optimum is None else optimum + excess
        return goals

    def counts(self, problem: str, method: str, rate: Rate = None) -> dict[int, float]:
        """Seed -> gradients to target; infinite where it was not reached."""
        runs = self.runs(problem, method, rate)
        return {seed: gradients_to(each, self.goals[problem, seed]) for seed, each in runs.items()}

    def seconds(self, problem: str, method: str, rate: Rate = None) -> dict[int, float]:
        """Seed -> processor seconds to target; infinite where it was not reached."""
        runs = self.runs(problem, method, rate)
        return {
            seed: reached_at(each["seconds"], each["losses"], self.goals[problem, seed]) for seed, each in runs.items()
        }

    def best(self, problem: str, methods: Iterable[str]) -> tuple[str, Rate] | None:
        """The method with the rate that needs the fewest gradients, geometric mean over seeds; None without runs."""
        most = 2 * PROBLEMS[problem].gradients

        def cost(kind: tuple[str, Rate]) -> float:
            return geometric_mean([min(count, most) for count in self.counts(problem, *kind).values()])

        return min(((name, rate) for name in methods for rate in self.rates(problem, name)), key=cost, default=None)

    def over_best(self, others: Sequence[str], problems: Sequence[Problem], bases: Sequence[str] = BASES) -> Summary:
        """Gradients of ours, every base at each of its rates, over those of the best of the other methods."""
        pairs: list[tuple[float, float, int]] = []
        for problem in problems:
            against = self.best(problem.name, others)
            theirs = self.counts(problem.name, *against) if against else {}
            for method in (f"anderson-{base}" for base in bases):
                for rate in self.rates(problem.name, method):
                    mine = self.counts(problem.name, method, rate)
                    pairs += [(mine[seed], theirs[seed], problem.gradients) for seed in mine.keys() & theirs.keys()]
        ratios = [ratio(*pair) for pair in pairs if isfinite(min(pair[:2]))]
        failed = sum(isinf(ours) for ours, *_ in pairs)
        return Summary(geometric_mean(ratios), max(ratios, default=nan), len(ratios), failed, len(pairs) - len(ratios))

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


def by_batch(records: Iterable[Record]) -> ByBatch:
    """Final loss and time over the base's with the same batches, and the number of jumps."""
    runs = {(each["problem"], each["method"], each["batch"], each["seed"]): each for each in records}
    found: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for (problem, method, batch, seed), ours in sorted(runs.items(), key=lambda item: str(item[0])):
        base = method.rpartition("-")[2]
        alone = runs.get((problem, base, batch, seed))
        if method == base or alone is None or base not in BASES:
            continue
        values = found.setdefault((problem, base, batch or ours["samples"]), {"loss": [], "accepted": [], "time": []})
        values["loss"].append(ours["final"] / alone["final"])
        values["accepted"].append(ours["stats"].get("accepted", 0.0))
        values["time"].append(ours["cpu_seconds"] / alone["cpu_seconds"])
    return found
