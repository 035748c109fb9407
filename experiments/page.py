"""The contents of pages: tables of text, paragraphs, and numbers for the interactive figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from textwrap import fill
from typing import Any

import numpy as np

from . import statistics as st
from .claims import Curve, Verdict
from .comparison import BUDGETS, TIME, Comparison, Group
from .curves import MeanCurve, Picture, diverged_curves, logarithmic, mean_curve, reference_lines, styles
from .figures import AXES, curve_styles
from .seeds import Seeds, restricted, seed_sets
from .tables import acceptance_table, comparison_table, paired_table

DIGITS = 4
"""Significant digits of a number in a figure: more than can be seen."""
MOST_PIXELS = 101
"""Largest number of points along a side of a picture."""
WIDTH = 116
"""Columns of a paragraph in a document."""
BETTER, WORSE = "better", "worse"


@dataclass(frozen=True)
class Cell:
    """A text in a table, and its meaning, if it has one: better or worse."""

    text: str
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.headers, ["---"] + ["--:"] * (len(self.headers) - 1)]
        lines += [[cell.text for cell in row] for row in self.rows]
        return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph for a document; lines after the first are indented."""
    return fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def number(value: float | None) -> str:
    """Three digits; a dash for a missing number.

    >>> number(0.0035219), number(123.4), number(2.0e-14), number(None)
    ('0.00352', '123', '2.00e-14', '–')
    """
    if value is None or not isfinite(value):
        return "–"
    if value and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:.0f}"


def plus_minus(row: Mapping[str, Any], name: str) -> Cell:
    """A mean with half its confidence interval, in the same decimals.

    >>> plus_minus({"mse": 0.0035219, "mse_low": 0.0031, "mse_high": 0.0039}, "mse").text
    '0.00352 ± 0.00040'
    """
    mean, half = number(row[name]), (row[f"{name}_high"] - row[f"{name}_low"]) / 2
    if not isfinite(half):
        return Cell(mean)
    decimals = len(mean.partition(".")[2])
    return Cell(f"{mean} ± {number(half) if 'e' in mean else f'{half:.{decimals}f}'}")


def bracketed(row: Mapping[str, Any], name: str, neutral: float) -> Cell:
    """An estimate with its interval, and whether that lies on one side of neutral."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    meaning = BETTER if high < neutral else WORSE if low > neutral else ""
    return Cell(number(row[name]) + (f" [{number(low)}, {number(high)}]" if isfinite(low) else ""), meaning)


def compared(result: st.Paired) -> str:
    """One method against another in a few words.

    >>> compared(st.paired([1.0, 2.0], [2.0, 4.0]))
    'ratio 0.500 [0.500, 0.500], 2 seeds'
    """
    kind, estimate = "ratio" if result.is_ratio else "difference", result.estimate
    ends = f" [{number(estimate.low)}, {number(estimate.high)}]" if isfinite(estimate.low) else ""
    return f"{kind} {number(estimate.mean)}{ends}, {estimate.count} seed{'s' if estimate.count > 1 else ''}"


def comparison_text(task: Comparison) -> Table:
    """Method by method: seeds, metrics, time."""
    further = {name: label for name, label in task.metrics.items() if name != task.metric}
    headers = [
        "method",
        "seeds",
        f"final {task.metrics[task.metric]}",
        "best",
        "time / base",
        "processor seconds",
        "learning rate",
    ]
    by_method = comparison_table(task).groupby("method", sort=False)
    rows = [_comparison_row(task, lines.to_dict("records"), further) for _, lines in by_method]
    return Table([*headers, *(f"final {label}" for label in further.values())], rows)


def _comparison_row(task: Comparison, lines: Sequence[Mapping[str, Any]], further: Iterable[str]) -> list[Cell]:
    by_metric = {line["metric"]: line for line in lines}
    first = lines[0]
    main = by_metric.get(task.metric)
    row = [Cell(first["label"]), Cell(_seeds(task, first["method"]))]
    row += [plus_minus(main, name) if main else Cell("–") for name in ("final", "best")]
    row += [bracketed(first, "time_ratio", nan), plus_minus(first, "seconds"), Cell(_rate(task, first["method"]))]
    return row + [plus_minus(by_metric[name], "final") if name in by_metric else Cell("–") for name in further]


def _group(task: Comparison, variant: str) -> Group | None:
    return next((group for group in task.groups if group.variant == variant), None)


def _seeds(task: Comparison, variant: str) -> str:
    group = _group(task, variant)
    if group is None:
        return "not trained"
    total = f"{len(group.seeds)} of {len(task.seeds)}" if not group.bracket else str(len(group.seeds))
    return f"{total} ({group.remark})" if group.remark else total


def _rate(task: Comparison, variant: str) -> str:
    group = _group(task, variant)
    return " ".join(sorted({number(t.run.summary["learning_rate"]) for t in group.traces})) if group else "–"


def paired_text(task: Comparison) -> Table:
    """Method by method against the base, at equal gradient evaluations and at equal time."""
    headers = ["method", "against"]
    for name in BUDGETS.values():
        headers += [f"ratio at equal {name}", "pairs", "better : worse", "p"]
    frame = paired_table(task)
    rows = []
    for _, lines in frame[frame["metric"] == task.metric].groupby("method", sort=False) if len(frame) else ():
        records = lines.to_dict("records")
        row = [Cell(records[0]["label"]), Cell(records[0]["against"])]
        for record in records:
            row += [_estimate(record), Cell(_pairs(record)), Cell(f"{record['better']} : {record['worse']}")]
            row.append(Cell(number(record["p_value"])))
        rows.append(row)
    return Table(headers, rows)


def _estimate(record: Mapping[str, Any]) -> Cell:
    """The estimate from the pairs that did not diverge; without a meaning if diverged runs contradict it."""
    cell = bracketed(record, "estimate", 1.0 if record["kind"] == "ratio" else 0.0)
    contrary = BETTER if record["diverged"] > record["against_diverged"] else WORSE
    undone = record["diverged"] != record["against_diverged"] and cell.meaning == contrary
    return Cell(cell.text if record["kind"] == "ratio" else f"difference {cell.text}", "" if undone else cell.meaning)


def _pairs(record: Mapping[str, Any]) -> str:
    """Number of pairs, and of diverged runs, whose pairs are left out."""
    lost = {"": record["diverged"], "base ": record["against_diverged"]}
    texts = [f"{who}diverged {count}" for who, count in lost.items() if count]
    return f"{record['pairs']}" + (f" ({', '.join(texts)})" if texts else "")


def acceptance_text(task: Comparison) -> Table:
    """Outcomes of the accelerations, per run."""
    frame = acceptance_table(task)
    columns = [name for name in frame.columns if name not in ("task", "method", "label")]
    rows = [[Cell(row["label"]), *(Cell(f"{row[name]:.1f}" if isfinite(row[name]) else "–") for name in columns)]
            for row in frame.to_dict("records")]  # fmt: skip
    return Table(["method", *(name.replace("_", " ") for name in columns)], rows)


def rounded(values: Iterable[float]) -> list[float | None]:
    """Short numbers for the page; null for those that are not finite."""
    return [float(f"{value:.{DIGITS}g}") if isfinite(value) else None for value in map(float, values)]


def figure_data(task: Comparison) -> dict[str, Any]:
    """All that the page's script needs to draw the figures of a task."""
    looks, sets = styles(task), seed_sets(task)
    groups = [
        {"variant": group.variant, "kind": group.kind, "colour": looks[group.variant].colour}
        | {"label": group.label, "remark": group.remark, "dash": looks[group.variant].dash}
        | {"ownSeeds": sets.index(tuple(group.seeds))}
        for group in task.groups
    ]
    metrics = {name: _metric_data(task, name, sets) for name in task.metrics}
    return {"groups": groups, "axes": AXES, "seedCounts": [len(seeds) for seeds in sets], "metrics": metrics}


