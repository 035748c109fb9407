"""The statistics of a comparison over seeds: pure functions of numbers.

Everything is at 95 % confidence and over seeds. Positive quantities, as errors and times are, are compared by their
ratio: its logarithm is what a t interval suits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval; one value alone has no interval, none has no mean either."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def below(self, limit: float) -> bool | None:
        """Whether the quantity is below the limit; None where the interval allows both."""
        return True if self.high < limit else False if self.low >= limit else None

    def above(self, limit: float) -> bool | None:
        """Whether it is above the limit; None where the interval allows both."""
        return True if self.low > limit else False if self.high <= limit else None

    def within(self, low: float, high: float) -> bool | None:
        """Whether it is between the two, these included; None where the interval allows both."""
        inside = low <= self.low and self.high <= high
        return True if inside else False if self.high < low or self.low > high else None


@dataclass(frozen=True)
class Paired:
    """One method against another, seed by seed; lower is better."""

    estimate: Interval
    """Interval of the ratio (mean of its logarithm) if all values are positive, otherwise of the difference."""
    is_ratio: bool
    better: int
    """Number of seeds on which it ended lower; a diverged run counts as higher than one that did not diverge."""
    worse: int
    diverged: int
    """Number of its diverged runs; they and their partners are not part of the estimate."""
    others_diverged: int
    p_value: float
    """p-value of the two-sided Wilcoxon signed-rank test, on pairs without a diverged run."""


def quantile(count: ArrayLike) -> Floats:
    """Student's t for the interval of a mean over ``count`` values; NaN below two."""
    freedom = np.asarray(count, dtype=float) - 1
    return np.where(freedom > 0, stats.t.ppf((1 + CONFIDENCE) / 2, np.maximum(freedom, 1)), nan)


def interval(values: ArrayLike) -> Interval:
    """Mean and t interval of the finite values.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.484..., high=4.484..., count=3)
    """
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return Interval(nan, nan, nan, 0)
    mean, half = float(finite.mean()), nan
    if finite.size > 1:
        half = float(quantile(finite.size) * finite.std(ddof=1) / np.sqrt(finite.size))
    return Interval(mean, mean - half, mean + half, finite.size)


def geometric_interval(values: ArrayLike) -> Interval:
    """Geometric mean and interval of positive values.

    >>> round(geometric_interval([1.0, 4.0]).mean, 12)
    2.0
    """
    logs = interval(np.log(np.asarray(values, dtype=float)))
    mean, low, high = np.exp([logs.mean, logs.low, logs.high]).tolist()
    return Interval(mean, low, high, logs.count)


def geometric_mean(values: ArrayLike) -> float:
    """The geometric mean of positive values; infinite if one is, NaN if there is none.

    >>> geometric_mean([1.0, 4.0]), geometric_mean([1.0, inf])
    (2.0, inf)
    """
    logs = np.log(np.asarray(values, dtype=float))
    return float(np.exp(logs.mean())) if logs.size else nan


def median(values: ArrayLike) -> float:
    """The median; infinite where half of the values or more are, NaN if there is none.

    >>> median([3, inf, 1]), median([3, inf])
    (3.0, inf)
    """
    array = np.asarray(values, dtype=float)
    return float(np.median(array)) if array.size else nan


