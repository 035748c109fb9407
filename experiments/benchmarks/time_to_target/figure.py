"""The performance profile as a picture."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.curves import OTHERS, STYLES, Style
from experiments.figures import DASHES, LOOK
from experiments.methods import METHODS
from experiments.results import Run

from .field import BASE, metric
from .scores import COST, TIME, Problem, profile, reach, value

FARTHEST = 8.0
"""Times the least cost, to the right edge."""
LEGEND_COLUMNS = 3
PANELS = {COST: "counted cost", TIME: "processor time"}
Races = Mapping[str, Mapping[str, Mapping[int, Run]]]
"""Task -> method -> seed -> run."""


def to_target(races: Races, unit: str) -> dict[str, dict[Problem, float]]:
    """Method -> problem -> cost or time to the base's best; in the order in which methods are shown."""
    found: dict[str, dict[Problem, float]] = {}
    for task, methods in races.items():
        ranked_by = metric(task)
        for method, runs in methods.items():
            for seed in runs.keys() & methods[BASE].keys():
                target = value(methods[BASE][seed], ranked_by, "best")
                found.setdefault(method, {})[task, seed] = reach(runs[seed], ranked_by, target, unit)
    return {method: found[method] for method in METHODS if method in found}


def draw_profile(races: Races) -> Figure:
    """Two panels, cost and time, with one legend."""
    with mpl.rc_context(LOOK):
        lines = -(-len(to_target(races, COST)) // LEGEND_COLUMNS)
        bottom = 0.16 + 0.045 * lines
        figure = Figure(figsize=(8.0, 4.8))
        axes = figure.subplots(
            1, 2, sharey=True, gridspec_kw={"bottom": bottom, "top": 0.97, "right": 0.98, "left": 0.08}
        )
        for each, (unit, name) in zip(axes, PANELS.items(), strict=True):
            draw_panel(each, to_target(races, unit))
            each.set_xlabel(f"{name}, in units of the least")
        axes[0].set_ylabel("share of problems solved")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=LEGEND_COLUMNS)
    return figure


def draw_panel(axes: mpl.axes.Axes, shares: Mapping[str, Mapping[Problem, float]]) -> None:
    """A staircase for each method."""
    problems = max(map(len, shares.values()))
    for (method, (factors, solved)), look in zip(profile(shares).items(), styles(list(shares)), strict=True):
        label = METHODS[method].label + (f" ({len(shares[method])} problems)" if len(shares[method]) < problems else "")
        width = 2.4 if METHODS[method].kind == "ours" else 1.2
        # From nothing at 1, and on to the right edge.
        x, y = [1.0, *factors, max([FARTHEST, *factors])], [0.0, *solved, max([0.0, *solved])]
        axes.step(x, y, where="post", color=look.colour, linestyle=DASHES[look.dash], linewidth=width, label=label)
    axes.set(xscale="log", xlim=(1, FARTHEST), ylim=(0, 1.02), xticks=(1, 2, 4, 8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def styles(methods: Sequence[str]) -> list[Style]:
    """That of the tasks' figures; spare ones for methods that have none there."""
    spare = cycle(OTHERS)
    return [STYLES.get(method) or next(spare) for method in methods]