def _metric_data(task: Comparison, metric: str, sets: Sequence[Seeds]) -> dict[str, Any]:
    return {
        "label": task.metrics[metric],
        "log": logarithmic(task, metric),
        "references": reference_lines(task, metric),
        "curves": {group.variant: _curves(group, metric, sets) for group in task.groups},
    }


def _curves(group: Group, metric: str, sets: Sequence[Seeds]) -> dict[int, dict[str, Any]]:
    """Curves by the index of the set of seeds that they average over, for the sets that the group contains."""
    found = {place: restricted(group, seeds) for place, seeds in enumerate(sets) if set(seeds) <= set(group.seeds)}
    return {place: _curves_on(part, metric) for place, part in found.items()}


def _curves_on(group: Group, metric: str) -> dict[str, Any]:
    mean = mean_curve(group, metric)
    return {"mean": mean and _curve(mean), "diverged": [_curve(curve) for curve in diverged_curves(group, metric)]}


def _curve(curve: MeanCurve) -> dict[str, Any]:
    numbers = {"step": curve.steps, TIME: curve.seconds, "mean": curve.mean}
    if np.isfinite(curve.low).any():
        numbers |= {"low": curve.low, "high": curve.high}
    return {name: rounded(values) for name, values in numbers.items()}


def claim_data(curve: Curve) -> dict[str, Any]:
    """The figure behind a claim."""
    series = [
        {"name": name, "x": rounded(x), "y": rounded(y), "colour": style.colour, "dash": style.dash}
        for (name, (x, y)), style in zip(curve.series.items(), curve_styles(curve), strict=True)
    ]
    labels = {"title": curve.title, "xLabel": curve.x_label, "yLabel": curve.y_label}
    return labels | {"logX": curve.log_x, "logY": curve.log_y, "series": series}


def picture_data(picture: Picture) -> dict[str, Any]:
    """A picture reduced to the points that a page needs."""
    rows, columns = (max(1, -(-size // MOST_PIXELS)) for size in picture.exact.shape)
    fields = {"exact": picture.exact, "predicted": picture.predicted, "error": picture.error}
    small = {name: [rounded(line) for line in values[::rows, ::columns]] for name, values in fields.items()}
    return small | {"x": rounded(picture.x[::rows]), "t": rounded(picture.t[::columns]), "label": picture.label}


def claims_text(verdicts: Iterable[Verdict]) -> Table:
    """Claim by claim."""
    rows = [[Cell(f"{v.name} ({v.source})"), Cell(v.claim), Cell(v.outcome), Cell(v.numbers)] for v in verdicts]
    return Table(["claim", "what the paper says", "verdict", "numbers"], rows)
