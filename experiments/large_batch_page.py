"""The page of the large-batch study: provenance, figure, a table for each part, and the verdicts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from . import statistics as st
from .claims.evidence import setting
from .figures import STYLES, legend, panels, styled, ticks
from .large_batch import BASE, CLAIMS, COMPARED, CONTROL, MEASURES, SMALL, comparison, ends, study
from .methods import METHODS
from .page import NothingToReport, origin, write_page
from .results import load_runs
from .runner import Spec
from .text import Table, bracketed, plus_minus

PARTS = {False: "Without augmentation", True: "With augmentation (flip and shift)"}
DRAWN = ("validation_error", "validation_loss", "gap")
DODGE = 1.04
"""Neighbouring methods are drawn apart by this factor, so that their intervals do not overlap."""
LOWER = {"validation_error": "error lower than base", "validation_loss": "loss lower than base"}
READING = """\
All methods get the same number of epochs, seeds and images. The learning rate is proportional to the batch size, after
a warm-up at the rate of a batch of 128 or less, and falls to a tenth after 1/3, 2/3 and 8/9 of the run. Numbers are
taken at the end of a run; they are means over seeds with 95 % confidence intervals. The generalisation gap is
validation loss minus training loss, both in evaluation mode on images without augmentation, with BatchNorm statistics
computed at the weights that are evaluated. A gap also closes if the training images are not learnt, so the training
error is listed too. *Lower than base* compares with the base at the same batch size, seed by seed; a negative number
is worse."""


def build_page(results: Path, out: Path) -> tuple[Path, list[str]]:
    """Write page, figure and numbers from existing runs; returns the page, and a message for each damaged run."""
    runs, problems = load_runs(results)
    if not runs:
        raise NothingToReport(f"No completed run below {results}: see `python -m experiments large-batch`.")
    found = ends(runs)
    table = comparison(found)
    planned = len(study(sorted({run.seed for run in runs})).specs())
    parts: list[str | Table] = [
        "# Large batches at small scale",
        about(),
        origin("python -m experiments large-batch", runs, planned),
        READING,
        "![Measures against the batch](large-batch.png)",
    ]
    for augment, rows in table.groupby("augment"):
        parts += [f"## {PARTS[augment]}", method_table(rows)]
        judged = [claim.judge([run for run in runs if setting(run, "augment") == augment]) for claim in CLAIMS]
        parts += [f"**{each.claim} {each.outcome.capitalize()}.** {each.numbers}" for each in judged]
    parts.append("Numbers: [comparison.csv](comparison.csv), and [runs.csv](runs.csv) with one row per run.")
    frames = {"runs": found.reset_index(), "comparison": table}
    return write_page(out, parts, {"large-batch": draw(table)}, frames), problems


def about() -> str:
    """The network, the data and the methods."""
    task, side = Spec("cifar10", CONTROL, 0, overrides=SMALL).resolve(), 32 // SMALL["shrink"]
    return (
        f"A ResNet of {6 * SMALL['depth'] + 2} layers on {SMALL['training_images']:,} training images of CIFAR-10, "
        f"{side} x {side} pixels, {SMALL['epochs']} epochs, validated on {SMALL['validation_images']:,} others. "
        f"Nesterov 0.9, learning rate {SMALL['learning_rate']:g} for a batch of 128. Anderson as in the paper: "
        f"p = {task.period}, q = {task.store_period}, m = {task.history_size}, beta = {task.relaxation:g}, the average "
        f"over t = {task.average_window}. The control, *{METHODS[CONTROL].label}*, is the base at "
        f"{METHODS[CONTROL].speed(task):g} times the learning rate, to which relaxation and average amount if "
        "Anderson's coefficients are near 0."
    )


def method_table(rows: pd.DataFrame) -> Table:
    """Methods at each batch."""
    headers = ["method", "batch", "seeds", *MEASURES.values(), *LOWER.values(), "time / base"]
    cells = []
    for row in rows.to_dict("records"):
        seeds = f"{row['seeds']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else "")
        lower = ["" if row["method"] == BASE else bracketed(interval(row, f"{name}_less")) for name in LOWER]
        measured = [plus_minus(interval(row, name)) for name in MEASURES]
        cells.append([METHODS[row["method"]].label, row["batch_size"], seeds, *measured, *lower, row["time_ratio"]])
    return Table(headers, cells)


def interval(row: Mapping[str, Any], name: str) -> st.Interval:
    """A mean with both ends of its interval, from the columns of a table."""
    return st.Interval(row[name], row[f"{name}_low"], row[f"{name}_high"], row["seeds"])


@styled
def draw(table: pd.DataFrame) -> Figure:
    """A row of panels for each part, a panel for each measure, against the batch; a line for each method."""
    parts = list(table.groupby("augment"))
    figure, all_axes = panels(len(parts) * len(DRAWN), len(DRAWN), (3.2, 2.7), (0, 0.9))
    for place, axes in enumerate(all_axes):
        (augment, rows), measure = parts[place // len(DRAWN)], DRAWN[place % len(DRAWN)]
        for shift, (method, line) in enumerate(rows.groupby("method", sort=False), -(len(COMPARED) // 2)):
            sides = [line[measure] - line[f"{measure}_low"], line[f"{measure}_high"] - line[measure]]
            look = STYLES[method].line | {"marker": "o", "markersize": 3, "capsize": 2, "elinewidth": 0.8}
            label = METHODS[method].label
            axes.errorbar(line["batch_size"] * DODGE**shift, line[measure], sides, label=label, **look)
        axes.set(xscale="log", xlabel="batch size", ylabel=MEASURES[measure])
        ticks(axes.xaxis, sorted(set(rows["batch_size"])))
        if measure == DRAWN[0]:
            axes.set_title(PARTS[augment], loc="left")
    legend(figure, all_axes[:1], len(COMPARED), "outside lower center")
    return figure
