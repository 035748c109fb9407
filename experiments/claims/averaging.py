"""The paper's claims about the moving average and its criterion, judged by the short runs of ``studies.py``."""

from collections.abc import Sequence

from ..results import Run
from ..statistics import Interval
from .evidence import (
    LEAST_SEEDS,
    BySeed,
    alike,
    by_seed,
    compare,
    every,
    explain,
    from_study,
    setting,
    shared,
    shown,
    studied,
    studied_trend,
    sweep,
    trend,
    trend_figure,
)
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
    found = [compare(f"average over {t} to base", group, base, AMPLITUDE) for t, group in groups.items()]
    controls = [against_control(runs, t, group) for t, group in groups.items()]
    numbers = " ".join(f"{comparison} {text}" for comparison, text in zip(found, controls, strict=True))
    return Finding(every(comparison.ratio.below(1) for comparison in found), numbers)


def windows(runs: Sequence[Run]) -> tuple[dict[int, BySeed], BySeed]:
    """Runs of the average by its window, and of base on the same problem; raises ``Missing``."""
    groups = studied(runs, "average-window", TASK, "average", "average_window")
    base = by_seed(alike(runs, "base", next(iter(groups.values()))))
    if any(len(group.keys() & base.keys()) < LEAST_SEEDS for group in groups.values()):
        raise from_study("average-window", f"Fewer than {LEAST_SEEDS} seeds of average and base in common.")
    return groups, base


def against_control(runs: Sequence[Run], window: int, group: BySeed) -> str:
    """Average against the base at the equivalent learning rate, by the oscillation."""
    controls = [run for run in alike(runs, "matched-average", group) if setting(run, "average_window") == window]
    return explain(compare(f"average over {window} to matched base", group, by_seed(controls), AMPLITUDE))


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
    plain = {t: compare("", group, base, AMPLITUDE).ratio for t, group in groups.items()}
    ratios = {t: squared(ratio) for t, ratio in plain.items()}
    texts = (
        f"t = {t}: measured {shown(ratio)}, not squared {plain[t].mean:.3g}, formula {variance_ratio(t):.3g}, "
        f"corrected for the same steps in both {walk_variance_ratio(t):.3g}, independent iterates {1 / t:.3g}."
        for t, ratio in ratios.items()
    )
    at = [float(t) for t in ratios]
    figure = trend_figure(
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
    return every(ratio.within(variance_ratio(t) / 2, variance_ratio(t) * 2) for t, ratio in ratios.items())


def squared(ratio: Interval) -> Interval:
    """From a ratio of standard deviations to one of variances."""
    return Interval(ratio.mean**2, ratio.low**2, ratio.high**2, ratio.count)


@CLAIMS.claim("average: larger t, less variance", "Section Moving average", "Increasing t lowers the variance further.")
def window_variance(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the late oscillation against the window has an interval below 0."""
    groups, _ = windows(runs)
    found = studied_trend(groups, AMPLITUDE.value, "average-window")
    own = f"By the paper's formula the ratio rises with t, from {variance_ratio(2):.3g} at 2 towards 1/3."
    figure = trend_figure("Oscillation against the window", "average_window", AMPLITUDE.label, measured=found.line)
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
    groups = {t: shared(group, base) for t, group in groups.items()}
    found = studied_trend(groups, lambda run: steps_to_target(run, base[run.seed]), "average-window")
    controls = sweep(alike(runs, "matched-average", next(iter(groups.values()))), "average_window")
    controls = {t: shared(group, base) for t, group in controls.items()}
    at_matched_rate = trend(controls, lambda run: steps_to_target(run, base[run.seed]))
    lines = {"average": found.line} | ({"matched base": at_matched_rate.line} if at_matched_rate else {})
    figure = trend_figure("Steps to the target against the window", "average_window", "steps", **lines)
    text = f" Base at the equivalent learning rate: {at_matched_rate}" if at_matched_rate else ""
    return Finding(found.slope.above(0), f"Steps {found}{text}", figure)


def steps_to_target(run: Run, base: Run) -> float:
    """Steps until the validation MSE is at most 1.5 times the lowest of base; twice the run's length if never."""
    values = evaluated(run)
    reached = values.index[values <= TARGET * evaluated(base).min()]
    return float(reached[0]) if len(reached) else 2.0 * run.config["settings"]["steps"]


@CLAIMS.claim(
    "criterion: larger epsilon, fewer averages",
    "Section Moving average",
    "Larger values of epsilon reduce the frequency at which the moving average is performed.",
)
def larger_tolerance(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the share of averaged steps against average_tolerance has an interval below 0."""
    groups = studied(runs, "tolerance", TASK, "anderson+average", "average_tolerance")
    found = studied_trend(groups, AVERAGED.value, "tolerance")
    figure = trend_figure("How often it averages", "average_tolerance", "share of steps", measured=found.line)
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
    groups = studied(runs, "tolerance", TASK, "anderson+average", "batch_size")
    smallest, largest = min(groups), max(groups)
    found = compare(f"batches of {largest} to {smallest}", groups[largest], groups[smallest], AVERAGED)
    if found.ratio.count < LEAST_SEEDS:
        raise from_study("tolerance", f"Fewer than {LEAST_SEEDS} seeds in common.")
    shares = (f"{size}: {averaged_mean(groups[size]):.0%}" for size in (smallest, largest))
    return Finding(found.ratio.below(0.5), f"{found} Share of averaged steps by batch size, {', '.join(shares)}.")


def averaged_mean(runs: BySeed) -> float:
    """Mean share of averaged steps."""
    return sum(AVERAGED.value(run) for run in runs.values()) / len(runs)
