"""The claims about the paper's four figures, judged by the runs of the paper profile."""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import pandas as pd

from ..results import Run
from ..statistics import interval
from .evidence import BOTH, as_it_is, comparison_text, control, every, paper_pair, setting, shown
from .measures import AMPLITUDE, FINAL, METRIC, RELATIVE_L2, evaluated
from .verdict import Claims, Curve, Finding, Missing

MARGIN = 1.25
"""A ratio between its inverse and this counts as no difference."""
ORDER_OF_MAGNITUDE = 1 / sqrt(10)
"""Below this a ratio is nearer to a tenth than to one, on a logarithmic scale."""
TASKS = ("admissions", "burgers2d", "burgers100d")
CLAIMS = Claims()


@CLAIMS.claim("admissions: Anderson", "Figure 1 and its text", "Adam with AADL performs similarly to Adam.")
def admissions_anderson(runs: Sequence[Run]) -> Finding:
    """Reproduced if the interval of the ratio of final validation MSE, Anderson to base, lies within 0.80 to 1.25."""
    found = paper_pair(runs, "admissions", "anderson", "base", FINAL)
    numbers = f"{found} {control(runs, 'admissions', 'anderson', FINAL)}"
    return Finding(found.ratio.within(1 / MARGIN, MARGIN), numbers)


@CLAIMS.claim(
    "admissions: average",
    "Figure 1 and its text",
    "With the moving average the final accuracy of AADL is better than Adam's by an order of magnitude.",
)
def admissions_average(runs: Sequence[Run]) -> Finding:
    """Reproduced if the interval of the ratio of final validation MSE, Anderson with average to base, lies below
    0.316: nearer to a tenth than to one.
    """
    found = paper_pair(runs, "admissions", BOTH, "base", FINAL)
    numbers = f"{found} {control(runs, 'admissions', BOTH, FINAL)} {least_squares(runs)}"
    return Finding(found.ratio.below(ORDER_OF_MAGNITUDE), numbers.strip())


def least_squares(runs: Sequence[Run]) -> str:
    """The result of ordinary least squares with the base's final and best values: how much could be gained."""
    base = [run for run in as_it_is(runs, "admissions", "base").values() if not run.diverged]
    lines = [run.summary["references"].get("ordinary least squares", {}).get(METRIC) for run in base]
    known = [(run, line) for run, line in zip(base, lines, strict=True) if line is not None]
    if not known:
        return ""
    line, end, best = (
        np.mean(values)
        for values in zip(*((x, r.summary["final"][METRIC], r.summary["best"][METRIC]) for r, x in known), strict=True)
    )
    return f"Ordinary least squares reaches {line:.3g}; base ends at {end:.3g}, its best is {best:.3g} (means)."


@CLAIMS.claim("burgers2d: Anderson", "Figure 2 and its text", "AADL alone reduces the validation MSE.")
def burgers2d_anderson(runs: Sequence[Run]) -> Finding:
    """Reproduced if the interval of the ratio of final validation MSE, Anderson to base, lies below 1."""
    return lower(runs, "burgers2d", "anderson", "base")


@CLAIMS.claim(
    "burgers2d: average oscillates",
    "Figure 2 and its text",
    "With the moving average the validation MSE rises for a while when a new batch is selected, because old and new "
    "updates are mixed.",
)
def burgers2d_oscillates(runs: Sequence[Run]) -> Finding:
    """Reproduced if, with Anderson and average, the rise in the half batch after a change exceeds the rise in the half
    batch before the next one, and exceeds that of base by the same measure: both intervals above 0. A rise is the
    logarithm of the highest validation MSE over the one at the start, averaged over a run.
    """
    found = paper_pair(runs, "burgers2d", BOTH, "base", FINAL)
    ours, base = (as_it_is(runs, "burgers2d", method) for method in (BOTH, "base"))
    seeds = sorted(ours.keys() & base.keys())
    rises = np.array([[excess_rise(side[seed]) for seed in seeds] for side in (ours, base)])
    own, more = interval(rises[0]), interval(rises[0] - rises[1])
    numbers = (
        f"Rise after a change less rise without one: with average {shown(own)}, base {shown(interval(rises[1]))}, "
        f"difference {shown(more)}. {found}"
    )
    return Finding(every([own.above(0), more.above(0)]), numbers, change_figure({BOTH: ours, "base": base}))


