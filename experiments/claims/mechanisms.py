"""The paper's further claims, about why and when its method works, judged by the short runs of ``studies.py``."""

from collections import defaultdict
from collections.abc import Sequence
from math import inf, isfinite

import numpy as np

from ..comparison import settings_without
from ..results import Run
from ..statistics import geometric_interval
from .evidence import (
    LEAST_SEEDS,
    PENALTY,
    BySeed,
    Comparison,
    alike,
    by_seed,
    compare,
    every,
    from_study,
    same_problem,
    select,
    setting,
    shared,
    shown,
    studied,
    studied_trend,
    trend_figure,
)
from .measures import AMPLITUDE, CONDITION, FINAL, METRIC, TRAINING_LOSS, final
from .verdict import Claims, Finding

TASK = "admissions"
HARM = 1.25
"""Ratio to base above which a method does harm."""
CLAIMS = Claims()


@CLAIMS.claim("batch size: oscillations fall", "Abstract", "Stochastic oscillations are smaller with larger batches.")
def oscillations_fall(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the late oscillation of base against the batch size, at the same learning rate and
    number of steps, has an interval below 0.
    """
    groups = studied(runs, "batch-size", TASK, "base", "batch_size")
    found = studied_trend(groups, AMPLITUDE.value, "batch-size")
    sizes, first = np.array(found.line[0]), found.line[1][0]
    figure = trend_figure(
        "Oscillation against batch size",
        "batch size",
        "standard deviation of log validation MSE",
        measured=found.line,
        inverse=(sizes.tolist(), (first * sizes[0] / sizes).tolist()),
        inverse_square_root=(sizes.tolist(), (first * np.sqrt(sizes[0] / sizes)).tolist()),
    )
    return Finding(found.slope.below(0), f"Oscillation {found}", figure)


@CLAIMS.claim(
    "batch size: inversely proportional",
    "Abstract",
    "The amplitude of the oscillations is roughly inversely proportional to the size of the batch.",
)
def inversely_proportional(runs: Sequence[Run]) -> Finding:
    """Reproduced if the interval of that exponent lies within -1.25 to -0.75: nearer to -1 than to -1/2, the exponent
    of the standard deviation of a mean over independent samples. (The exponent is that of the validation MSE. Near a
    minimum the MSE varies with the square of an oscillation of the weights, which then has half the exponent.)
    """
    groups = studied(runs, "batch-size", TASK, "base", "batch_size")
    found = studied_trend(groups, AMPLITUDE.value, "batch-size")
    return Finding(found.slope.within(-1.25, -0.75), f"Oscillation {found}")


@CLAIMS.claim(
    "batch size: noise hinders Anderson",
    "Abstract and introduction",
    "The oscillations reduce and occasionally eliminate the positive effect of AA.",
)
def noise_hinders(runs: Sequence[Run]) -> Finding:
    """Reproduced if the ratio of late training loss, Anderson to base, falls with the batch size (exponent with an
    interval below 0) and is below 1 with the largest batch.
    """
    groups = studied(runs, "batch-size", TASK, "anderson", "batch_size")
    bases = {size: by_seed(alike(runs, "base", found)) for size, found in groups.items()}
    both = {size: shared(found, bases[size]) for size, found in groups.items()}
    found = studied_trend(both, lambda run: ratio_to(bases, run), "batch-size")
    largest = list(found.points.values())[-1]
    figure = trend_figure("Gain against batch size", "batch size", "training loss, Anderson to base", ratio=found.line)
    numbers = f"Ratio of late training loss {found} With the largest batch {shown(largest)}."
    return Finding(every([found.slope.below(0), largest.below(1)]), numbers, figure)


def ratio_to(bases: dict[int, BySeed], run: Run) -> float:
    """Late training loss relative to base with the same batch size and seed; infinite if it diverged."""
    ours, theirs = TRAINING_LOSS.value(run), TRAINING_LOSS.value(bases[setting(run, "batch_size")][run.seed])
    if isfinite(theirs):
        return ours / theirs
    return 1 / PENALTY if isfinite(ours) else inf


@CLAIMS.claim(
    "collinearity: period",
    "Sections Introduction and Anderson acceleration",
    "Accelerating less often (larger p) reduces the co-linearity of the columns of R.",
)
def collinearity_period(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the median condition number of R against the period, at the same store_period, has
    an interval below 0.
    """
    return collinearity(runs, "period")


@CLAIMS.claim(
    "collinearity: store period",
    "Section Anderson acceleration",
    "Storing less often (larger q) has the same effect.",
)
def collinearity_store_period(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the median condition number of R against the store_period, at the same period, has
    an interval below 0.
    """
    return collinearity(runs, "store_period")


def collinearity(runs: Sequence[Run], name: str) -> Finding:
    """How the condition number depends on a setting."""
    groups = studied(with_full_jumps(runs, False), "collinearity", TASK, "anderson", name)
    found = studied_trend(groups, CONDITION.value, "collinearity")
    figure = trend_figure(f"Co-linearity against {name}", name, "condition number of R", measured=found.line)
    return Finding(found.slope.below(0), f"Condition number {found}", figure)


@CLAIMS.claim(
    "period: less often is more stable",
    "Sections Introduction and Anderson acceleration",
    "AA at each iteration may become unstable; Alternating Anderson (larger p) is more effective.",
)
def less_often(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the final validation MSE against the period, at relaxation 1, has an interval below
    0.
    """
    groups = studied(with_full_jumps(runs, True), "stability", TASK, "anderson", "period")
    found = studied_trend(groups, FINAL.value, "stability")
    base = by_seed(alike(runs, "base", next(iter(groups.values()))))
    figure = trend_figure("Where it ends against the period", "period", "final validation MSE", measured=found.line)
    return Finding(found.slope.below(0), f"Final validation MSE {found} {beside_base(base)}".strip(), figure)


def with_full_jumps(runs: Sequence[Run], full: bool) -> list[Run]:
    """The runs with relaxation 1, which can blow up, or those with less."""
    return [run for run in runs if (setting(run, "relaxation") == 1) == full]


def beside_base(base: BySeed) -> str:
    """A sentence on where base ends on the same problem."""
    ends = [final(run) for run in base.values() if not run.diverged]
    return f"Base ends at {shown(geometric_interval(ends))}." if len(ends) > 1 else ""


@CLAIMS.claim(
    "safeguard: does no harm",
    "Section Safeguarding",
    "The safeguard ensures that the acceleration does not harm the training.",
)
def safeguard_harmless(runs: Sequence[Run]) -> Finding:
    """Judged on each setting of the paper profile, or changed from it, in which both Anderson with
    safeguard="residual" and base were run on three seeds or more. Reproduced if in each the interval of the ratio of
    final validation MSE lies below 1.25; refuted if one shows harm, an interval above 1 with a mean above 1.25.
    """
    found = guarded(runs, "residual")
    if not found:
        raise from_study("stability", "No runs of anderson with safeguard=residual and of base.")
    harmed = [comparison for comparison in found if comparison.ratio.low > 1 and comparison.ratio.mean > HARM]
    texts = [f"Harm in {len(harmed)} of {len(found)} settings. The worst: {worst(found)}"]
    if unguarded := guarded(runs, None):
        texts.append(f"The worst without a safeguard: {worst(unguarded)}")
    harmless = every(comparison.ratio.below(HARM) for comparison in found)
    return Finding(False if harmed else harmless, " ".join(texts))


def worst(found: Sequence[Comparison]) -> Comparison:
    """The one with the largest ratio."""
    return max(found, key=lambda comparison: comparison.ratio.mean)


def guarded(runs: Sequence[Run], safeguard: str | None) -> list[Comparison]:
    """Anderson with this safeguard against base, for each setting with enough runs of both."""
    families: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if is_guarded(run, safeguard):
            families[run.task + settings_without(run, ())].append(run)
    found = [against_base(runs, by_seed(family)) for family in families.values()]
    return [comparison for comparison in found if comparison.ratio.count >= LEAST_SEEDS]


def is_guarded(run: Run, safeguard: str | None) -> bool:
    """Whether it is a run of Anderson with this safeguard."""
    is_anderson = run.config["method"] == "anderson" and run.config["profile"] == "paper"
    return is_anderson and METRIC in run.summary["final"] and setting(run, "safeguard") == safeguard


def against_base(runs: Sequence[Run], family: BySeed) -> Comparison:
    """Final MSE of runs with one setting, against base on the same problem."""
    one = next(iter(family.values()))
    return compare(f"{one.variant} to base on {one.task}", family, by_seed(alike(runs, "base", family)), FINAL)


@CLAIMS.claim(
    "period: infinite is the base",
    "Section Anderson acceleration",
    "Letting p go to infinity gives the original stochastic optimization.",
)
def infinite_period(runs: Sequence[Run]) -> Finding:
    """Reproduced if Anderson with a period and a store_period longer than the run ends with bitwise the same metrics as
    base on each seed.
    """
    never = [run for run in select(runs, TASK, "anderson") if longer_than_run(run)]
    base = by_seed(select(same_problem(runs, never[0]), TASK, "base")) if never else {}
    both = shared(by_seed(same_problem(never, never[0])), base) if never else {}
    if not both:
        raise from_study("limit", "No runs of anderson with a period longer than the run, and of base.")
    same = sum(run.summary["final"] == base[seed].summary["final"] for seed, run in both.items())
    return Finding(same == len(both), f"{same} of {len(both)} seeds end with the same metrics.")


def longer_than_run(run: Run) -> bool:
    """Whether it never stores or accelerates."""
    settings = run.config["settings"]
    return bool(min(settings["period"], settings["store_period"]) > settings["steps"])
