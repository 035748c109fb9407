"""The style of all figures, and what drawing them has in common; matplotlib, saved as PNG and PDF."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import cycle
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, NullLocator

FORMATS = ("png", "pdf")
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
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
GREY, BLUE, VERMILION, GREEN = "#707070", "#0072b2", "#d55e00", "#00b386"
SKY, ORANGE, PURPLE, OLIVE, WINE, BLACK = "#56b4e9", "#e69f00", "#cc79a7", "#8c8c2e", "#aa4466", "#000000"


@dataclass(frozen=True)
class Style:
    """How a method is drawn."""

    colour: str
    dash: str = "solid"
    """As plotly calls it: solid, dash, dot, dashdot."""

    @property
    def line(self) -> dict[str, Any]:
        """For matplotlib."""
        return {"color": self.colour, "linestyle": DASHES[self.dash]}


STYLES = {
    "base": Style(GREY),
    "anderson": Style(BLUE),
    "anderson+average": Style(VERMILION),
    "average": Style(GREEN),
    # A control has the colour of what it is to be compared with.
    "matched-anderson": Style(BLUE, "dash"),
    "matched-average": Style(GREEN, "dash"),
    "matched-anderson+average": Style(VERMILION, "dash"),
    "base-tuned": Style(GREY, "dash"),
    "anderson-default": Style(SKY),
    "gauss-newton-tangent": Style(BLACK),
    "ema": Style(PURPLE, "dot"),
    "swa": Style(ORANGE, "dot"),
    "lookahead": Style(SKY, "dot"),
    "schedule-free": Style(OLIVE, "dashdot"),
    "lbfgs": Style(WINE, "dashdot"),
    "adamw-cosine": Style(VERMILION, "dot"),
    "soap": Style(GREEN, "dashdot"),
    "muon": Style(BLUE, "dashdot"),
    "aadl": Style(BLUE, "dot"),
}
"""Lines in one figure can be distinguished with any kind of colour vision (after Okabe and Ito; Tol), or by dashes."""
OTHERS = [Style(colour, dash) for dash in ("dashdot", "dot", "dash") for colour in (PURPLE, ORANGE, SKY, OLIVE, WINE)]
"""For variants and methods that are not in the table, in turn."""


def styles(names: Iterable[str], others: Sequence[Style] = OTHERS) -> dict[str, Style]:
    """Method, variant or series -> how it is drawn; those without a style of their own take the others in turn."""
    spare = cycle(others)
    return {name: STYLES[name] if name in STYLES else next(spare) for name in names}


Arguments = ParamSpec("Arguments")
Drawn = TypeVar("Drawn")


def styled(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    """Decorate a function that draws a figure: it is drawn in our style."""

    @wraps(draw)
    def drawn(*arguments: Arguments.args, **named: Arguments.kwargs) -> Drawn:
        with mpl.rc_context(LOOK):
            return draw(*arguments, **named)

    return drawn


def panels(
    count: int, columns: int, size: tuple[float, float], room: tuple[float, float], **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with so many axes, row by row in at most so many columns; size of each and room around, in inches."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(room[0] + size[0] * columns, room[1] + size[1] * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def legend(figure: Figure, all_axes: Iterable[Axes], columns: int, where: Any = "outside upper center") -> None:
    """One legend for all axes: every label once, wherever it appears."""
    found: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(list(found.values()), list(found), loc=where, ncols=columns)


def ticks(axis: Axis, values: Sequence[float], text: Callable[[float], str] = "{:g}".format) -> None:
    """Ticks at these values alone, as plain numbers."""
    axis.set_ticks(list(values), [text(value) for value in values])
    axis.set_minor_locator(NullLocator())


class PlainNumbers(LogFormatterSciNotation):
    """On a logarithmic axis, 0.2 and 50 as one writes them; only what is very small or large as a power."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The text of a tick; empty for those that are not labelled."""
        text = super().__call__(x, pos)
        return f"{x:g}" if text and 1e-3 <= x < 1e5 else text


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure in all formats."""
    with mpl.rc_context(LOOK):
        for extension in FORMATS:
            figure.savefig(folder / f"{name}.{extension}")
