"""From runs to numbers: selection of the runs for a claim, and comparisons over seeds.

A run that diverged is never left out: in comparisons it counts as ten times the worst value of the other runs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comparison import problem, settings_without
from ..results import Run
from ..statistics import Interval, geometric_interval, interval
from .measures import Measure
from .verdict import Curve, Missing

LEAST_SEEDS = 3
"""With fewer seeds nothing is decided."""
PENALTY = 10.0
BOTH = "anderson+average"

BySeed = dict[int, Run]


# Selecting runs.


def select(runs: Sequence[Run], task: str, method: str) -> list[Run]:
    """The runs of a method on a task."""
    return [run for run in runs if run.task == task and run.config["method"] == method]


def by_seed(runs: Sequence[Run]) -> BySeed:
    """The runs by seed."""
    return {run.seed: run for run in runs}


def same_problem(runs: Sequence[Run], like: Run) -> list[Run]:
    """The runs with the same task and the same settings except those of Anderson."""
    wanted = problem(like)
    return [run for run in runs if problem(run) == wanted]


def alike(runs: Sequence[Run], method: str, like: BySeed) -> list[Run]:
    """The runs of a method on the same problem."""
    one = next(iter(like.values()))
    return same_problem(select(runs, one.task, method), one)


def shared(runs: BySeed, others: BySeed) -> BySeed:
    """The runs whose seed is also among the others."""
    return {seed: run for seed, run in runs.items() if seed in others}


def setting(run: Run, name: str) -> Any:
    """A setting of the run; None if its task does not have it."""
    return run.config["settings"].get(name)


def sweep(runs: Sequence[Run], *names: str) -> dict[Any, BySeed]:
    """The runs by their value of the first setting; they may also differ in the other settings named, but in no more.

    If there are several such families, it is the one with most values, then with most runs.
    """
    families: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if setting(run, names[0]) is not None:
            families[settings_without(run, names)].append(run)
    groups = [group(family, names[0]) for family in families.values()]
    return max(groups, key=lambda found: (len(found), sum(map(len, found.values()))), default={})


def group(runs: Sequence[Run], name: str) -> dict[Any, BySeed]:
    """The runs by their value of a setting, in ascending order."""
    found: dict[Any, BySeed] = defaultdict(dict)
    for run in runs:
        found[setting(run, name)][run.seed] = run
    return dict(sorted(found.items()))


def from_study(name: str, why: str) -> Missing:
    """The error that asks for the runs of a study."""
    return Missing(why, f"python -m experiments study {name}")


# Comparisons over seeds.


def every(outcomes: Iterable[bool | None]) -> bool | None:
    """Whether all hold: False if one is refuted, otherwise None if one is open.

    >>> every([True, None]), every([None, False]), every([True, True])
    (None, False, True)
    """
    found = list(outcomes)
    return False if False in found else None if None in found else True


@dataclass(frozen=True)
class Comparison:
    """One set of runs against another by the ratio of a measure, seed by seed."""

    text: str
    ratio: Interval
    lower: int
    """Seeds on which it is below 1."""
    largest: float
    """The largest ratio on any seed: a mean can hide a single bad run."""
    diverged: int
    """Number of runs without this measure because they diverged."""

    def __str__(self) -> str:
        text = f"Ratio of {self.text}: {shown(self.ratio)}, below 1 on {self.lower}, at most {self.largest:.3g}."
        return text + (f" {self.diverged} diverged, each counted as ten times the worst." if self.diverged else "")


def compare(text: str, runs: BySeed, others: BySeed, measure: Measure) -> Comparison:
    """The ratio over the common seeds."""
    seeds = sorted(runs.keys() & others.keys())
    measured = [[measure.value(side[seed]) for seed in seeds] for side in (runs, others)]
    values, lost = penalised(measured), int((~np.isfinite(measured)).sum())
    ratios = values[0] / values[1]
    lower, largest = int((ratios < 1).sum()), float(ratios.max(initial=0))
    return Comparison(f"{measure.label}, {text}", geometric_interval(ratios), lower, largest, lost)


def penalised(values: Sequence[float] | Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """The values, with those that are not finite replaced by ten times the worst, and zeros by the smallest number."""
    array = np.asarray(values, dtype=float)
    worst = array[np.isfinite(array)].max(initial=np.finfo(float).tiny)
    return np.where(np.isfinite(array), array, PENALTY * worst).clip(min=np.finfo(float).tiny)


@dataclass(frozen=True)
class Trend:
    """How a measure depends on a setting: the slope in logarithms over seeds, and the mean at each value."""

    slope: Interval
    points: dict[float, Interval]
    diverged: int

    def __str__(self) -> str:
        points = ", ".join(f"{point.mean:.3g} at {value:g}" for value, point in self.points.items())
        text = f"{points}; exponent {shown(self.slope)}."
        return text + (f" {self.diverged} diverged, each counted as ten times the worst." if self.diverged else "")

    @property
    def line(self) -> tuple[list[float], list[float]]:
        """The means, for a figure."""
        return list(self.points), [point.mean for point in self.points.values()]


def trend(groups: Mapping[Any, BySeed], of: Callable[[Run], float]) -> Trend | None:
    """The trend over the seeds that all positive values share; None with fewer than two values or three seeds."""
    groups = {value: runs for value, runs in groups.items() if value > 0}
    seeds = sorted(set.intersection(*(set(runs) for runs in groups.values()))) if groups else []
    if len(groups) < 2 or len(seeds) < LEAST_SEEDS:
        return None
    measured = [[of(runs[seed]) for runs in groups.values()] for seed in seeds]
    values, lost = penalised(measured), int((~np.isfinite(measured)).sum())
    # Rounded: a measure that is equal at all values would otherwise have a slope of 1e-17 with no uncertainty.
    slopes = np.polyfit(np.log(list(groups)), np.log(values).T, 1)[0].round(9)
    points = dict(zip(groups, map(geometric_interval, values.T), strict=True))
    return Trend(interval(slopes), points, lost)


def studied(runs: Sequence[Run], study: str, task: str, method: str, *names: str) -> dict[Any, BySeed]:
    """The sweep over a setting; raises ``Missing`` if it has fewer than two values."""
    found = sweep(select(runs, task, method), *names)
    if len(found) < 2:
        raise from_study(study, f"No runs of {method} on {task} with two values of {names[0]}.")
    return found


def studied_trend(groups: Mapping[Any, BySeed], of: Callable[[Run], float], study: str) -> Trend:
    """The trend; raises ``Missing`` if there are too few seeds."""
    found = trend(groups, of)
    if found is None:
        raise from_study(study, f"Fewer than {LEAST_SEEDS} seeds at each value.")
    return found


# The runs of the paper's figures.


def paper_pair(runs: Sequence[Run], task: str, method: str, other: str, measure: Measure) -> Comparison:
    """Two methods in the paper profile; raises ``Missing``, with the results of the quick profile if there are any."""
    found = {profile: pair(runs, task, method, other, measure, profile) for profile in ("paper", "quick")}
    if found["paper"].ratio.count >= LEAST_SEEDS:
        return found["paper"]
    hint = f" The quick profile decides nothing, but shows: {found['quick']}" if found["quick"].ratio.count > 1 else ""
    raise Missing(
        f"Fewer than {LEAST_SEEDS} seeds of {method} and {other} on {task} in the paper profile.{hint}",
        f"python -m experiments run {task} --method {other} {method} --seeds 0:20 --profile paper",
    )


def comparison_text(runs: Sequence[Run], task: str, method: str, other: str, measure: Measure, **changed: Any) -> str:
    """A comparison as a sentence, for runs with these settings changed; empty if there are no pairs."""
    found = pair(runs, task, method, other, measure, "paper", **changed)
    return f" {found}" if found.ratio.count > 1 else ""


def pair(
    runs: Sequence[Run], task: str, method: str, other: str, measure: Measure, profile: str, **changed: Any
) -> Comparison:
    """Two methods in a profile, over their common seeds."""
    ours, theirs = (as_it_is(runs, task, name, profile, **changed) for name in (method, other))
    change = "".join(f" with {name}={value}" for name, value in changed.items())
    return compare(f"{method} to {other} on {task}{change}", ours, theirs, measure)


def as_it_is(runs: Sequence[Run], task: str, method: str, profile: str = "paper", **changed: Any) -> BySeed:
    """The runs of a profile, with exactly these settings changed."""
    chosen = select(runs, task, method)
    return by_seed([run for run in chosen if run.config["profile"] == profile and run.config["overrides"] == changed])


def control(runs: Sequence[Run], task: str, method: str, measure: Measure) -> str:
    """A sentence about the base at the learning rate that is equivalent to the method."""
    full = all(setting(run, "relaxation") == 1 for run in as_it_is(runs, task, method).values())
    # Anderson with full jumps has the speed of the base: what remains is that of the average.
    other = "matched-average" if method == BOTH and full else f"matched-{method}"
    return explain(pair(runs, task, method, other, measure, "paper"))


def explain(against: Comparison) -> str:
    """The conclusion from a comparison with a control, in words."""
    if against.ratio.count < LEAST_SEEDS:
        return "The control (base at the equivalent learning rate) was not run or does not differ from base."
    if against.ratio.below(1):
        return f"{against} So it is better than that control."
    shown_to_be = "not better" if against.ratio.below(1) is False else "not shown to be better"
    return f"{against} So it is {shown_to_be} than that control: the learning rate alone may explain the effect."


def shown(estimate: Interval) -> str:
    """An interval as in the tables."""
    return f"{estimate.mean:.3g} ({estimate.low:.3g} to {estimate.high:.3g}, {estimate.count} seeds)"


def trend_figure(title: str, x_label: str, y_label: str, **lines: tuple[list[float], list[float]]) -> Curve:
    """A figure with both axes logarithmic."""
    return Curve(title, x_label, y_label, True, True, lines)
