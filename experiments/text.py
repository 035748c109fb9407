"""Numbers, tables and paragraphs as text, for pages, reports and the output of benchmarks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite, nan
from textwrap import fill
from typing import Any

from . import statistics as st

WIDTH = 116
"""Columns of a paragraph in a document."""
MISSING = "–"
BETTER, WORSE = "better", "worse"
PREFIXES = ["", "k", "M", "G", "T", "P"]


# Numbers


def number(value: float | None) -> str:
    """Three digits; a dash for a missing number.

    >>> number(0.0035219), number(123.4), number(2.0e-14), number(None)
    ('0.00352', '123', '2.00e-14', '–')
    """
    if value is None or not isfinite(value):
        return MISSING
    if value and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:.0f}"


def scientific(value: float | None) -> str:
    """Two digits and a short exponent, for numbers that differ by orders of magnitude.

    >>> scientific(1.234e-5), scientific(3.0), scientific(None)
    ('1.2e-5', '3.0', '–')
    """
    if value is None:
        return MISSING
    return f"{value:.1e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e")


def plus_minus(value: st.Interval) -> str:
    """A mean with half its confidence interval, in the same decimals.

    >>> plus_minus(st.Interval(0.0035219, 0.0031, 0.0039, 3))
    '0.00352 ± 0.00040'
    """
    mean = number(value.mean)
    if not isfinite(value.half):
        return mean
    decimals = len(mean.partition(".")[2])
    return f"{mean} ± {number(value.half) if 'e' in mean else f'{value.half:.{decimals}f}'}"


def bracketed(value: st.Interval) -> str:
    """A mean with its interval, if it has one.

    >>> bracketed(st.Interval(0.5, 0.25, 1.0, 3)), bracketed(st.interval([2.0]))
    ('0.500 [0.250, 1.00]', '2.00')
    """
    return number(value.mean) + (f" [{number(value.low)}, {number(value.high)}]" if isfinite(value.low) else "")


def compared(result: st.Paired) -> str:
    """One method against another in a few words.

    >>> compared(st.paired([1.0, 2.0], [2.0, 4.0]))
    'ratio 0.500 [0.500, 0.500], 2 seeds'
    """
    kind, estimate = "ratio" if result.is_ratio else "difference", result.estimate
    return f"{kind} {bracketed(estimate)}, {estimate.count} seed{'s' if estimate.count > 1 else ''}"


def scaled(value: float, unit: str = "B") -> str:
    """Three digits and an SI prefix; bytes unless another unit is given.

    >>> scaled(4_395_809_504), scaled(1152), scaled(0), scaled(999.7), scaled(172)
    ('4.40 GB', '1.15 kB', '0 B', '1.00 kB', '172 B')
    """
    step = 0
    while value >= 999.5 and step < len(PREFIXES) - 1:
        value, step = value / 1000, step + 1
    digits = 0 if value >= 99.95 or (not step and value == int(value)) else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {PREFIXES[step]}{unit}"


def in_seconds(value: float) -> str:
    """A number of seconds.

    >>> in_seconds(0.0256), in_seconds(3e-6), in_seconds(0)
    ('25.6 ms', '3 µs', '0')
    """
    if not value:
        return "0"
    if value >= 0.9995:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} µs"


def in_percent(share: float) -> str:
    """A percentage with two digits.

    >>> in_percent(0.0312), in_percent(0.5), in_percent(2e-7)
    ('3.1 %', '50 %', '< 0.01 %')
    """
    percent = 100 * share
    if not percent:
        return "0"
    return "< 0.01 %" if 0 < percent < 0.01 else f"{percent:.{0 if percent >= 9.95 else 1 if percent >= 0.1 else 2}f} %"


# Tables


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and its meaning, if it has one: better or worse."""

    text: str
    meaning: str = ""

    @classmethod
    def of(cls, value: object) -> "Cell":
        """A cell from a text, a number, or an interval."""
        if isinstance(value, Cell):
            return value
        return cls(number(value) if isinstance(value, float | None) else str(value))


def judged(value: st.Interval, neutral: float = nan) -> Cell:
    """A mean with its interval, and whether that lies on one side of neutral; lower is better."""
    return Cell(bracketed(value), BETTER if value.high < neutral else WORSE if value.low > neutral else "")


class Table:
    """A table of cells, from texts and numbers."""

    def __init__(self, headers: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
        self.headers = headers
        self.rows = [[Cell.of(value) for value in row] for row in rows]

    @property
    def texts(self) -> list[list[str]]:
        """The texts of all rows, without the headers."""
        return [[cell.text for cell in row] for row in self.rows]

    def markdown(self, aligned: bool = False) -> str:
        """The table in Markdown; aligned, it also reads as plain text."""
        lines = [[text.replace("|", "\\|") for text in line] for line in (self.headers, *self.texts)]
        rule = ["---"] + ["--:"] * (len(self.headers) - 1)
        if aligned:
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            rule = [("" if place else ":") + "-" * (width - 1) + (":" if place else "")
                    for place, width in enumerate(widths)]  # fmt: skip
            lines = [[text.rjust(width) if place else text.ljust(width)
                      for place, (text, width) in enumerate(zip(line, widths, strict=True))]
                     for line in lines]  # fmt: skip
        return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def table(rows: Iterable[Iterable[object]], columns: Sequence[str]) -> str:
    """A table for a terminal or a page: first column left, the others right.

    >>> print(table([["Adam", 0.5], ["SGD", 12]], ["base", "ratio"]))
    | base | ratio |
    | :--- | ----: |
    | Adam | 0.500 |
    | SGD  |    12 |
    """
    return Table(columns, rows).markdown(aligned=True)


# Words


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph for a document; lines after the first are indented."""
    return fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def described(entries: Any) -> str:
    """A dictionary in words."""
    return (
        ", ".join(f"{name} {value}" for name, value in entries.items()) if isinstance(entries, dict) else str(entries)
    )


def distinct(texts: Iterable[str]) -> list[str]:
    """Each text once; if there are several, with the number of runs of each."""
    counts = Counter(texts)
    several = len(counts) > 1
    return [f"{text} ({count} run{'s' * (count > 1)})" if several else text for text, count in counts.most_common()]


def header() -> str:
    """The line that makes a benchmark's table comparable with another: date, torch version, CPU, threads."""
    import torch

    from .results import processor

    date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return f"{date} · torch {torch.__version__} · {processor()} · {torch.get_num_threads()} thread(s)"