def excess_rise(run: Run) -> float:
    """How much more the MSE rises after a new batch than in the middle of one; NaN for a run without changes."""
    hold, logs = batch_steps(run), np.log(evaluated(run))
    starts = range(hold, int(logs.index.max()) - hold + 1, hold)
    rises = [rise(logs, start, hold // 2) - rise(logs, start + hold // 2, hold // 2) for start in starts]
    return float(np.mean(rises)) if rises else np.nan


def rise(logs: pd.Series, start: int, length: int) -> float:
    """Rise from the last value at the start to the highest within ``length`` steps, as a logarithm."""
    return float(logs[(logs.index > start) & (logs.index <= start + length)].max() - logs[logs.index <= start].iloc[-1])


def batch_steps(run: Run) -> int:
    """Number of steps for which a batch is kept."""
    if not setting(run, "hold"):
        raise Missing(f"{run.folder} has no changes of batch (hold).")
    return int(setting(run, "hold"))


def change_figure(methods: dict[str, dict[int, Run]]) -> Curve:
    """Validation MSE around a change of batch, relative to its value there, averaged over changes and seeds."""
    lines = {}
    for method, runs in methods.items():
        mean = pd.concat([around_changes(run) for run in runs.values()]).groupby(level=0).mean()
        lines[method] = (mean.index.astype(float).tolist(), np.exp(mean).tolist())
    return Curve("Around a change of batch", "steps since the change", "validation MSE, relative", False, False, lines)


def around_changes(run: Run) -> pd.Series:
    """Logarithm of the validation MSE relative to that at the latest change of batch, by steps since then."""
    hold, logs = batch_steps(run), np.log(evaluated(run))
    since = logs.index.to_numpy() % hold
    at_change = logs.where(since == 0).ffill()
    relative = logs - at_change
    relative.index = pd.Index(since)
    return relative.dropna()


@CLAIMS.claim(
    "burgers2d: average better in the end",
    "Figure 2 and its text",
    "AADL with the moving average recovers from the oscillations and improves the final accuracy.",
)
def burgers2d_average(runs: Sequence[Run]) -> Finding:
    """Reproduced if the interval of the ratio of final validation MSE, Anderson with average to base, lies below 1."""
    finding = lower(runs, "burgers2d", BOTH, "base")
    return Finding(finding.holds, finding.numbers + comparison_text(runs, "burgers2d", BOTH, "anderson", FINAL))


@CLAIMS.claim("burgers100d: Anderson", "Figure 3 and its text", "AADL alone does not improve the training.")
def burgers100d_anderson(runs: Sequence[Run]) -> Finding:
    """Reproduced if the interval of the ratio of final validation MSE, Anderson to base, lies above 0.80: any gain is
    smaller than that.
    """
    found = paper_pair(runs, "burgers100d", "anderson", "base", FINAL)
    return Finding(found.ratio.above(1 / MARGIN), f"{found} {zero_predictor(runs)}".strip())


def zero_predictor(runs: Sequence[Run]) -> str:
    """The result of predicting 0: the paper's target is zero to the precision of the network."""
    for run in as_it_is(runs, "burgers100d", "base").values():
        for name, metrics in run.summary["references"].items():
            if "zero" in name and metrics.get(METRIC) is not None:
                return f"The zero predictor has {metrics[METRIC]:.3g}."
    return ""


@CLAIMS.claim(
    "burgers100d: average",
    "Figure 3 and its text",
    "The moving average reduces the oscillations that occur when a new batch is sampled.",
)
def burgers100d_average(runs: Sequence[Run]) -> Finding:
    """Reproduced if the interval of the ratio of late oscillation, Anderson with average to Anderson, lies below 1."""
    found = paper_pair(runs, "burgers100d", BOTH, "anderson", AMPLITUDE)
    to_base = comparison_text(runs, "burgers100d", BOTH, "base", AMPLITUDE)
    return Finding(found.ratio.below(1), f"{found}{to_base} {control(runs, 'burgers100d', BOTH, AMPLITUDE)}")


def lower(runs: Sequence[Run], task: str, method: str, other: str) -> Finding:
    """Whether a method ends lower than another; also the relative L2 error, the paper's activation, the control."""
    found = paper_pair(runs, task, method, other, FINAL)
    error = comparison_text(runs, task, method, other, RELATIVE_L2)
    as_written = comparison_text(runs, task, method, other, FINAL, activation="relu")
    return Finding(found.ratio.below(1), f"{found}{error}{as_written} {control(runs, task, method, FINAL)}")


IMAGENET = (
    "Needs ImageNet-1k and ResNet-50 on 1,536 GPUs for 90 epochs; neither is available here, and one run has no "
    "confidence interval. No smaller run decides it."
)


@CLAIMS.claim(
    "imagenet: Anderson",
    "Figure 4 and its text",
    "On ImageNet-1k with 1,536 GPUs AADL alone takes 10 times as long and does not close the generalisation gap.",
)
def imagenet_anderson(runs: Sequence[Run]) -> Finding:
    """Cannot be tested here."""
    raise Missing(IMAGENET)


@CLAIMS.claim(
    "imagenet: average",
    "Figure 4 and its text",
    "On ImageNet-1k AADL with the moving average closes a part of the generalisation gap.",
)
def imagenet_average(runs: Sequence[Run]) -> Finding:
    """Cannot be tested here."""
    raise Missing(IMAGENET)


@CLAIMS.claim(
    "average: stabilises everywhere",
    "Abstract and conclusions",
    "The moving average has a stabilising effect on AA for all the problems.",
)
def stabilises(runs: Sequence[Run]) -> Finding:
    """Reproduced if on admissions, burgers2d and burgers100d the interval of the ratio of late oscillation, Anderson
    with average to Anderson, lies below 1.
    """
    found = [paper_pair(runs, task, BOTH, "anderson", AMPLITUDE) for task in TASKS]
    controls = (control(runs, task, BOTH, AMPLITUDE) for task in TASKS)
    numbers = " ".join(f"{comparison} {text}" for comparison, text in zip(found, controls, strict=True))
    return Finding(every(comparison.ratio.below(1) for comparison in found), numbers)


@CLAIMS.claim(
    "average: restores the gain",
    "Abstract, introduction and conclusions",
    "AA with the moving average accelerates training where AA alone is not effective.",
)
def restores(runs: Sequence[Run]) -> Finding:
    """Judged on those of admissions, burgers2d and burgers100d where Anderson alone is not shown to end below base
    (interval of the ratio of final validation MSE not below 1): reproduced if Anderson with average is, on each.
    """
    alone = {task: paper_pair(runs, task, "anderson", "base", FINAL) for task in TASKS}
    hard = [task for task in TASKS if not alone[task].ratio.below(1)]
    if not hard:
        raise Missing("Anderson alone is effective on all three tasks: there is nothing to restore.")
    both = [paper_pair(runs, task, BOTH, "base", FINAL) for task in hard]
    pairs = zip(hard, both, strict=True)
    numbers = " ".join(f"{alone[task]} {found} {control(runs, task, BOTH, FINAL)}" for task, found in pairs)
    return Finding(every(found.ratio.below(1) for found in both), numbers)
