"""Measures of a run: positive numbers, infinite for a run that diverged."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
import pandas as pd

from ..results import Run
from .verdict import Missing

METRIC = "validation_mse"
"""The metric of the paper; a task may compare methods by another one."""
TAIL = 0.2
"""Share of a run: its oscillations are measured in the last part of this length, its time after the first."""
MEDIAN_WINDOW = 21
"""Number of evaluations; slower changes do not count as oscillations."""
LEAST_AMPLITUDE = 1e-6
"""Smaller amplitudes are rounding errors of weights in float32."""
CONDITION_LIMIT = float(np.finfo(float).eps ** -0.5)
"""Larger condition numbers cannot be computed from a Gram matrix in float64."""


@dataclass(frozen=True)
class Measure:
    """A positive quantity that is computed from a run; infinite if the run diverged."""

    label: str
    value: Callable[[Run], float]


def final(run: Run, metric: str = METRIC) -> float:
    """The validation MSE, or another metric, at the end."""
    if metric not in run.summary["final"]:
        raise Missing(f"{run.folder} has no {metric}.")
    return inf if run.diverged else float(run.summary["final"][metric])


def evaluated(run: Run) -> pd.Series:
    """The validation MSE by step."""
    if METRIC not in run.steps:
        raise Missing(f"{run.folder} has no {METRIC}.")
    return run.steps.set_index("step")[METRIC].dropna()


def amplitude(run: Run) -> float:
    """Standard deviation of log validation MSE around its running median, in the last fifth of the run."""
    if run.diverged:
        return inf
    logs = np.log(evaluated(run).clip(lower=np.finfo(float).tiny))
    around = logs - logs.rolling(MEDIAN_WINDOW, center=True, min_periods=1).median()
    late = around[around.index > (1 - TAIL) * run.summary["steps"]]
    if len(late) < 2:
        raise Missing(f"{run.folder} has fewer than two evaluations in the last fifth of the run.")
    return max(float(late.std()), LEAST_AMPLITUDE)


def training_loss(run: Run) -> float:
    """The median loss of the batches in the last fifth of the run."""
    return inf if run.diverged else float(run.steps["loss"].iloc[-int(TAIL * len(run.steps)) :].median())


def seconds_per_step(run: Run) -> float:
    """CPU time of a step, without the first fifth, in which the process warms up and the history fills."""
    later = run.steps[run.steps["step"] >= TAIL * run.summary["steps"]]
    spent = later["cpu_seconds"].iloc[-1] - later["cpu_seconds"].iloc[0]
    return float(spent / max(later["step"].iloc[-1] - later["step"].iloc[0], 1))


def condition(run: Run) -> float:
    """Median condition number of R with columns scaled to length 1, capped at ``CONDITION_LIMIT``."""
    if "condition_number" not in run.summary["stats"]:
        raise Missing(f"{run.folder} has no condition number.")
    return min(run.summary["stats"]["condition_number"] or CONDITION_LIMIT, CONDITION_LIMIT)


def averaged_share(run: Run) -> float:
    """Share of the steps after which the weights were replaced by their mean; at least one step is counted."""
    if "averaged" not in run.summary["stats"]:
        raise Missing(f"{run.folder} does not say how often it averaged.")
    return float(max(run.summary["stats"]["averaged"], 1) / run.summary["steps"])


FINAL = Measure("final validation MSE", final)
RELATIVE_L2 = Measure("final relative L2 error", partial(final, metric="relative_l2"))
AMPLITUDE = Measure("late oscillation of the validation MSE", amplitude)
TRAINING_LOSS = Measure("late training loss", training_loss)
SECONDS = Measure("CPU time of a step", seconds_per_step)
CONDITION = Measure("condition number of R", condition)
AVERAGED = Measure("share of averaged steps", averaged_share)
