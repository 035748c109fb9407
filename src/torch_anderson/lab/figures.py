"""Figures for papers: drawn with matplotlib, saved as PNG and PDF."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

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

FORMATS = ("png", "pdf")
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
PANELS = (
    ("the paper's methods", ("paper",)),
    ("controls", ("control", "ours")),
    ("peers", ("peer",)),
    ("other settings", (VARIANT,)),
)
"""What is drawn side by side, with the base in each: title, kinds of methods."""
MOST_VARIANTS = 8
"""In one panel; the page has them all."""
PANEL_WIDTH, PANEL_HEIGHT = 3.2, 2.7
"""Inches."""
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
    """A metric against steps or seconds: mean over seeds, 95 % band, a panel for each kind of method."""
    task = without_variants(task)
    panels = list(_panels(task))
    lines = max(sum(1 + bool(group.remark) for group in groups) for _, groups in panels)
    with mpl.rc_context(LOOK):
        figure, all_axes = _frame(len(panels), lines + len(reference_lines(task, metric)))
        for axes, (title, groups) in zip(all_axes, panels, strict=True):
            _draw_panel(axes, task, groups, metric, budget)
            axes.set_title(title if len(panels) > 1 else "", y=1.02)
        _scale(all_axes[0], task, metric)
        all_axes[0].set_ylabel(task.metrics[metric])
        all_axes[0].yaxis.set_label_coords(-0.58 / PANEL_WIDTH, 0.5)
        figure.suptitle(task.title, fontsize=11, y=1 - 0.1 / figure.get_figheight())
    return figure


def without_variants(task: Comparison) -> Comparison:
    """The methods as the profile has them: what was run with other settings would set the scale. All, if those are."""
    groups = tuple(group for group in task.groups if group.kind != VARIANT)
    return replace(task, groups=groups) if groups else task


def _frame(panels: int, legend_lines: int) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side with room for legends below. Places are given: to find them takes longer than to draw."""
    width, below = PANEL_WIDTH * panels + 0.8, 0.6 + 0.17 * legend_lines
    height = PANEL_HEIGHT + below + 0.55
    figure = Figure(figsize=(width, height))
    edges = {"left": 0.75 / width, "right": 1 - 0.1 / width, "top": 1 - 0.55 / height, "bottom": below / height}
    axes = figure.subplots(1, panels, sharey=True, squeeze=False, gridspec_kw={**edges, "wspace": 0.08})
    return figure, axes[0]


def _panels(task: Comparison) -> Iterator[tuple[str, list[Group]]]:
    base = [group for group in task.groups if group.variant == BASE]
    for title, kinds in PANELS:
        groups = [group for group in task.groups if group.kind in kinds and group.variant != BASE]
        if groups or (base and kinds == PANELS[0][1]):
            yield title, base + groups[:MOST_VARIANTS]


def _draw_panel(axes: Axes, task: Comparison, groups: Sequence[Group], metric: str, budget: str) -> None:
    looks = styles(task)
    for group in groups:
        _draw_group(axes, group, metric, budget, looks[group.variant])
    for (name, value), dash in zip(reference_lines(task, metric).items(), cycle(DASHES.values())):
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
    """A row for each picture: exact, predicted, error."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(9.5, 0.4 + 2.5 * len(pictures)), layout="constrained")
        all_axes = figure.subplots(len(pictures), 3, sharex=True, sharey=True, squeeze=False)
        for row, picture in zip(all_axes, pictures, strict=True):
            _draw_picture(row, picture)
        for axes in all_axes[-1]:
            axes.set_xlabel("t")
        figure.suptitle(title, fontsize=11)
    return figure


def _draw_picture(row: Sequence[Axes], picture: Picture) -> None:
    size, off = np.abs(picture.exact).max(), np.abs(picture.error).max()
    fields = (("exact", picture.exact, size), (picture.label, picture.predicted, size), ("error", picture.error, off))
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
        axes.legend()
    return figure


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
