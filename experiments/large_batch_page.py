"""The page of the large-batch study: provenance, figure, a table for each part, and the verdicts."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console

from .arguments import BadInput
from .claims.evidence import setting
from .curves import STYLES
from .figures import DASHES, LOOK, save
from .large_batch import BASE, CLAIMS, COMPARED, CONTROL, MEASURES, SMALL, comparison, ends, study
from .methods import METHODS
from .page import Cell, Table, bracketed, plus_minus, wrapped
from .provenance import described, distinct, seed_ranges
from .report import NothingToReport
from .results import Run, check_writable, load_runs, write_bytes
from .runner import Spec
from .screen import complain, tell

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
    out.mkdir(parents=True, exist_ok=True)
    save(draw(table), out, "large-batch")
    for name, frame in (("runs", found.reset_index()), ("comparison", table)):
        write_bytes(out / f"{name}.csv", frame.to_csv(index=False).encode())
    page = out / "README.md"
    write_bytes(page, text(runs, table).encode())
    return page, problems


def show_page(console: Console, results: Path, out: Path) -> None:
    """Make the page; report what could not be read, and where the page is."""
    check_writable(out)
    try:
        page, problems = build_page(results, out)
    except NothingToReport as problem:
        raise BadInput(str(problem)) from problem
    for message in problems:
        complain(message)
    tell(console, f"Page: {page.resolve()}")


def text(runs: Sequence[Run], table: pd.DataFrame) -> str:
    """The whole page."""
    parts = [
        "# Large batches at small scale",
        wrapped(about()),
        origin(runs),
        READING,
        "![Measures against the batch](large-batch.png)",
    ]
    for augment, rows in table.groupby("augment"):
        parts += [f"## {PARTS[augment]}", method_table(rows).markdown()]
        parts += list(verdicts([run for run in runs if setting(run, "augment") == augment]))
    parts.append("Numbers: [comparison.csv](comparison.csv), and [runs.csv](runs.csv) with one row per run.")
    return "\n\n".join(parts) + "\n"


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


def origin(runs: Sequence[Run]) -> str:
    """Command, date, versions, hardware and seeds."""
    seeds = sorted({run.seed for run in runs})
    wanted, named = len(study(seeds).specs()), seed_ranges(seeds)
    hours = sum(run.summary["cpu_seconds"] for run in runs) / 3600
    dates = sorted({run.config["date"][:10] for run in runs})
    made = f"{datetime.now(UTC):%Y-%m-%d} from {len(runs)} of {wanted} runs"
    lines = [
        f"- page made {made}, trained on {' to '.join(dict.fromkeys((dates[0], dates[-1])))}",
        f"- seeds {named}, {hours:.2f} core hours of training",
        *(wrapped(f"- {words}", "  ") for words in distinct(described(run.config["versions"]) for run in runs)),
        *(wrapped(f"- {words}", "  ") for words in distinct(described(run.config["hardware"]) for run in runs)),
    ]
    return "\n".join([f"`python -m experiments large-batch --seeds {named}`", "", *lines])


def method_table(rows: pd.DataFrame) -> Table:
    """Methods at each batch."""
    headers = ["method", "batch", "seeds", *MEASURES.values(), *LOWER.values(), "time / base"]
    return Table(headers, [method_row(row) for row in rows.to_dict("records")])


def method_row(row: dict[str, Any]) -> list[Cell]:
    """One method at one batch."""
    seeds = f"{row['seeds']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else "")
    cells = [Cell(METHODS[row["method"]].label), Cell(str(row["batch_size"])), Cell(seeds)]
    cells += [plus_minus(row, name) for name in MEASURES]
    cells += [Cell("") if row["method"] == BASE else bracketed(row, f"{name}_less", 0) for name in LOWER]
    return [*cells, Cell(f"{row['time_ratio']:.2f}")]


def verdicts(runs: Sequence[Run]) -> Iterator[str]:
    """A paragraph for each claim."""
    for verdict in (claim.judge(runs) for claim in CLAIMS):
        yield wrapped(f"**{verdict.claim} {verdict.outcome.capitalize()}.** {verdict.numbers}")


def draw(table: pd.DataFrame) -> Figure:
    """A row of panels for each part, a panel for each measure, against the batch."""
    parts = list(table.groupby("augment"))
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(9.6, 0.9 + 2.7 * len(parts)), layout="constrained")
        all_axes = figure.subplots(len(parts), len(DRAWN), squeeze=False)
        for (augment, rows), line in zip(parts, all_axes, strict=True):
            for axes, measure in zip(line, DRAWN, strict=True):
                draw_panel(axes, rows, measure)
            line[0].set_title(PARTS[augment], loc="left")
        figure.legend(*all_axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COMPARED))
    return figure


def draw_panel(axes: Axes, rows: pd.DataFrame, measure: str) -> None:
    """A line with intervals for each method."""
    for place, (method, line) in enumerate(rows.groupby("method", sort=False)):
        style = STYLES[method]
        x = line["batch_size"] * DODGE ** (place - len(COMPARED) // 2)
        sides = [line[measure] - line[f"{measure}_low"], line[f"{measure}_high"] - line[measure]]
        look: dict[str, Any] = {"color": style.colour, "linestyle": DASHES[style.dash], "marker": "o", "markersize": 3}
        axes.errorbar(x, line[measure], sides, label=METHODS[method].label, capsize=2, elinewidth=0.8, **look)
    batches = sorted(set(rows["batch_size"]))
    axes.set(xscale="log", xlabel="batch size", ylabel=MEASURES[measure])
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
