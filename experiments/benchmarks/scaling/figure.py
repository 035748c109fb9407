"""Memory per rank against the number of ranks."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.figures import BLUE, GREEN, GREY, VERMILION, legend, panels, styled, ticks
from experiments.text import scaled

from .checks import FULL, Check
from .costs import LAYOUTS, bytes_a_number, kept_bytes
from .models import MODELS, Model

MARKED = [1, 6, 64, 384, 1536]
DRAWN = sorted({*MARKED, *(2**i for i in range(12)), 96, 192, 768})
COLOURS = {"ddp": VERMILION, "ddp-sharded": BLUE, "fsdp2": GREEN}
NAMES = {"fsdp2": "FSDP2, or DDP with the history sharded over all"}
"""These two keep the same rows."""


@styled
def draw_memory(checks: Sequence[Check]) -> Figure:
    """A panel for each model; dots are the bytes that the library keeps."""
    figure, all_axes = panels(len(MODELS), len(MODELS), (3.13, 3.9), (0, 0))
    shown = [each for each in checks if each.what == "bytes kept" and each.history_size == FULL.history_size]
    for axes, (name, model) in zip(all_axes, MODELS.items(), strict=True):
        _draw_panel(axes, model, [check for check in shown if check.model == name and check.rank == 0])
        axes.set_title(f"{model.title}, m = {FULL.history_size}, float32")
    all_axes[0].set_ylabel("history on the fullest rank")
    legend(figure, all_axes, 3, "outside lower center")
    return figure


def _draw_panel(axes: Axes, model: Model, checks: Sequence[Check]) -> None:
    whole = bytes_a_number(FULL) * model.count
    for layout, colour in COLOURS.items():
        paper = [kept_bytes(model.shapes, LAYOUTS[layout], ranks, FULL) for ranks in DRAWN]
        axes.plot(DRAWN, paper, color=colour, label=NAMES.get(layout, LAYOUTS[layout].title))
        found = {check.ranks: check.found for check in checks if check.layout == layout}
        axes.plot(list(found), list(found.values()), "o", color=colour, markersize=4.5)
    axes.plot(DRAWN, [whole / ranks for ranks in DRAWN], ":", color=GREY, label="1/N of all")
    axes.plot([], [], "o", color="black", markersize=4.5, label="the library, simulated")
    axes.set(xscale="log", yscale="log", xlabel="ranks N", ylim=(whole / 4000, 2.5 * whole))
    ticks(axes.xaxis, MARKED, "{:,}".format)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scaled(value).replace(".00", "").replace(".0", "")))
