"""The report on a folder of results: a page for offline reading, figures, and tables as CSV and Markdown."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from . import curves, tables
from .claims import Curve, Verdict, verdicts
from .comparison import BUDGETS, TIME, Comparison, Group, all_settings, collect
from .figures import save, styles
from .page import NothingToReport
from .pictures import Picture, draw_pictures, pictures
from .provenance import header, incomplete
from .results import CONFIG, DamagedRun, Run, load_runs, write_bytes
from .seeds import Seeds, restricted, seed_sets
from .tasks import TASKS
from .text import compared

AXIS_NAMES = {"step": "steps", TIME: "time"}
"""Names of axes in file names of figures."""
DIGITS = 4
"""Significant digits of a number in a figure: more than can be seen."""
MOST_PIXELS = 101
"""Largest number of points along a side of a picture."""


@dataclass(frozen=True)
class Evidence:
    """The data of a report."""

    results: Path
    tasks: list[Comparison]
    verdicts: list[Verdict]
    pictures: dict[str, list[Picture]]
    """By task."""
    problems: list[str]
    """Messages about files that could not be read."""


def build_report(results: Path, out: Path | None = None) -> tuple[Path, list[str]]:
    """Write report.html, tables and figures/ on all completed runs below a folder, into that folder or another one.

    Returns the page, and a message for each file that could not be read. Raises ``NothingToReport``, and ``OSError``
    where it cannot write.
    """
    out = out or results
    evidence = gather(results)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    write_tables(evidence, out)
    html = out / "report.html"
    write_bytes(html, render(evidence).encode())
    write_figures(evidence, out / "figures")
    return html, evidence.problems


def gather(results: Path) -> Evidence:
    """Read a folder; damaged runs are named and left out."""
    runs, problems = load_runs(results)
    tasks, more = collect(runs)
    problems += more
    if not tasks:
        raise NothingToReport(
            "\n".join([f"No completed run below {results}: see `python -m experiments run`.", *problems])
        )
    drawn = {}
    for task in tasks:
        try:
            drawn[task.task] = pictures(task)
        except DamagedRun as problem:
            problems.append(str(problem))
    judged, unjudged = judgeable(trace.run for task in tasks for group in task.groups for trace in group.traces)
    return Evidence(results, tasks, verdicts(judged), drawn, problems + unjudged)


def judgeable(runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    """The runs of known tasks with all their settings, which claims depend on; and a message for each other run."""
    complete, problems = [], []
    for run in runs:
        wanted = [field.name for field in fields(TASKS[run.task])] if run.task in TASKS else []
        if lacking := [name for name in wanted if name not in all_settings(run)]:
            names = ", ".join(lacking)
            problems.append(f"{run.folder / CONFIG}: no setting {names}; shown below, but not used for claims")
        elif wanted:
            complete.append(run)
    return complete, problems


# Tables and figures


def write_tables(evidence: Evidence, out: Path) -> None:
    """comparison, paired, acceptance and claims: numbers as .csv, text as .md; and all runs, one per row."""
    frames = {"claims": tables.claims_table(evidence.verdicts)}
    texts = {"claims": tables.claims_text(evidence.verdicts).markdown() + "\n"}
    for name, frame, text in (
        ("comparison", tables.comparison_table, tables.comparison_text),
        ("paired", tables.paired_table, tables.paired_text),
        ("acceptance", tables.acceptance_table, tables.acceptance_text),
        ("runs", tables.runs_table, None),
    ):
        frames[name] = pd.concat([frame(task) for task in evidence.tasks])
        if text:
            parts = [(task.title, text(task)) for task in evidence.tasks]
            texts[name] = "\n".join(f"### {title}\n\n{table.markdown()}\n" for title, table in parts if table.rows)
    for name, numbers in frames.items():
        write_bytes(out / f"{name}.csv", numbers.to_csv(index=False).encode())
    for name, words in texts.items():
        write_bytes(out / f"{name}.md", words.encode())


def write_figures(evidence: Evidence, folder: Path) -> None:
    """Draw every metric of every task against steps and time, solutions, and the figures of claims."""
    for task in evidence.tasks:
        for metric in task.metrics:
            for budget in BUDGETS:
                name = f"{task.task}-{file_name(metric)}-{AXIS_NAMES[budget]}"
                save(curves.draw_metric(task, metric, budget), folder, name)
        if drawn := evidence.pictures.get(task.task):
            save(draw_pictures(task.title, drawn), folder, f"{task.task}-solution")
    for verdict in evidence.verdicts:
        if verdict.figure:
            save(curves.draw_curve(verdict.figure), folder, f"claim-{file_name(verdict.name)}")


def file_name(text: str) -> str:
    """Letters, digits and dashes alone.

    >>> file_name("burgers2d: larger p & q")
    'burgers2d-larger-p-q'
    """
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")


# The page


def render(evidence: Evidence) -> str:
    """The page, with its styles, script, numbers and plotly inside."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("experiments"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["code"] = code
    return environment.get_template("report.html.j2").render(
        head=header(evidence.tasks),
        problems=evidence.problems,
        incomplete=incomplete(evidence.results, evidence.tasks),
        tasks=[task_section(evidence, task) for task in evidence.tasks],
        verdicts=evidence.verdicts,
        outcomes=Counter(verdict.outcome for verdict in evidence.verdicts),
        data=embedded(all_data(evidence)),
        plotly=get_plotlyjs(),
    )


