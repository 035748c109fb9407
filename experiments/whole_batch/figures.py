"""The figures: gradients against the learning rate, and the gain against the batch size."""

import math
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..figures import LOOK
from ..optimizers import LABELS
from .problems import BASES, PROBLEMS, Problem
from .ratios import ByBatch
from .scores import LBFGS, Scores, middle

COLOURS = {"sgd": "#0072b2", "nesterov": "#009e73", "adam": "#d55e00"}
COLUMNS = 3
BEYOND = {"sgd": 1.25, "nesterov": 1.45, "adam": 1.68}
"""Where the target was not reached, a cross is drawn at this many times the allowed gradients."""
MEASURES = {"loss": "final loss / base's", "accepted": "jumps", "time": "time / base's"}


def draw_rates(scores: Scores) -> Figure:
    """A panel for each problem: gradients to target against the learning rate."""
    rows = -(-len(scores.problems) // COLUMNS)
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(3.3 * COLUMNS, 0.8 + 2.3 * rows), layout="constrained")
        axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        for each, problem in zip(axes, scores.problems, strict=False):
            draw_problem(each, scores, problem)
        for spare in axes[len(scores.problems) :]:
            spare.remove()
        figure.supylabel("gradients to target (× not reached)")
        figure.supxlabel("learning rate")
        figure.legend(*legend(axes[: len(scores.problems)]), loc="outside upper center", ncols=4)
    return figure


def draw_problem(axes: Axes, scores: Scores, problem: Problem) -> None:
    """The bases dashed, the accelerated bases solid, L-BFGS as a horizontal line."""
    for base in BASES:
        draw_line(axes, scores, problem, base, {"linestyle": "--", "label": LABELS[base]})
        draw_line(axes, scores, problem, f"anderson-{base}", {"linestyle": "-", "label": f"Anderson({LABELS[base]})"})
    best = scores.best(problem.name, LBFGS)
    count = middle(scores.counts(problem.name, *best).values()) if best else math.inf
    if math.isfinite(count):
        axes.axhline(count, color="black", linewidth=0.9, label="L-BFGS")
    axes.set_title(problem.title + (" (held out)" if problem.held_out else ""), fontsize=8)
    rates = [rate for base in BASES for rate in problem.rates[base]]
    axes.set(xscale="log", yscale="log", xlim=(min(rates) / 1.5, 1.5 * max(rates)), ylim=(3, 2 * problem.gradients))
    plain_ticks(axes)


def draw_line(axes: Axes, scores: Scores, problem: Problem, method: str, look: dict[str, Any]) -> None:
    """Medians over seeds; rates at which the target was not reached have a cross at the top."""
    rates = [rate for rate in scores.rates(problem.name, method) if rate is not None]
    counts = [middle(scores.counts(problem.name, method, rate).values()) for rate in rates]
    base = method.rpartition("-")[2]
    colour = COLOURS[base]
    reached = [count if math.isfinite(count) else math.nan for count in counts]
    axes.plot(rates, reached, color=colour, marker="o", markersize=3, **look)
    lost = [rate for rate, count in zip(rates, counts, strict=True) if math.isinf(count)]
    size = 5 if look["linestyle"] == "-" else 3
    axes.plot(lost, [BEYOND[base] * problem.gradients] * len(lost), "x", color=colour, markersize=size)


def plain_ticks(axes: Axes) -> None:
    """Counts as plain numbers."""
    axes.yaxis.set_major_locator(FixedLocator([5, 10, 20, 50, 100, 200]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def legend(all_axes: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """Every label once, wherever it appears."""
    found: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def draw_batches(measured: ByBatch) -> Figure:
    """A column for each problem: final loss, jumps and time against the batch size."""
    problems = list(dict.fromkeys(problem for problem, *_ in measured))
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(2 + 2.9 * len(problems), 6.4), layout="constrained")
        grid = figure.subplots(len(MEASURES), len(problems), squeeze=False, sharex="col")
        for column, problem in enumerate(problems):
            for row, name in enumerate(MEASURES):
                draw_measure(grid[row][column], measured, problem, name)
            grid[0][column].set_title(PROBLEMS[problem].title)
            grid[-1][column].set_xlabel("batch size")
        for line, label in zip(grid, MEASURES.values(), strict=True):
            line[0].set_ylabel(label)
        figure.legend(*legend(list(grid.flat)), loc="outside upper center", ncols=3)
    return figure


def draw_measure(axes: Axes, measured: ByBatch, problem: str, name: str) -> None:
    """A line for each base with the range over seeds."""
    sizes = sorted({size for each, _, size in measured if each == problem})
    for base in BASES:
        cells = {size: measured[problem, base, size][name] for size in sizes if (problem, base, size) in measured}
        mean = geometric_mean if name != "accepted" else lambda values: sum(values) / len(values)
        axes.plot(list(cells), [mean(values) for values in cells.values()], "o-", color=COLOURS[base], markersize=3,
                  label=f"Anderson({LABELS[base]})")  # fmt: skip
        low, high = ([choose(values) for values in cells.values()] for choose in (min, max))
        axes.fill_between(list(cells), low, high, color=COLOURS[base], alpha=0.15, linewidth=0)
    if name != "accepted":
        axes.axhline(1, color="black", linewidth=0.7)
    scale = "log" if name == "loss" else "symlog" if name == "accepted" else "linear"
    axes.set(xscale="log", yscale=scale, xticks=sizes)
    if name == "accepted":
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: "whole" if tick == sizes[-1] else f"{tick:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=7)
