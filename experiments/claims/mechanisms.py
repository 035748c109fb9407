"""The paper's further claims, about why and when its method works, judged by the short runs of ``studies.py``."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import inf, isfinite

import numpy as np

from ..comparison import settings_without
from ..results import Run
from ..statistics import geometric_interval
from . import evidence as ev
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
    groups = ev.studied(runs, "batch-size", TASK, "base", "batch_size")
    found = ev.studied_trend(groups, AMPLITUDE.value, "batch-size")
    sizes, first = np.array(found.line[0]), found.line[1][0]
    figure = ev.trend_figure(
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
    groups = ev.studied(runs, "batch-size", TASK, "base", "batch_size")
    found = ev.studied_trend(groups, AMPLITUDE.value, "batch-size")
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
    groups = ev.studied(runs, "batch-size", TASK, "anderson", "batch_size")
    bases = {size: ev.by_seed(ev.alike(runs, "base", found)) for size, found in groups.items()}
    both = {size: ev.shared(found, bases[size]) for size, found in groups.items()}
    found = ev.studied_trend(both, lambda run: ratio_to(bases, run), "batch-size")
    largest = list(found.points.values())[-1]
    figure = ev.trend_figure(
        "Gain against batch size", "batch size", "training loss, Anderson to base", ratio=found.line
    )
    numbers = f"Ratio of late training loss {found} With the largest batch {ev.shown(largest)}."
    return Finding(ev.every([found.slope.below(0), largest.below(1)]), numbers, figure)


def ratio_to(bases: dict[int, ev.BySeed], run: Run) -> float:
    """Late training loss relative to base with the same batch size and seed; infinite if it diverged."""
    ours, theirs = TRAINING_LOSS.value(run), TRAINING_LOSS.value(bases[ev.setting(run, "batch_size")][run.seed])
    if isfinite(theirs):
        return ours / theirs
    return 1 / ev.PENALTY if isfinite(ours) else inf


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
    groups = ev.studied(with_full_jumps(runs, False), "collinearity", TASK, "anderson", name)
    found = ev.studied_trend(groups, CONDITION.value, "collinearity")
    figure = ev.trend_figure(f"Co-linearity against {name}", name, "condition number of R", measured=found.line)
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
    groups = ev.studied(with_full_jumps(runs, True), "stability", TASK, "anderson", "period")
    found = ev.studied_trend(groups, FINAL.value, "stability")
    base = ev.alike(runs, "base", next(iter(groups.values())))
    ends = [final(run) for run in base if not run.diverged]
    base_text = f" Base ends at {ev.shown(geometric_interval(ends))}." if len(ends) > 1 else ""
    figure = ev.trend_figure("Where it ends against the period", "period", "final validation MSE", measured=found.line)
    return Finding(found.slope.below(0), f"Final validation MSE {found}{base_text}", figure)


def with_full_jumps(runs: Sequence[Run], full: bool) -> list[Run]:
    """The runs with relaxation 1, which can blow up, or those with less."""
    return [run for run in runs if (ev.setting(run, "relaxation") == 1) == full]


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
        raise ev.from_study("stability", "No runs of anderson with safeguard=residual and of base.")
    largest = partial(max, key=lambda comparison: comparison.ratio.mean)
    harmed = [comparison for comparison in found if comparison.ratio.low > 1 and comparison.ratio.mean > HARM]
    texts = [f"Harm in {len(harmed)} of {len(found)} settings. The worst: {largest(found)}"]
    if unguarded := guarded(runs, None):
        texts.append(f"The worst without a safeguard: {largest(unguarded)}")
    harmless = ev.every(comparison.ratio.below(HARM) for comparison in found)
    return Finding(False if harmed else harmless, " ".join(texts))


def guarded(runs: Sequence[Run], safeguard: str | None) -> list[ev.Comparison]:
    """Anderson with this safeguard against base, for each setting with enough runs of both."""
    families: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        is_anderson = run.config["method"] == "anderson" and run.config["profile"] == "paper"
        if is_anderson and METRIC in run.summary["final"] and ev.setting(run, "safeguard") == safeguard:
            families[run.task + settings_without(run, ())].append(run)
    found = []
    for family in map(ev.by_seed, families.values()):
        one, base = next(iter(family.values())), ev.by_seed(ev.alike(runs, "base", family))
        found.append(ev.compare(f"{one.variant} to base on {one.task}", family, base, FINAL))
    return [comparison for comparison in found if comparison.ratio.count >= ev.LEAST_SEEDS]


@CLAIMS.claim(
    "period: infinite is the base",
    "Section Anderson acceleration",
    "Letting p go to infinity gives the original stochastic optimization.",
)
def infinite_period(runs: Sequence[Run]) -> Finding:
    """Reproduced if Anderson with a period and a store_period longer than the run ends with bitwise the same metrics as
    base on each seed.
    """
    never = [run for run in ev.select(runs, TASK, "anderson") if longer_than_run(run)]
    base = ev.by_seed(ev.select(ev.same_problem(runs, never[0]), TASK, "base")) if never else {}
    both = ev.shared(ev.by_seed(ev.same_problem(never, never[0])), base) if never else {}
    if not both:
        raise ev.from_study("limit", "No runs of anderson with a period longer than the run, and of base.")
    same = sum(run.summary["final"] == base[seed].summary["final"] for seed, run in both.items())
    return Finding(same == len(both), f"{same} of {len(both)} seeds end with the same metrics.")


def longer_than_run(run: Run) -> bool:
    """Whether it never stores or accelerates."""
    settings = run.config["settings"]
    return bool(min(settings["period"], settings["store_period"]) > settings["steps"])
