"""Memory per rank against the number of ranks."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.curves import BLUE, GREEN, GREY, VERMILION
from experiments.figures import LOOK

from .checks import FULL, Check
from .costs import LAYOUTS, bytes_a_number, kept_bytes
from .models import MODELS, Model
from .units import in_bytes

MARKED = [1, 6, 64, 384, 1536]
DRAWN = sorted({*MARKED, *(2**i for i in range(12)), 96, 192, 768})
LOOKS = {"ddp": (VERMILION, "-"), "ddp-sharded": (BLUE, "-"), "fsdp2": (GREEN, "-")}
NAMES = {"fsdp2": "FSDP2, or DDP with the history sharded over all"}
"""These two keep the same rows."""


def draw_memory(checks: Sequence[Check]) -> Figure:
    """A panel for each model; dots are the bytes that the library keeps."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(9.4, 3.9))
        edges = {"left": 0.09, "right": 0.985, "top": 0.92, "bottom": 0.28, "wspace": 0.33}
        panels = figure.subplots(1, len(MODELS), gridspec_kw=edges)
        for axes, (name, model) in zip(panels, MODELS.items(), strict=True):
            _draw_panel(axes, model, [check for check in checks if check.model == name and drawn(check)])
            axes.set_title(f"{model.title}, m = {FULL.history_size}, float32")
        panels[0].set_ylabel("history on the fullest rank")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    return figure


def drawn(check: Check) -> bool:
    """Whether a check is a dot of the figure."""
    return check.what == "bytes kept" and check.history_size == FULL.history_size and check.rank == 0


def _draw_panel(axes: Axes, model: Model, checks: Sequence[Check]) -> None:
    whole = bytes_a_number(FULL) * model.count
    for layout, (colour, dash) in LOOKS.items():
        paper = [kept_bytes(model.shapes, LAYOUTS[layout], ranks, FULL) for ranks in DRAWN]
        axes.plot(DRAWN, paper, dash, color=colour, label=NAMES.get(layout, LAYOUTS[layout].title))
        found = {check.ranks: check.found for check in checks if check.layout == layout}
        axes.plot(list(found), list(found.values()), "o", color=colour, markersize=4.5)
    axes.plot(DRAWN, [whole / ranks for ranks in DRAWN], ":", color=GREY, label="1/N of all")
    axes.plot([], [], "o", color="black", markersize=4.5, label="the library, simulated")
    axes.set(xscale="log", yscale="log", xlabel="ranks N", ylim=(whole / 4000, 2.5 * whole))
    axes.set_xticks(MARKED, [f"{ranks:,}" for ranks in MARKED])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value).replace(".00", "").replace(".0", "")))