def band(values: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Mean and both ends of the interval at each point; ``values`` has a row for each seed, NaN where there is none.

    For positive values the low end is positive too: otherwise it is replaced by the smallest value. (An error cannot
    be negative, and on a logarithmic axis such a band would have no lower edge.)
    """
    values = np.atleast_2d(np.asarray(values, dtype=float))
    known = np.isfinite(values)
    count = known.sum(axis=0)
    filled = np.where(known, values, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(count > 0, filled.sum(axis=0) / count, nan)
        variance = np.where(known, (filled - mean) ** 2, 0.0).sum(axis=0) / np.maximum(count - 1, 1)
        half = quantile(count) * np.sqrt(variance / count)
    smallest = np.where(known, values, np.inf).min(axis=0)
    low = mean - half
    return mean, np.where((low <= 0) & (smallest > 0), smallest, low), mean + half


def paired(values: Sequence[float], others: Sequence[float]) -> Paired:
    """Compare two methods over their common seeds; NaN stands for a run that diverged.

    >>> paired([1.0, 2.0], [2.0, 4.0]).estimate.mean
    0.5
    """
    ours, theirs = np.asarray(values, dtype=float), np.asarray(others, dtype=float)
    lost, others_lost = ~np.isfinite(ours), ~np.isfinite(theirs)
    both = ~lost & ~others_lost
    better = int((ours[both] < theirs[both]).sum() + (~lost & others_lost).sum())
    worse = int((ours[both] > theirs[both]).sum() + (lost & ~others_lost).sum())
    ours, theirs = ours[both], theirs[both]
    is_ratio = bool(np.all(ours > 0) and np.all(theirs > 0))
    differences = np.log(ours) - np.log(theirs) if is_ratio else ours - theirs
    estimate = geometric_interval(ours / theirs) if is_ratio else interval(differences)
    return Paired(estimate, is_ratio, better, worse, int(lost.sum()), int(others_lost.sum()), signed_rank(differences))


def signed_rank(differences: ArrayLike) -> float:
    """The p-value of Wilcoxon's test; 1 where nothing differs, NaN below two pairs.

    >>> signed_rank([1.0, 2.0, 3.0, 4.0, 5.0])
    0.0625
    """
    differences = np.asarray(differences, dtype=float)
    nonzero = differences[differences != 0]
    if differences.size < 2:
        return nan
    return float(stats.wilcoxon(nonzero).pvalue) if nonzero.size else 1.0


def value_at(positions: ArrayLike, values: ArrayLike, limit: float) -> float:
    """The value at a limit of steps or seconds: the last one at or before it, NaN if there is none.

    >>> value_at([10, 20, 30], [3.0, 2.0, 1.0], limit=25)
    2.0
    """
    index = int(np.searchsorted(np.asarray(positions), limit, side="right")) - 1
    return float(np.asarray(values)[index]) if index >= 0 else nan


def reached_at(positions: ArrayLike, values: ArrayLike, target: float) -> float:
    """The step or the time of the first value that is not above the target; infinite if there is none.

    >>> reached_at([10, 20, 30], [3.0, 2.0, 1.0], 2.5), reached_at([10], [3.0], 2.5)
    (20.0, inf)
    """
    there = np.asarray(values, dtype=float) <= target
    return float(np.asarray(positions)[there.argmax()]) if there.any() else inf


def profile(costs: Mapping[str, Mapping[Any, float]]) -> dict[str, tuple[list[float], list[float]]]:
    """Dolan and Moré's performance profile of each method: factors, and the share of problems solved within each.

    ``costs`` has the cost or time of each method on each problem, infinite where it did not solve it.

    >>> profile({"a": {("t", 0): 1.0, ("t", 1): 6.0}, "b": {("t", 0): 4.0, ("t", 1): 3.0}})["a"]
    ([1.0, 2.0], [0.5, 1.0])
    """
    least = {problem: min(other.get(problem, inf) for other in costs.values())
             for own in costs.values() for problem in own}  # fmt: skip
    found = {}
    for method, own in costs.items():
        factors = sorted(cost / least[problem] for problem, cost in own.items() if cost < inf)
        found[method] = factors, [place / len(own) for place in range(1, len(factors) + 1)]
    return found


def on_grid(positions: ArrayLike, values: ArrayLike, grid: ArrayLike) -> Floats:
    """A run's values at common positions: interpolated, NaN before its first one, held after its last.

    >>> on_grid([10, 20], [1.0, 3.0], [5, 15, 25])
    array([nan,  2.,  3.])
    """
    return np.interp(np.asarray(grid, dtype=float), np.asarray(positions, dtype=float), np.asarray(values), left=nan)


def thinned(positions: ArrayLike, most: int) -> Floats:
    """At most ``count`` of the positions, evenly spaced, including both ends.

    >>> thinned([1, 2, 3, 4, 5, 6, 7], 3)
    array([1., 4., 7.])
    """
    positions = np.unique(np.asarray(positions, dtype=float))
    if positions.size <= most:
        return positions
    return positions[np.linspace(0, positions.size - 1, most).round().astype(int)]
