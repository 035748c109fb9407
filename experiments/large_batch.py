"""The paper's large-batch experiment at small scale: a growing batch, a proportional learning rate, the same epochs.

The loss due to a large batch is measured by the validation error of the base. The question is whether Anderson and the
average recover a part of it, and whether the base at the equivalent learning rate does as well.
"""

from collections.abc import Iterator, Sequence
from math import nan
from typing import Any

import pandas as pd

from . import statistics as st
from .claims.evidence import LEAST_SEEDS, setting, shown
from .claims.verdict import Claim, Finding, Missing
from .data import MissingData, load_cifar10
from .results import Run
from .screen import BadInput
from .studies import Part, Study
from .tables import framed

BASE, BOTH, CONTROL = "base", "anderson+average", "matched-anderson+average"
COMPARED = (BASE, "average", "anderson", BOTH, CONTROL)
SMALL: dict[str, Any] = {
    "training_images": 2048, "validation_images": 4000, "shrink": 2, "width": 16, "depth": 1, "epochs": 40,
    "learning_rate": 0.1,
}  # fmt: skip
"""A ResNet of 8 layers on photographs of 16 x 16 pixels: half a minute per run on one core."""
PARTS = (
    Part(COMPARED, SMALL | {"augment": False}, {"batch_size": (32, 128, 512)}, "cifar10"),
    Part(COMPARED, SMALL | {"augment": True}, {"batch_size": (32, 512)}, "cifar10"),
)
"""Without augmentation, networks trained in small batches memorise the training images, and the gap is wide. With it,
as in the paper, none does, and a large batch with its few steps is worse on both kinds of images."""
MEASURES = {
    "validation_error": "validation error",
    "validation_loss": "validation loss",
    "training_error": "training error",
    "training_loss": "training loss",
    "gap": "generalisation gap",
}
"""At the end of a run. The gap is the validation loss minus the training loss."""
KEYS = ["augment", "batch_size", "method", "seed"]


def study(seeds: Sequence[int]) -> Study:
    """All runs on these seeds."""
    return Study("A growing batch with a proportional learning rate, with and without Anderson.", PARTS, seeds)


def check_data() -> None:
    """Report missing data once, before every run does."""
    try:
        load_cifar10()
    except MissingData as problem:
        raise BadInput(str(problem)) from problem


def ends(runs: Sequence[Run]) -> pd.DataFrame:
    """How each run ended, by augmentation, batch, method and seed."""
    return pd.DataFrame([end(run) for run in runs]).set_index(KEYS).sort_index()


def end(run: Run) -> dict[str, Any]:
    """How one run ended; a run that diverged has no numbers."""
    final = {name: nan if value is None else value for name, value in run.summary["final"].items()}
    row = {"augment": setting(run, "augment"), "batch_size": setting(run, "batch_size")}
    row |= {"method": run.config["method"], "seed": run.seed}
    row |= {name: run.summary[name] for name in ("status", "steps", "cpu_seconds")}
    return row | final | {"gap": final["validation_loss"] - final["training_loss"]}


def by_seed(found: pd.DataFrame, augment: bool, batch: int, method: str) -> pd.DataFrame:
    """The ends of the runs of one kind; may be empty."""
    return found[(found.index.droplevel("seed") == (augment, batch, method))].droplevel(KEYS[:3])


def difference(ours: pd.DataFrame, others: pd.DataFrame, measure: str) -> st.Interval:
    """How much lower ours is than the others, over their common seeds."""
    return st.interval((others[measure] - ours[measure]).dropna())


def comparison(found: pd.DataFrame) -> pd.DataFrame:
    """A row for each augmentation, batch and method: means with intervals, and differences from the base."""
    return framed(row for part in PARTS for row in _rows(found, part))


def _rows(found: pd.DataFrame, part: Part) -> Iterator[dict[str, Any]]:
    for overrides in part.overrides():
        augment, batch = overrides["augment"], overrides["batch_size"]
        base = by_seed(found, augment, batch, BASE)
        for method in part.methods:
            ours = by_seed(found, augment, batch, method)
            if len(ours):
                row = {"augment": augment, "batch_size": batch, "method": method, "seeds": len(ours)}
                yield row | _measured(ours, base)


def _measured(ours: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any]:
    row: dict[str, Any] = {"diverged": int(ours["gap"].isna().sum())}
    for name in MEASURES:
        row |= {name: st.interval(ours[name]), f"{name}_less": difference(ours, base, name)}
    ratio = (ours["cpu_seconds"] / base["cpu_seconds"]).dropna()
    return row | {"time_ratio": st.geometric_interval(ratio)}


# The paper's claim


def recovered(runs: Sequence[Run], method: str) -> tuple[st.Interval, str]:
    """The part of the base's loss of validation error at the largest batch that a method recovers; also in words.

    Raises ``Missing`` if the loss is not significant.
    """
    found = ends(runs)
    augment, batches = found.index[0][0], sorted(set(found.index.get_level_values("batch_size")))
    small, large = (by_seed(found, augment, batch, BASE) for batch in (batches[0], batches[-1]))
    lost = difference(small, large, "validation_error")
    if lost.count < LEAST_SEEDS:
        raise Missing(f"Fewer than {LEAST_SEEDS} seeds of the base.", "python -m experiments large-batch")
    text = f"Increase of the base's validation error from batch {batches[0]} to {batches[-1]}: {shown(lost)}."
    if not lost.above(0):
        raise Missing(f"{text} The larger batch is not significantly worse, so there is no gap to close.")
    ours, control = (by_seed(found, augment, batches[-1], name) for name in (method, CONTROL))
    back, of_control = (difference(each, large, "validation_error") for each in (ours, control))
    to_control = difference(ours, control, "validation_error")
    text += f" {method} recovers {shown(back)}; the control (base at the learning rate of both) {shown(of_control)}"
    return back, f"{text}; {method} is lower than the control by {shown(to_control)}."


def average_recovers(runs: Sequence[Run]) -> Finding:
    """Reproduced if, with the largest batch, Anderson with average has a lower validation error than the base: the
    interval of what it recovers lies above 0.
    """
    back, text = recovered(runs, BOTH)
    return Finding(back.above(0), text)


def anderson_does_not(runs: Sequence[Run]) -> Finding:
    """Reproduced if, with the largest batch, the interval of what Anderson alone recovers ends at or below 0, refuted
    if it lies above.
    """
    back, text = recovered(runs, "anderson")
    better = back.above(0)
    return Finding(None if better is None else not better, text)


SOURCE = "Figure 4 and its text"
CLAIMS = (
    Claim("large batch: Anderson", SOURCE, "Anderson alone does not close the generalisation gap.", anderson_does_not),
    Claim("large batch: average", SOURCE, "With the average a part of the gap is closed.", average_recovers),
)
