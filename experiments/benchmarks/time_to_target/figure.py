"""The performance profile as a picture."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import legend, panels, styled, styles, ticks
from experiments.methods import METHODS
from experiments.statistics import profile

from .scores import COST, TIME, Costs, Races, to_target

FARTHEST = 8.0
"""Times the least cost, to the right edge."""
PANELS = {COST: "counted cost", TIME: "processor time"}


@styled
def draw_profile(races: Races) -> Figure:
    """Two panels, cost and time, with one legend."""
    figure, all_axes = panels(2, 2, (4.0, 4.8), (0, 0), sharey=True)
    for axes, (unit, name) in zip(all_axes, PANELS.items(), strict=True):
        draw_panel(axes, to_target(races, unit))
        axes.set_xlabel(f"{name}, in units of the least")
    all_axes[0].set_ylabel("share of problems solved")
    legend(figure, all_axes[:1], 3, "outside lower center")
    return figure


def draw_panel(axes: Axes, costs: Costs) -> None:
    """A staircase for each method, from nothing at 1 and on to the right edge."""
    problems, looks = max(map(len, costs.values())), styles(costs)
    for method, (factors, solved) in profile(costs).items():
        label = METHODS[method].label + (f" ({len(costs[method])} problems)" if len(costs[method]) < problems else "")
        width = 2.4 if METHODS[method].kind == "ours" else 1.2
        x, y = [1.0, *factors, max([FARTHEST, *factors])], [0.0, *solved, max([0.0, *solved])]
        axes.step(x, y, where="post", linewidth=width, label=label, **looks[method].line)
    axes.set(xscale="log", xlim=(1, FARTHEST), ylim=(0, 1.02))
    ticks(axes.xaxis, (1, 2, 4, 8))