def code(text: str) -> Markup:
    """Text between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def task_section(evidence: Evidence, task: Comparison) -> dict[str, Any]:
    """The template's data for one task."""
    drawn = evidence.pictures.get(task.task, [])
    return {
        "name": task.task,
        "title": task.title,
        "metric": task.metrics[task.metric],
        "metrics": task.metrics,
        "single": [group.label for group in task.groups if len(group.traces) == 1],
        "diverged": [f"{group.label}: {group.remark}" for group in task.groups if group.diverged],
        "comparison": tables.comparison_text(task),
        "paired": tables.paired_text(task),
        "acceptance": tables.acceptance_text(task),
        "pictures": drawn,
        "chosen": compared(drawn[-1].against) if drawn and drawn[-1].against else "",
    }


# Numbers for the interactive figures


def all_data(evidence: Evidence) -> dict[str, Any]:
    """The numbers behind all interactive figures."""
    return {
        "tasks": {task.task: figure_data(task) for task in evidence.tasks},
        "pictures": {name: [picture_data(each) for each in drawn] for name, drawn in evidence.pictures.items()},
        "claims": {verdict.name: claim_data(verdict.figure) for verdict in evidence.verdicts if verdict.figure},
    }


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def rounded(values: Iterable[float]) -> list[float | None]:
    """Short numbers for the page; null for those that are not finite."""
    return [float(f"{value:.{DIGITS}g}") if isfinite(value) else None for value in map(float, values)]


def figure_data(task: Comparison) -> dict[str, Any]:
    """All that the page's script needs to draw the figures of a task."""
    looks, sets = styles(group.variant for group in task.groups), seed_sets(task)
    groups = [
        {"variant": group.variant, "kind": group.kind, "label": group.label, "remark": group.remark}
        | vars(looks[group.variant])
        | {"ownSeeds": sets.index(tuple(group.seeds))}
        for group in task.groups
    ]
    metrics = {
        name: {
            "label": label,
            "log": curves.logarithmic(task, name),
            "references": curves.reference_lines(task, name),
            "curves": {group.variant: _curves(group, name, sets) for group in task.groups},
        }
        for name, label in task.metrics.items()
    }
    return {"groups": groups, "axes": curves.AXES, "seedCounts": [len(seeds) for seeds in sets], "metrics": metrics}


def _curves(group: Group, metric: str, sets: Sequence[Seeds]) -> dict[int, dict[str, Any]]:
    """Curves by the index of the set of seeds that they average over, for the sets that the group contains."""
    found = {}
    for place, seeds in enumerate(sets):
        if set(seeds) <= set(group.seeds):
            part = restricted(group, seeds)
            mean, lost = curves.mean_curve(part, metric), curves.diverged_curves(part, metric)
            found[place] = {"mean": mean and _curve(mean), "diverged": [_curve(curve) for curve in lost]}
    return found


def _curve(curve: curves.MeanCurve) -> dict[str, Any]:
    numbers = {"step": curve.steps, TIME: curve.seconds, "mean": curve.mean}
    if np.isfinite(curve.low).any():
        numbers |= {"low": curve.low, "high": curve.high}
    return {name: rounded(values) for name, values in numbers.items()}


def claim_data(curve: Curve) -> dict[str, Any]:
    """The figure behind a claim."""
    looks = curves.curve_styles(curve)
    series = [{"name": name, "x": rounded(x), "y": rounded(y)} | vars(looks[name])
              for name, (x, y) in curve.series.items()]  # fmt: skip
    labels = {"title": curve.title, "xLabel": curve.x_label, "yLabel": curve.y_label}
    return labels | {"logX": curve.log_x, "logY": curve.log_y, "series": series}


def picture_data(picture: Picture) -> dict[str, Any]:
    """A picture reduced to the points that a page needs."""
    rows, columns = (max(1, -(-size // MOST_PIXELS)) for size in picture.exact.shape)
    fields = {"exact": picture.exact, "predicted": picture.predicted, "error": picture.error}
    small = {name: [rounded(line) for line in values[::rows, ::columns]] for name, values in fields.items()}
    return small | {"x": rounded(picture.x[::rows]), "t": rounded(picture.t[::columns]), "label": picture.label}
