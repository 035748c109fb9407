"""A page on a study in Markdown: the origin of its runs, paragraphs, tables, figures, and its files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from .figures import save
from .provenance import seed_ranges
from .results import Run, check_writable, write_bytes
from .screen import BadInput, complain, tell
from .text import Table, described, distinct, wrapped

COMMIT = "commit"
AS_IT_IS = ("#", "!", "|", "- ", "```")
"""Beginnings of paragraphs that are not wrapped: headings, figures, tables, lists and code."""
Builder = Callable[[Path, Path], tuple[Path, list[str]]]
"""Writes the page on a folder of results into another one; returns the page, and a message for each damaged run."""


class NothingToReport(BadInput):
    """There is no completed run."""


def document(*parts: str | Table) -> str:
    """A whole document from paragraphs, headings and tables; prose is wrapped, empty parts are left out.

    >>> print(document("# Title", "", Table(["method", "error"], [["Adam", 0.5]])))
    # Title
    <BLANKLINE>
    | method | error |
    | --- | --: |
    | Adam | 0.500 |
    <BLANKLINE>
    """
    texts = [part.markdown() if isinstance(part, Table) else part for part in parts]
    paragraphs = [each for text in texts if text for each in text.split("\n\n")]
    return "\n\n".join(each if each.startswith(AS_IT_IS) else wrapped(each) for each in paragraphs) + "\n"


def origin(command: str, runs: Iterable[Run | Mapping[str, Any]], planned: int | None = None, *more: str) -> str:
    """Command, date, versions, hardware and seeds of the runs of a study, for the top of its page."""
    records = [{**run.config, **run.summary} if isinstance(run, Run) else run for run in runs]
    seeds = seed_ranges({each["seed"] for each in records})
    hours = sum(each["cpu_seconds"] for each in records) / 3600
    dates = sorted({str(each.get("date", ""))[:10] for each in records})
    versions = [dict(each.get("versions", {})) for each in records]
    commits = distinct(str(each.pop(COMMIT, "unknown")) for each in versions)
    of_all = f" of {planned}" if planned else ""
    lines = [
        f"page made {datetime.now(UTC):%Y-%m-%d} from {len(records)}{of_all} runs, "
        f"made {' to '.join(dict.fromkeys((dates[0], dates[-1])))}",
        f"seeds {seeds}, {hours:.2f} core hours",
        *distinct(map(described, versions)),
        f"commit {', '.join(commits)}",
        *distinct(described(each.get("hardware", {})) for each in records),
        *more,
    ]
    whole = command if "--seeds" in command else f"{command} --seeds {seeds}"
    return "\n".join([f"`{whole}`", "", *(wrapped(f"- {line}", indent="  ") for line in lines)])


def write_page(
    out: Path,
    parts: Sequence[str | Table],
    figures: Mapping[str, Figure] | None = None,
    frames: Mapping[str, pd.DataFrame] | None = None,
) -> Path:
    """Write README.md, figures as PNG and PDF, and data frames as CSV; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in (figures or {}).items():
        save(figure, out, name)
    for name, frame in (frames or {}).items():
        write_bytes(out / f"{name}.csv", frame.to_csv(index=False).encode())
    page = out / "README.md"
    write_bytes(page, document(*parts).encode())
    return page


def show_page(console: Console, build: Builder, results: Path, out: Path) -> None:
    """Make a page; print what could not be read, and where the page is."""
    check_writable(out)
    page, problems = build(results, out)
    complain(*problems)
    tell(console, f"Page: {page.resolve()}")
