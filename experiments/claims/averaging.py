"""The paper's claims about the moving average and its criterion, judged by the short runs of ``studies.py``."""

from collections.abc import Sequence

import numpy as np

from ..results import Run
from ..statistics import Interval, reached_at
from . import evidence as ev
from .measures import AMPLITUDE, AVERAGED, evaluated
from .verdict import Claims, Finding

TASK = "admissions"
TARGET = 1.5
"""The target, in units of the lowest validation MSE of base."""
CLAIMS = Claims()


@CLAIMS.claim(
    "average: lowers the variance", "Section Moving average", "Var of the averaged weights is below Var of the weights."
)
def lowers_variance(runs: Sequence[Run]) -> Finding:
    """The variance of the weights is measured by the late oscillation of the validation MSE. Reproduced if at each
    window the interval of its ratio, average to base, lies below 1.
    """
    groups, base = windows(runs)
    found = [ev.compare(f"average over {t} to base", group, base, AMPLITUDE) for t, group in groups.items()]
    controls = [against_control(runs, t, group) for t, group in groups.items()]
    numbers = " ".join(f"{comparison} {text}" for comparison, text in zip(found, controls, strict=True))
    return Finding(ev.every(comparison.ratio.below(1) for comparison in found), numbers)


def windows(runs: Sequence[Run]) -> tuple[dict[int, ev.BySeed], ev.BySeed]:
    """Runs of the average by its window, and of base on the same problem; raises ``Missing``."""
    groups = ev.studied(runs, "average-window", TASK, "average", "average_window")
    base = ev.by_seed(ev.alike(runs, "base", next(iter(groups.values()))))
    if any(len(group.keys() & base.keys()) < ev.LEAST_SEEDS for group in groups.values()):
        raise ev.from_study("average-window", f"Fewer than {ev.LEAST_SEEDS} seeds of average and base in common.")
    return groups, base


def against_control(runs: Sequence[Run], window: int, group: ev.BySeed) -> str:
    """Average against the base at the equivalent learning rate, by the oscillation."""
    controls = [run for run in ev.alike(runs, "matched-average", group) if ev.setting(run, "average_window") == window]
    return ev.explain(ev.compare(f"average over {window} to matched base", group, ev.by_seed(controls), AMPLITUDE))


def variance_ratio(window: int) -> float:
    """Var of the mean over Var of the iterate by the paper's two formulas, for noise of equal variance.

    >>> [round(variance_ratio(t), 3) for t in (2, 5, 10)]
    [0.125, 0.24, 0.285]
    """
    return (window - 1) * (2 * window - 1) / (6 * window**2)


def walk_variance_ratio(window: int) -> float:
    """This ratio for the noise of the last ``window`` steps in both: the mean weights the i-th latest step by i / t.

    >>> [round(walk_variance_ratio(t), 3) for t in (2, 5, 10)]
    [0.625, 0.44, 0.385]
    """
    return (window + 1) * (2 * window + 1) / (6 * window**2)


@CLAIMS.claim(
    "average: variance formula",
    "Section Moving average, the two equations for Var",
    "The average lowers the variance by the factor that the formula gives.",
)
def variance_formula(runs: Sequence[Run]) -> Finding:
    """The paper's equations give (t-1)(2t-1)/(6t²) for equal noise. Reproduced if at each window the interval of the
    squared ratio of late oscillation, average to base, is within a factor of two of that. (The variance of the weights
    was not measured: the validation MSE varies in proportion to a small oscillation of the weights, and near a minimum
    with its square. Refuted only if the ratio without squaring does not fit either.)
    """
    groups, base = windows(runs)
    plain = {t: ev.compare("", group, base, AMPLITUDE).ratio for t, group in groups.items()}
    # From ratios of standard deviations to those of variances.
    ratios = {t: Interval(r.mean**2, r.low**2, r.high**2, r.count) for t, r in plain.items()}
    texts = (
        f"t = {t}: measured {ev.shown(ratio)}, not squared {plain[t].mean:.3g}, formula {variance_ratio(t):.3g}, "
        f"corrected for the same steps in both {walk_variance_ratio(t):.3g}, independent iterates {1 / t:.3g}."
        for t, ratio in ratios.items()
    )
    at = [float(t) for t in ratios]
    figure = ev.trend_figure(
        "Variance against the window",
        "average_window",
        "variance relative to base",
        measured=(at, [ratio.mean for ratio in ratios.values()]),
        formula=(at, [variance_ratio(t) for t in ratios]),
        corrected=(at, [walk_variance_ratio(t) for t in ratios]),
        independent=(at, [1 / t for t in ratios]),
    )
    fits = fits_formula(ratios)
    holds = None if fits is False and fits_formula(plain) is not False else fits
    return Finding(holds, " ".join(texts), figure)


