"""The figures: error against processor time, and the picture of Burgers' equation."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ..figures import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, legend, panels, styled, ticks
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
    "gauss-newton-adam": ("GaussNewton(Adam)", VERMILION),
    "gauss-newton-soap": ("GaussNewton(SOAP)", PURPLE),
    "adam": ("Adam, tuned", BLUE),
    "soap": ("SOAP, tuned", GREEN),
    "adam-lbfgs": ("Adam, then L-BFGS", SKY),
    "ssbroyden": ("Adam, then self-scaled Broyden", BLACK),
    "levenberg-marquardt": ("torch-levenberg-marquardt", ORANGE),
}
"""Method or family -> label and colour."""


@styled
def draw_errors(scores: Scores, problems: Sequence[Problem]) -> Figure:
    """A panel for each problem."""
    figure, all_axes = panels(len(problems), len(problems), (3.2, 3.6), (1, 0))
    for axes, problem in zip(all_axes, problems, strict=True):
        draw_problem(axes, scores, problem)
    all_axes[0].set_ylabel("test RMSE / deviation" if problems[0].data else "relative L2 error")
    figure.supxlabel("processor seconds")
    legend(figure, all_axes, min(4, 1 + len(problems)))
    return figure


def draw_problem(axes: Axes, scores: Scores, problem: Problem) -> None:
    """A line for the best variant of each method or family: geometric mean over seeds, with the range of seeds."""
    for name, (label, colour) in LINES.items():
        methods = scores.family(problem.name, name) or [name]
        found = [scores.at(problem.name, methods, seconds) for seconds in scores.times(problem.name)]
        if not any(found):
            continue
        score = [each for each in found if each][-1]  # at the last time that it reaches
        runs = score.runs.values()
        times = [at for at in marks(score.length) if at >= max(run["times"][0] for run in runs)]
        errors = np.array([[min(error_at(run, at), FAILED) for at in times] for run in runs])
        axes.plot(times, np.exp(np.log(errors).mean(0)), color=colour, label=label)
        axes.fill_between(times, errors.min(0), errors.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log")
    axes.minorticks_off()
    first, last = axes.get_xlim()
    ticks(axes.xaxis, [at for at in SECONDS if first <= at <= last])
    low, high = axes.get_ylim()
    axes.set_ylim(10 ** math.floor(math.log10(low)), min(high, 5.0))  # at least one tick besides the largest
    axes.set_title(problem.title)


# The picture


@styled
def draw_picture(scores: Scores, results: Path) -> Figure | None:
    """The exact solution of Burgers' equation and the errors of Adam, SOAP and ours; None without their runs."""
    shown = pictured(scores, results)
    if shown is None:
        return None
    seconds, errors = shown
    exact = burgers_solution()[1].numpy().reshape(shape())
    size = float(np.linalg.norm(exact))
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    first, *others = figure.subplots(1, 4, sharey=True)
    place: dict[str, Any] = {"origin": "lower", "extent": (0, 1, -1, 1), "aspect": "auto"}
    figure.colorbar(first.imshow(exact.T, cmap="RdBu_r", vmin=-1, vmax=1, **place), ax=first)
    first.set(title="Burgers' equation, exact", ylabel="x", xlabel="t")
    norm = LogNorm(1e-7, 1.0)
    for axes, (label, error) in zip(others, errors.items(), strict=True):
        image = axes.imshow(np.abs(error).clip(1e-12).T, cmap="magma", norm=norm, **place)
        axes.set(title=f"{label}: {np.linalg.norm(error) / size:.1e}", xlabel="t")
    figure.colorbar(image, ax=others, label=f"|error| after {seconds:g} s")
    return figure


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
