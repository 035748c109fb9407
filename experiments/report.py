"""The report on a folder of results: a page for offline reading, figures, and tables as CSV and Markdown."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from . import figures, page, tables
from .claims import Verdict, verdicts
from .comparison import BUDGETS, TIME, Comparison, all_settings, collect
from .curves import Picture, pictures
from .provenance import header, incomplete
from .results import CONFIG, DamagedRun, Run, load_runs, write_bytes
from .tasks import TASKS

AXIS_NAMES = {"step": "steps", TIME: "time"}
"""Names of axes in file names of figures."""


class NothingToReport(ValueError):
    """There is no completed run."""


@dataclass(frozen=True)
class ReportPaths:
    """The files of a report."""

    html: Path
    figures: list[Path]
    tables: list[Path]
    problems: list[str]
    """Messages about files that could not be read and were left out."""


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


def build_report(results: Path, out: Path | None = None) -> ReportPaths:
    """Write report.html, tables and figures/ on all completed runs below a folder, into that folder or another one.

    Raises ``NothingToReport``, and ``OSError`` where it cannot write.
    """
    out = out or results
    evidence = gather(results)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    written_tables = list(write_tables(evidence, out))
    html = out / "report.html"
    write_bytes(html, render(evidence).encode())
    drawn = list(write_figures(evidence, out / "figures"))
    return ReportPaths(html, drawn, written_tables, evidence.problems)


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


# Tables


def write_tables(evidence: Evidence, out: Path) -> Iterator[Path]:
    """comparison, paired, acceptance and claims: numbers as .csv, text as .md; and all runs, one per row."""
    for name, frame, text in (
        ("comparison", tables.comparison_table, page.comparison_text),
        ("paired", tables.paired_table, page.paired_text),
        ("acceptance", tables.acceptance_table, page.acceptance_text),
    ):
        numbers = pd.concat([frame(task) for task in evidence.tasks])
        parts = [(task.title, text(task)) for task in evidence.tasks]
        words = "\n".join(f"### {title}\n\n{table.markdown()}\n" for title, table in parts if table.rows)
        yield from _write_table(out, name, numbers, words)
    runs = out / "runs.csv"
    write_bytes(runs, pd.concat([tables.runs_table(task) for task in evidence.tasks]).to_csv(index=False).encode())
    yield runs
    claims = page.claims_text(evidence.verdicts)
    yield from _write_table(out, "claims", tables.claims_table(evidence.verdicts), claims.markdown() + "\n")


def _write_table(out: Path, name: str, frame: pd.DataFrame, text: str) -> Iterator[Path]:
    for path, content in ((out / f"{name}.csv", frame.to_csv(index=False)), (out / f"{name}.md", text)):
        write_bytes(path, content.encode())
        yield path


# Figures


def write_figures(evidence: Evidence, folder: Path) -> Iterator[Path]:
    """Draw every metric of every task against steps and time, solutions, and the figures of claims."""
    for task in evidence.tasks:
        for metric in task.metrics:
            for budget in BUDGETS:
                figure = figures.draw_metric(task, metric, budget)
                yield from figures.save(figure, folder, f"{task.task}-{file_name(metric)}-{AXIS_NAMES[budget]}")
        if drawn := evidence.pictures.get(task.task):
            yield from figures.save(figures.draw_pictures(task.title, drawn), folder, f"{task.task}-solution")
    for verdict in evidence.verdicts:
        if verdict.figure:
            yield from figures.save(figures.draw_curve(verdict.figure), folder, f"claim-{file_name(verdict.name)}")


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
        data=embedded(figure_data(evidence)),
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
        "comparison": page.comparison_text(task),
        "paired": page.paired_text(task),
        "acceptance": page.acceptance_text(task),
        "pictures": drawn,
        "chosen": page.compared(drawn[-1].against) if drawn and drawn[-1].against else "",
    }


def figure_data(evidence: Evidence) -> dict[str, Any]:
    """The numbers behind all interactive figures."""
    return {
        "tasks": {task.task: page.figure_data(task) for task in evidence.tasks},
        "pictures": {name: [page.picture_data(p) for p in drawn] for name, drawn in evidence.pictures.items()},
        "claims": {v.name: page.claim_data(v.figure) for v in evidence.verdicts if v.figure},
    }


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