def fits_formula(ratios: dict[int, Interval]) -> bool | None:
    """Whether the ratio at each window is within a factor of two of the formula's."""
    return ev.every(ratio.within(variance_ratio(t) / 2, variance_ratio(t) * 2) for t, ratio in ratios.items())


@CLAIMS.claim("average: larger t, less variance", "Section Moving average", "Increasing t lowers the variance further.")
def window_variance(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the late oscillation against the window has an interval below 0."""
    groups, _ = windows(runs)
    found = ev.studied_trend(groups, AMPLITUDE.value, "average-window")
    own = f"By the paper's formula the ratio rises with t, from {variance_ratio(2):.3g} at 2 towards 1/3."
    figure = ev.trend_figure("Oscillation against the window", "average_window", AMPLITUDE.label, measured=found.line)
    return Finding(found.slope.below(0), f"Oscillation {found} {own}", figure)


@CLAIMS.claim(
    "average: larger t, slower",
    "Section Moving average",
    "A large t averages over too many updates and slows convergence.",
)
def window_slows(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the steps to the target against the window has an interval above 0. The target is
    1.5 times the lowest validation MSE of base with the same seed; a run that never reaches it counts as twice its
    length.
    """
    groups, base = windows(runs)
    groups = {t: ev.shared(group, base) for t, group in groups.items()}
    found = ev.studied_trend(groups, lambda run: steps_to_target(run, base[run.seed]), "average-window")
    controls = ev.sweep(ev.alike(runs, "matched-average", next(iter(groups.values()))), "average_window")
    controls = {t: ev.shared(group, base) for t, group in controls.items()}
    at_matched_rate = ev.trend(controls, lambda run: steps_to_target(run, base[run.seed]))
    lines = {"average": found.line} | ({"matched base": at_matched_rate.line} if at_matched_rate else {})
    figure = ev.trend_figure("Steps to the target against the window", "average_window", "steps", **lines)
    text = f" Base at the equivalent learning rate: {at_matched_rate}" if at_matched_rate else ""
    return Finding(found.slope.above(0), f"Steps {found}{text}", figure)


def steps_to_target(run: Run, base: Run) -> float:
    """Steps until the validation MSE is at most 1.5 times the lowest of base; twice the run's length if never."""
    values = evaluated(run)
    return min(reached_at(values.index, values, TARGET * evaluated(base).min()), 2.0 * run.config["settings"]["steps"])


@CLAIMS.claim(
    "criterion: larger epsilon, fewer averages",
    "Section Moving average",
    "Larger values of epsilon reduce the frequency at which the moving average is performed.",
)
def larger_tolerance(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the share of averaged steps against average_tolerance has an interval below 0."""
    groups = ev.studied(runs, "tolerance", TASK, "anderson+average", "average_tolerance")
    found = ev.studied_trend(groups, AVERAGED.value, "tolerance")
    figure = ev.trend_figure("How often it averages", "average_tolerance", "share of steps", measured=found.line)
    return Finding(found.slope.below(0), f"Share of averaged steps {found}", figure)


@CLAIMS.claim(
    "criterion: only where needed",
    "Abstract",
    "The criterion assesses automatically whether the moving average is needed.",
)
def only_where_needed(runs: Sequence[Run]) -> Finding:
    """With the whole training set as one batch there is no noise to average. Reproduced if the ratio of the share of
    averaged steps, largest to smallest batch, has an interval below 0.5.
    """
    groups = ev.studied(runs, "tolerance", TASK, "anderson+average", "batch_size")
    smallest, largest = min(groups), max(groups)
    found = ev.compare(f"batches of {largest} to {smallest}", groups[largest], groups[smallest], AVERAGED)
    if found.ratio.count < ev.LEAST_SEEDS:
        raise ev.from_study("tolerance", f"Fewer than {ev.LEAST_SEEDS} seeds in common.")
    means = {size: np.mean([AVERAGED.value(run) for run in groups[size].values()]) for size in (smallest, largest)}
    shares = (f"{size}: {mean:.0%}" for size, mean in means.items())
    return Finding(found.ratio.below(0.5), f"{found} Share of averaged steps by batch size, {', '.join(shares)}.")
