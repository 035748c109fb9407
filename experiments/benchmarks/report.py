"""Output of all benchmarks: a header with date, versions and hardware, and Markdown tables."""

import platform
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import torch


def header() -> str:
    """The line that makes a table comparable with another: date, torch version, CPU, threads."""
    date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return f"{date} · torch {torch.__version__} · {cpu_model()} · {torch.get_num_threads()} thread(s)"


def cpu_model() -> str:
    """The name of the CPU if the system provides it (Linux), otherwise its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(rows: Iterable[Sequence[object]], columns: Sequence[str]) -> str:
    """A markdown table that also reads as plain text: first column left, the others right.

    >>> print(table([["Adam", 0.5], ["SGD", 12]], ["base", "ratio"]))
    | base | ratio |
    |:-----|------:|
    | Adam |   0.5 |
    | SGD  |    12 |
    """
    cells = [list(columns), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    head, *body = ["| " + " | ".join(_aligned(row, widths)) + " |" for row in cells]
    first, *others = widths
    rule = "|:" + "-" * (first + 1) + "|" + "".join("-" * (width + 1) + ":|" for width in others)
    return "\n".join([head, rule, *body])


def _text(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
