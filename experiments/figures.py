"""Figures for papers: drawn with matplotlib, saved as PNG and PDF."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, NullLocator

from .claims import Curve
from .comparison import BASE, TIME, VARIANT, Comparison, Group
from .curves import (
    OTHERS,
    STYLES,
    MeanCurve,
    Picture,
    Style,
    diverged_curves,
    logarithmic,
    mean_curve,
    reference_lines,
    styles,
    value_range,
)
from .seeds import alike, in_words

FORMATS = ("png", "pdf")
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
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
AXES = {"step": "gradient evaluations", TIME: "processor seconds of training"}
LOOK: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "savefig.dpi": 150,
    "pdf.fonttype": 42,  # letters stay letters: publishers refuse matplotlib's default
}


def draw_metric(task: Comparison, metric: str, budget: str) -> Figure:
    """A metric against steps or seconds: mean over seeds, 95 % band, a panel for each kind of method.

    The means in one panel are over the same seeds.
    """
    looks, panels = styles(task), list(_panels(without_variants(task)))
    drawn = replace(task, groups=tuple(group for _, panel in panels for group in panel.groups))
    with mpl.rc_context(LOOK):
        figure, all_axes = _frame([_legend_lines(panel, metric) for _, panel in panels], task.metrics[metric])
        for axes, (title, panel) in zip(all_axes, panels, strict=True):
            _draw_panel(axes, panel, metric, budget, looks)
            axes.set_title(f"{title}, {in_words(panel.groups)}", y=1.02)
        _scale(all_axes[0], drawn, metric)
        figure.suptitle(task.title, fontsize=11, y=1 - 0.1 / figure.get_figheight())
    return figure


def without_variants(task: Comparison) -> Comparison:
    """The methods as the profile has them: what was run with other settings would set the scale. All, if those are."""
    groups = tuple(group for group in task.groups if group.kind != VARIANT)
    return replace(task, groups=groups) if groups else task


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


def _legend_lines(panel: Comparison, metric: str) -> int:
    return sum(1 + bool(group.remark) for group in panel.groups) + len(reference_lines(panel, metric))


def _draw_panel(axes: Axes, panel: Comparison, metric: str, budget: str, looks: Mapping[str, Style]) -> None:
    for group in panel.groups:
        _draw_group(axes, group, metric, budget, looks[group.variant])
    for (name, value), dash in zip(reference_lines(panel, metric).items(), cycle(DASHES.values())):
        axes.axhline(value, color="black", linewidth=0.7, linestyle=dash, label=name)
    axes.set_xlabel(AXES[budget])
    axes.xaxis.set_label_coords(0.5, -0.24 / PANEL_HEIGHT)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.45 / PANEL_HEIGHT), borderaxespad=0, labelspacing=0.3)


def _scale(axes: Axes, task: Comparison, metric: str) -> None:
    """The vertical axis, which all panels share."""
    if logarithmic(task, metric):
        axes.set_yscale("log")
    if limits := value_range(task, metric):
        axes.set_ylim(*limits)
        if axes.get_yscale() == "log" and limits[1] > 100 * limits[0]:
            axes.yaxis.set_minor_locator(NullLocator())  # half of the time went into ticks


def _draw_group(axes: Axes, group: Group, metric: str, budget: str, style: Style) -> None:
    label = _label(group)
    look: dict[str, Any] = {"color": style.colour, "linestyle": DASHES[style.dash]}
    if curve := mean_curve(group, metric):
        axes.plot(curve.x(budget), curve.mean, label=label, **look)
        axes.fill_between(curve.x(budget), curve.low, curve.high, color=style.colour, alpha=0.18, linewidth=0)
        label = "_"
    for curve in diverged_curves(group, metric):
        _draw_diverged(axes, curve, budget, style, label)
        label = "_"


def _label(group: Group) -> str:
    return f"{group.label}\n({group.remark})" if group.remark else group.label


def _draw_diverged(axes: Axes, curve: MeanCurve, budget: str, style: Style, label: str) -> None:
    """A thin line with a cross where it ended."""
    look: dict[str, Any] = {"color": style.colour, "linestyle": DASHES[style.dash], "linewidth": 0.7, "alpha": 0.7}
    axes.plot(curve.x(budget), curve.mean, marker="x", markevery=[-1], label=label, **look)


def draw_pictures(title: str, pictures: Sequence[Picture]) -> Figure:
    """A row for each picture: exact, predicted, error; errors all on one scale."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(9.5, 0.4 + 2.5 * len(pictures)), layout="constrained")
        all_axes = figure.subplots(len(pictures), 3, sharex=True, sharey=True, squeeze=False)
        worst = max(np.abs(picture.error).max() for picture in pictures)
        for row, picture in zip(all_axes, pictures, strict=True):
            _draw_picture(row, picture, worst)
        for axes in all_axes[-1]:
            axes.set_xlabel("t")
        figure.suptitle(f"{title}, seed {pictures[0].seed}", fontsize=11)
    return figure


def _draw_picture(row: Sequence[Axes], picture: Picture, worst: float) -> None:
    size = np.abs(picture.exact).max()
    fields = (("exact", picture.exact, size), (picture.label, picture.predicted, size), ("error", picture.error, worst))
    for axes, (title, values, limit) in zip(row, fields, strict=True):
        colours = "RdBu_r" if title != "error" else "PuOr_r"
        mesh = axes.pcolormesh(
            picture.t, picture.x, values, vmin=-limit, vmax=limit, cmap=colours, shading="gouraud", rasterized=True
        )
        axes.figure.colorbar(mesh, ax=axes)
        axes.set_title(title)
    row[0].set_ylabel("x")


def draw_curve(curve: Curve) -> Figure:
    """The figure behind a claim."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(4.8, 3.4), layout="constrained")
        axes = figure.subplots()
        for (name, (x, y)), style in zip(curve.series.items(), curve_styles(curve), strict=True):
            axes.plot(x, y, label=name, color=style.colour, linestyle=DASHES[style.dash], marker=marker(x))
        axes.set(title=curve.title, xlabel=curve.x_label, ylabel=curve.y_label)
        axes.set_xscale("log" if curve.log_x else "linear")
        axes.set_yscale("log" if curve.log_y else "linear")
        if curve.log_y:
            axes.yaxis.set(major_formatter=PlainNumbers(), minor_formatter=PlainNumbers())
        values = sorted({value for x, _ in curve.series.values() for value in x})
        if curve.log_x and marker(values):
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.xaxis.set_minor_locator(NullLocator())
        if len(curve.series) > 1:
            axes.legend()
    return figure


class PlainNumbers(LogFormatterSciNotation):
    """On a logarithmic axis, 0.2 and 50 as one writes them; only what is very small or large as a power."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The text of a tick; empty for those that are not labelled."""
        text = super().__call__(x, pos)
        return f"{x:g}" if text and 1e-3 <= x < 1e5 else text


def curve_styles(curve: Curve) -> list[Style]:
    """A method keeps its colour; other series take the next ones."""
    spare = iter([Style(style.colour) for style in (*STYLES.values(), *OTHERS)] * (1 + len(curve.series)))
    return [STYLES[name] if name in STYLES else next(spare) for name in curve.series]


def marker(x: Sequence[float]) -> str:
    """Few points are marked; many are a line."""
    return "o" if len(x) <= 20 else ""


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure in all formats; returns where."""
    paths = [folder / f"{name}.{extension}" for extension in FORMATS]
    with mpl.rc_context(LOOK):
        for path in paths:
            figure.savefig(path)
    return paths
