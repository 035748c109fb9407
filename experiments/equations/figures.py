"""The figures: error against processor time, and the picture of Burgers' equation."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ..figures import LOOK
from .case import Problem
from .clock import marks
from .problems import PROBLEMS, burgers_solution
from .race import Entry
from .scores import FAILED, OURS, Score, Scores, error_at

PICTURED = "burgers2d"
SHOWN = ("adam", "soap", OURS)
"""Families and method in the picture."""
SECONDS = (1, 2, 5, 10, 20, 60, 120, 600)
"""Ticks of processor time."""
LINES: dict[str, tuple[str, str]] = {
    "gauss-newton-adam": ("GaussNewton(Adam)", "#d55e00"),
    "gauss-newton-soap": ("GaussNewton(SOAP)", "#cc79a7"),
    "adam": ("Adam, tuned", "#0072b2"),
    "soap": ("SOAP, tuned", "#009e73"),
    "adam-lbfgs": ("Adam, then L-BFGS", "#56b4e9"),
    "ssbroyden": ("Adam, then self-scaled Broyden", "#000000"),
    "levenberg-marquardt": ("torch-levenberg-marquardt", "#e69f00"),
}
"""Method or family -> label and colour."""


def draw_errors(scores: Scores, problems: Sequence[Problem]) -> Figure:
    """A panel for each problem."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(1 + 3.2 * len(problems), 3.6), layout="constrained")
        panels = list(figure.subplots(1, len(problems), squeeze=False).flat)
        for axes, problem in zip(panels, problems, strict=True):
            draw_problem(axes, scores, problem)
        panels[0].set_ylabel("test RMSE / deviation" if problems[0].data else "relative L2 error")
        figure.supxlabel("processor seconds")
        figure.legend(*legend(panels), loc="outside upper center", ncols=min(4, 1 + len(problems)))
    return figure


def draw_problem(axes: Axes, scores: Scores, problem: Problem) -> None:
    """A line for each method: geometric mean over seeds, with the range of seeds."""
    for name, score in longest(scores, problem.name):
        label, colour = LINES[name]
        times = marks(score.length)
        runs = score.runs.values()
        errors = np.array([[min(error_at(run, at), FAILED) for at in times] for run in runs])
        begun = [at >= max(run["times"][0] for run in runs) for at in times]
        times, errors = [at for at, yes in zip(times, begun, strict=True) if yes], errors[:, begun]
        axes.plot(times, np.exp(np.log(errors).mean(0)), color=colour, label=label)
        axes.fill_between(times, errors.min(0), errors.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log")
    shown = [at for at in SECONDS if axes.get_xlim()[0] <= at <= axes.get_xlim()[1]]
    axes.set_xticks(shown, [f"{at:g}" for at in shown])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(10 ** math.floor(math.log10(low)), min(high, 5.0))  # at least one tick besides the largest
    axes.set_title(problem.title)


def longest(scores: Scores, problem: str) -> Iterator[tuple[str, Score]]:
    """The best variant of each method or family at the last time that it reaches."""
    for name in LINES:
        methods = scores.family(problem, name) or [name]
        for seconds in reversed(scores.times(problem)):
            if score := scores.at(problem, methods, seconds):
                yield name, score
                break


def legend(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """Every label once, wherever it appears."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


# The picture


def draw_picture(scores: Scores, results: Path) -> Figure | None:
    """The exact solution of Burgers' equation and the errors of Adam, SOAP and ours; None without their runs."""
    shown = pictured(scores, results)
    if shown is None:
        return None
    seconds, errors = shown
    exact = burgers_solution()[1].numpy().reshape(shape())
    size = float(np.linalg.norm(exact))
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(11, 2.6), layout="constrained")
        first, *others = figure.subplots(1, 4, sharey=True)
        figure.colorbar(show_map(first, exact, cmap="RdBu_r", vmin=-1, vmax=1), ax=first)
        first.set(title="Burgers' equation, exact", ylabel="x")
        norm = LogNorm(1e-7, 1.0)
        for axes, (label, error) in zip(others, errors.items(), strict=True):
            image = show_map(axes, np.abs(error).clip(1e-12), cmap="magma", norm=norm)
            axes.set_title(f"{label}: {np.linalg.norm(error) / size:.1e}")
        figure.colorbar(image, ax=others, label=f"|error| after {seconds:g} s")
        for axes in (first, *others):
            axes.set_xlabel("t")
    return figure


def show_map(axes: Axes, values: Any, **look: Any) -> Any:
    """Values over time and place."""
    return axes.imshow(values.T, origin="lower", extent=(0, 1, -1, 1), aspect="auto", **look)


def shape() -> tuple[int, int]:
    """Times and places of the grid."""
    found = PROBLEMS[PICTURED].picture
    assert found is not None
    return found


def pictured(scores: Scores, results: Path) -> tuple[float, dict[str, Any]] | None:
    """The longest time at which errors of all three were kept, and these on the seed that is most typical of ours."""
    if not any(each["problem"] == PICTURED for each in scores.records):
        return None
    for seconds in reversed(scores.times(PICTURED)):
        found = {name: scores.at(PICTURED, scores.family(PICTURED, name) or [name], seconds) for name in SHOWN}
        chosen = {name: score for name, score in found.items() if score is not None}
        if len(chosen) < len(SHOWN):
            continue
        ours = chosen[OURS]
        seeds = set.intersection(*(set(score.errors) for score in chosen.values()))
        for seed in sorted(seeds, key=lambda seed: abs(math.log(ours.errors[seed] / ours.mean))):
            maps = {LINES[name][0]: error_map(results, score, seed, seconds) for name, score in chosen.items()}
            if all(each is not None for each in maps.values()):
                return seconds, maps
    return None


def error_map(results: Path, score: Score, seed: int, seconds: float) -> Any:
    """The errors of a run at all test points at this time; None if they were not kept."""
    path = Entry(PICTURED, score.method, score.rate, seed, score.runs[seed]["seconds"]).arrays_file(results)
    if not path.exists():
        return None
    with np.load(path) as arrays:
        name = f"{seconds:g}"
        return arrays[name].reshape(shape()) if name in arrays else None
