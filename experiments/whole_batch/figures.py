"""The figures: gradients against the learning rate, and the gain against the batch size."""

from math import inf, isfinite, isinf, nan

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..figures import BLUE, GREEN, VERMILION, legend, panels, styled, ticks
from ..optimizers import LABELS
from ..statistics import geometric_mean, median
from .problems import BASES, PROBLEMS, Problem
from .scores import LBFGS, ByBatch, Scores

COLOURS = {"sgd": BLUE, "nesterov": GREEN, "adam": VERMILION}
COLUMNS = 3
BEYOND = {"sgd": 1.25, "nesterov": 1.45, "adam": 1.68}
"""Where the target was not reached, a cross is drawn at this many times the allowed gradients."""
MEASURES = {"loss": "final loss / base's", "accepted": "jumps", "time": "time / base's"}


@styled
def draw_rates(scores: Scores) -> Figure:
    """A panel for each problem: gradients to target against the learning rate."""
    figure, all_axes = panels(len(scores.problems), COLUMNS, (3.3, 2.3), (0, 0.8))
    for axes, problem in zip(all_axes, scores.problems, strict=True):
        draw_problem(axes, scores, problem)
    figure.supylabel("gradients to target (× not reached)")
    figure.supxlabel("learning rate")
    legend(figure, all_axes, 4)
    return figure


def heading(problem: Problem) -> str:
    """The problem's title."""
    return problem.title + (" (held out)" if problem.held_out else "")


def draw_problem(axes: Axes, scores: Scores, problem: Problem) -> None:
    """The bases dashed, the accelerated bases solid, L-BFGS as a horizontal line.

    Medians over seeds; rates at which the target was not reached have a cross at the top.
    """
    name = problem.name
    for base in BASES:
        for method, label, dash, size in (
            (base, LABELS[base], "--", 3),
            (f"anderson-{base}", f"Anderson({LABELS[base]})", "-", 5),
        ):
            rates = [rate for rate in scores.rates(name, method) if rate is not None]
            counts = {rate: median(list(scores.counts(name, method, rate).values())) for rate in rates}
            reached = [count if isfinite(count) else nan for count in counts.values()]
            axes.plot(rates, reached, color=COLOURS[base], linestyle=dash, marker="o", markersize=3, label=label)
            lost = [rate for rate, count in counts.items() if isinf(count)]
            top = [BEYOND[base] * problem.gradients] * len(lost)
            axes.plot(lost, top, "x", color=COLOURS[base], markersize=size)
    best = scores.best(name, LBFGS)
    count = median(list(scores.counts(name, *best).values())) if best else inf
    if isfinite(count):
        axes.axhline(count, color="black", linewidth=0.9, label="L-BFGS")
    axes.set_title(heading(problem), fontsize=8)
    tried = [rate for base in BASES for rate in problem.rates[base]]
    axes.set(xscale="log", yscale="log", xlim=(min(tried) / 1.5, 1.5 * max(tried)), ylim=(3, 2 * problem.gradients))
    ticks(axes.yaxis, [5, 10, 20, 50, 100, 200])


@styled
def draw_batches(measured: ByBatch) -> Figure:
    """A column for each problem: final loss, jumps and time against the batch size."""
    problems = list(dict.fromkeys(problem for problem, *_ in measured))
    figure, all_axes = panels(len(MEASURES) * len(problems), len(problems), (2.9, 2.1), (2, 0.1), sharex="col")
    for place, axes in enumerate(all_axes):
        row, column = divmod(place, len(problems))
        draw_measure(axes, measured, problems[column], list(MEASURES)[row])
        if row == 0:
            axes.set_title(PROBLEMS[problems[column]].title)
        if row == len(MEASURES) - 1:
            axes.set_xlabel("batch size")
        if column == 0:
            axes.set_ylabel(list(MEASURES.values())[row])
    legend(figure, all_axes, 3)
    return figure


def draw_measure(axes: Axes, measured: ByBatch, problem: str, name: str) -> None:
    """A line for each base with the range over seeds."""
    sizes = sorted({size for each, _, size in measured if each == problem})
    for base in BASES:
        cells = {size: measured[problem, base, size][name] for size in sizes if (problem, base, size) in measured}
        means = [sum(each) / len(each) if name == "accepted" else geometric_mean(each) for each in cells.values()]
        axes.plot(list(cells), means, "o-", color=COLOURS[base], markersize=3, label=f"Anderson({LABELS[base]})")
        low, high = ([choose(values) for values in cells.values()] for choose in (min, max))
        axes.fill_between(list(cells), low, high, color=COLOURS[base], alpha=0.15, linewidth=0)
    if name != "accepted":
        axes.axhline(1, color="black", linewidth=0.7)
    axes.set(xscale="log", yscale={"loss": "log", "accepted": "symlog", "time": "linear"}[name])
    if name == "accepted":
        axes.set_ylim(bottom=0)
    ticks(axes.xaxis, sizes, lambda size: "whole" if size == sizes[-1] else f"{size:g}")
    axes.tick_params(axis="x", labelsize=7)
