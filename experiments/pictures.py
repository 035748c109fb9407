"""Pictures of solutions: the exact one, that of a network, and its error."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np
from matplotlib.figure import Figure

from . import statistics as st
from .comparison import BASE, Comparison, Group
from .figures import styled
from .results import PICTURES, DamagedRun
from .seeds import against, restricted, typical_seed


@dataclass(frozen=True)
class Picture:
    """The solution of a network and the exact one: rows along x, columns along t."""

    label: str
    seed: int
    x: st.Floats
    t: st.Floats
    exact: st.Floats
    predicted: st.Floats
    against: st.Paired | None = None
    """How the method ended against the base."""

    @property
    def error(self) -> st.Floats:
        """Predicted less exact."""
        return self.predicted - self.exact


def pictures(task: Comparison) -> list[Picture]:
    """Pictures of the base and of the best other method, on a typical seed; raises ``DamagedRun``."""
    drawn = [group for group in map(_drawn, task.groups) if group.traces and not group.bracket]
    base = next((group for group in drawn if group.variant == BASE), None)
    others = [(group, against(group, base, task.metric)) for group in drawn if base and group is not base]
    others = sorted((pair for pair in others if pair[1].estimate.count), key=lambda pair: _rank(pair[1]))
    if not base or not others:
        return [_picture(group, group.seeds[0]) for group in drawn[:1]]
    best, result = others[0]
    seed = typical_seed(best, base, task.metric)
    return [_picture(base, seed), replace(_picture(best, seed), against=result)]


def _rank(result: st.Paired) -> tuple[float, float]:
    """The method with the lowest upper end of the interval, so that few or easy seeds do not make a method look best.

    With one seed, and therefore no interval, the ratio decides.
    """
    return result.estimate.high if isfinite(result.estimate.high) else inf, result.estimate.mean


def _drawn(group: Group) -> Group:
    """Its runs that have a picture, without reading it."""
    return replace(group, traces=tuple(t for t in group.finished if (t.run.folder / PICTURES).exists()))


def _picture(group: Group, seed: int) -> Picture:
    run = restricted(group, [seed]).traces[0].run
    arrays = run.pictures
    if missing := [name for name in ("x", "t", "exact", "predicted") if name not in arrays]:
        raise DamagedRun(f"{run.folder / PICTURES}: no {', '.join(missing)} in it")
    x, t = arrays["x"].ravel(), arrays["t"].ravel()
    exact, predicted = arrays["exact"], arrays["predicted"]
    if not exact.shape == predicted.shape == (x.size, t.size):
        raise DamagedRun(f"{run.folder / PICTURES}: pictures are not of {x.size} by {t.size} points")
    return Picture(group.label, seed, x, t, exact, predicted)


@styled
def draw_pictures(title: str, shown: Sequence[Picture]) -> Figure:
    """A row for each picture: exact, predicted, error; errors all on one scale."""
    figure = Figure(figsize=(9.5, 0.4 + 2.5 * len(shown)), layout="constrained")
    all_axes = figure.subplots(len(shown), 3, sharex=True, sharey=True, squeeze=False)
    worst = max(np.abs(picture.error).max() for picture in shown)
    for row, picture in zip(all_axes, shown, strict=True):
        size = np.abs(picture.exact).max()
        fields = {"exact": (picture.exact, size, "RdBu_r"), picture.label: (picture.predicted, size, "RdBu_r")}
        fields["error"] = (picture.error, worst, "PuOr_r")
        for axes, (name, (values, limit, colours)) in zip(row, fields.items(), strict=True):
            look = {"vmin": -limit, "vmax": limit, "cmap": colours, "shading": "gouraud", "rasterized": True}
            figure.colorbar(axes.pcolormesh(picture.t, picture.x, values, **look), ax=axes)
            axes.set_title(name)
        row[0].set_ylabel("x")
    for axes in all_axes[-1]:
        axes.set_xlabel("t")
    figure.suptitle(f"{title}, seed {shown[0].seed}", fontsize=11)
    return figure
