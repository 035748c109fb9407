"""The curves of a comparison: means over seeds with bands, what diverged, and the figures that show them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from . import statistics as st
from .claims import Curve
from .comparison import BASE, TIME, VARIANT, Comparison, Group, Trace
from .figures import DASHES, OTHERS, STYLES, PlainNumbers, Style, styled, styles, ticks
from .seeds import alike, in_words

MOST_POINTS = 300
"""Largest number of points of a curve; more cannot be distinguished in a figure."""
BAND_ROOM = 3.0
"""On a logarithmic axis, a band may extend beyond all means by this factor before it is cut."""
AXES = {"step": "gradient evaluations", TIME: "processor seconds of training"}
PANELS = {
    "paper": "the paper's methods",
    "control": "controls",
    "ours": "ours",
    "peer": "peers",
    VARIANT: "other settings",
}
"""Kind of methods -> title of its panel, which also shows the base."""
MOST_METHODS = 6
"""Largest number of methods in a panel, not counting the base; more are spread over several panels."""
MOST_COLUMNS = 3
"""Largest number of panels side by side."""
PANEL_WIDTH, PANEL_HEIGHT = 3.2, 2.7
"""In inches."""


@dataclass(frozen=True)
class MeanCurve:
    """The mean over the seeds that finished; a band where there are two at least."""

    steps: st.Floats
    seconds: st.Floats
    """The mean time at which these steps were made."""
    mean: st.Floats
    low: st.Floats
    high: st.Floats

    def x(self, budget: str) -> st.Floats:
        """Along the axis of steps or of seconds."""
        return self.steps if budget == "step" else self.seconds


def mean_curve(group: Group, metric: str) -> MeanCurve | None:
    """Runs on a common grid, that of the longest one; None if no run finished with this metric.

    A run that stopped early holds its last value, and its time.
    """
    points = [found for trace in group.finished if (found := _points(trace, metric))[0].size]
    if not points:
        return None
    grid = st.thinned(max((steps for steps, _, _ in points), key=lambda steps: steps[-1]), MOST_POINTS)
    values = np.array([st.on_grid(steps, values, grid) for steps, _, values in points])
    seconds = np.array([st.on_grid(steps, seconds, grid) for steps, seconds, _ in points])
    return MeanCurve(grid, st.band(seconds)[0], *st.band(values))


def diverged_curves(group: Group, metric: str) -> Iterator[MeanCurve]:
    """Each diverged run, up to the divergence."""
    for trace in group.diverged:
        steps, seconds, values = _points(trace, metric)
        if steps.size:
            keep = np.searchsorted(steps, st.thinned(steps, MOST_POINTS))
            nothing = np.full(keep.size, np.nan)
            yield MeanCurve(steps[keep], seconds[keep], values[keep], nothing, nothing)


def _points(trace: Trace, metric: str) -> tuple[st.Floats, st.Floats, st.Floats]:
    """Steps, seconds and finite values of one run."""
    values = trace.column(metric)
    known = np.isfinite(values)
    return trace.column("step")[known], trace.column(TIME)[known], values[known]


def logarithmic(task: Comparison, metric: str) -> bool:
    """Whether the metric can be drawn on a logarithmic axis: all values are positive."""
    columns = (trace.column(metric) for group in task.groups for trace in group.traces)
    return all(bool((column[np.isfinite(column)] > 0).all()) for column in columns)


def reference_lines(task: Comparison, metric: str) -> dict[str, float]:
    """The references that the axis can show: a logarithmic axis has no zero."""
    means = {name: value.mean for name, value in task.references(metric).items()}
    return {name: mean for name, mean in means.items() if mean > 0 or not logarithmic(task, metric)}


def value_range(task: Comparison, metric: str) -> tuple[float, float] | None:
    """The range of an axis: means and references with room for their bands, but not everything that diverged.

    None if no run finished.
    """
    curves = [curve for group in task.groups if (curve := mean_curve(group, metric))]
    if not curves:
        return None
    middle = np.concatenate([*(c.mean for c in curves), list(reference_lines(task, metric).values())])
    ends = np.concatenate([middle, *(np.concatenate([c.low, c.high]) for c in curves)])
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    if logarithmic(task, metric):
        return max(low, np.nanmin(middle) / BAND_ROOM) / 1.1, min(high, np.nanmax(middle) * BAND_ROOM) * 1.1
    return low - (high - low) / 20, high + (high - low) / 20


# Figures


@styled
def draw_metric(task: Comparison, metric: str, budget: str) -> Figure:
    """A metric against steps or seconds: mean over seeds, 95 % band, a panel for each kind of method.

    The means in one panel are over the same seeds. What was run with settings other than the profile's would set the
    scale, and is left out if there is anything else.
    """
    looks = styles(group.variant for group in task.groups)
    plain = tuple(group for group in task.groups if group.kind != VARIANT)
    panels = list(_panels(replace(task, groups=plain) if plain else task))
    drawn = replace(task, groups=tuple(group for _, panel in panels for group in panel.groups))
    figure, all_axes = _frame([_legend_lines(panel, metric) for _, panel in panels], task.metrics[metric])
    for axes, (title, panel) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, metric, budget, looks)
        axes.set_title(f"{title}, {in_words(panel.groups)}", y=1.02)
    shared = all_axes[0]
    if logarithmic(drawn, metric):
        shared.set_yscale("log")
    if limits := value_range(drawn, metric):
        shared.set_ylim(*limits)
        if shared.get_yscale() == "log" and limits[1] > 100 * limits[0]:
            shared.yaxis.set_minor_locator(NullLocator())  # half of the time went into ticks
    figure.suptitle(task.title, fontsize=11, y=1 - 0.1 / figure.get_figheight())
    return figure


def _panels(task: Comparison) -> Iterator[tuple[str, Comparison]]:
    """Title and contents of each."""
    base = [group for group in task.groups if group.variant == BASE]
    for kind, title in PANELS.items():
        groups = [group for group in task.groups if group.kind == kind and group.variant != BASE]
        count = -(-len(groups) // MOST_METHODS) or int(bool(base) and kind == "paper")
        for part in range(count):
            size = -(-len(groups) // count)
            shown = alike([*base, *groups[part * size : (part + 1) * size]])
            yield title + (f" ({part + 1} of {count})" if count > 1 else ""), replace(task, groups=shown)


def _frame(legend_lines: Sequence[int], label: str) -> tuple[Figure, Sequence[Axes]]:
    """A panel for each legend, which is below it. Places are given: to find them takes longer than to draw."""
    panels = len(legend_lines)
    rows = -(-panels // MOST_COLUMNS)
    columns = -(-panels // rows)
    above, gap, below = 0.55, 0.9, 0.6 + 0.17 * max(legend_lines[columns * (rows - 1) :])
    if rows > 1:
        gap += 0.17 * max(legend_lines[: columns * (rows - 1)])
    width, height = PANEL_WIDTH * columns + 0.8, above + PANEL_HEIGHT * rows + gap * (rows - 1) + below
    figure = Figure(figsize=(width, height))
    edges = {"left": 0.75 / width, "right": 1 - 0.1 / width, "top": 1 - above / height, "bottom": below / height}
    gaps = {"wspace": 0.08, "hspace": gap / PANEL_HEIGHT}
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False, gridspec_kw=edges | gaps)
    for first in axes[:, 0]:
        first.set_ylabel(label)
        first.yaxis.set_label_coords(-0.58 / PANEL_WIDTH, 0.5)
    for spare in axes.flat[panels:]:
        spare.remove()
    return figure, list(axes.flat[:panels])


def _legend_lines(panel: Comparison, metric: str) -> int:
    return sum(1 + bool(group.remark) for group in panel.groups) + len(reference_lines(panel, metric))


def _draw_panel(axes: Axes, panel: Comparison, metric: str, budget: str, looks: Mapping[str, Style]) -> None:
    """A mean with its band for each group, a thin line with a cross at its end for each run that diverged."""
    for group in panel.groups:
        label, look = group.label + (f"\n({group.remark})" if group.remark else ""), looks[group.variant]
        if curve := mean_curve(group, metric):
            axes.plot(curve.x(budget), curve.mean, label=label, **look.line)
            axes.fill_between(curve.x(budget), curve.low, curve.high, color=look.colour, alpha=0.18, linewidth=0)
            label = "_"
        for lost in diverged_curves(group, metric):
            thin: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.7, "marker": "x", "markevery": [-1]} | look.line
            axes.plot(lost.x(budget), lost.mean, label=label, **thin)
            label = "_"
    for (name, value), dash in zip(reference_lines(panel, metric).items(), cycle(DASHES.values())):
        axes.axhline(value, color="black", linewidth=0.7, linestyle=dash, label=name)
    axes.set_xlabel(AXES[budget])
    axes.xaxis.set_label_coords(0.5, -0.24 / PANEL_HEIGHT)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.45 / PANEL_HEIGHT), borderaxespad=0, labelspacing=0.3)


@styled
def draw_curve(curve: Curve) -> Figure:
    """The figure behind a claim; few points are marked, many are a line."""
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, look in curve_styles(curve).items():
        x, y = curve.series[name]
        axes.plot(x, y, label=name, marker="o" if len(x) <= 20 else "", **look.line)
    axes.set(title=curve.title, xlabel=curve.x_label, ylabel=curve.y_label)
    axes.set_xscale("log" if curve.log_x else "linear")
    axes.set_yscale("log" if curve.log_y else "linear")
    if curve.log_y:
        axes.yaxis.set(major_formatter=PlainNumbers(), minor_formatter=PlainNumbers())
    values = sorted({value for x, _ in curve.series.values() for value in x})
    if curve.log_x and len(values) <= 20:
        ticks(axes.xaxis, values)
    if len(curve.series) > 1:
        axes.legend()
    return figure


def curve_styles(curve: Curve) -> dict[str, Style]:
    """A method keeps its colour; other series take the next ones."""
    return styles(curve.series, [Style(style.colour) for style in (*STYLES.values(), *OTHERS)])
