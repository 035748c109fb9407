"""The curves of a comparison: means over seeds with bands, what diverged, and how each method looks in all figures."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np

from . import statistics as st
from .comparison import BASE, TIME, Comparison, Group, Trace
from .results import PICTURES, DamagedRun
from .seeds import against, restricted, typical_seed

MOST_POINTS = 300
"""Largest number of points of a curve; more cannot be distinguished in a figure."""

BAND_ROOM = 3.0
"""On a logarithmic axis, a band may extend beyond all means by this factor before it is cut."""


@dataclass(frozen=True)
class Style:
    """How a method is drawn."""

    colour: str
    dash: str = "solid"
    """As plotly calls it: solid, dash, dot, dashdot."""


GREY, BLUE, VERMILION, GREEN = "#707070", "#0072b2", "#d55e00", "#00b386"
SKY, ORANGE, PURPLE, OLIVE, WINE, BLACK = "#56b4e9", "#e69f00", "#cc79a7", "#8c8c2e", "#aa4466", "#000000"
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


def styles(task: Comparison) -> dict[str, Style]:
    """Variant -> how it is drawn."""
    unknown = [group.variant for group in task.groups if group.variant not in STYLES]
    return STYLES | {variant: OTHERS[index % len(OTHERS)] for index, variant in enumerate(unknown)}


@dataclass(frozen=True)
class MeanCurve:
    """The mean over the seeds that finished; a band where there are two at least."""

    steps: st.Floats
    seconds: st.Floats
    """The mean time at which these steps were made."""
    mean: st.Floats
    low: st.Floats
    high: st.Floats

    def x(self, budget: str) -> st.Floats:
        """Along the axis of steps or of seconds."""
        return self.steps if budget == "step" else self.seconds


def mean_curve(group: Group, metric: str) -> MeanCurve | None:
    """Runs on a common grid, that of the longest one; None if no run finished with this metric.

    A run that stopped early holds its last value, and its time.
    """
    points = [found for trace in group.finished if (found := _points(trace, metric))[0].size]
    if not points:
        return None
    grid = st.thinned(max((steps for steps, _, _ in points), key=lambda steps: steps[-1]), MOST_POINTS)
    values = np.array([st.on_grid(steps, values, grid) for steps, _, values in points])
    seconds = np.array([st.on_grid(steps, seconds, grid) for steps, seconds, _ in points])
    return MeanCurve(grid, st.band(seconds)[0], *st.band(values))


def diverged_curves(group: Group, metric: str) -> Iterator[MeanCurve]:
    """Each diverged run, up to the divergence."""
    for trace in group.diverged:
        steps, seconds, values = _points(trace, metric)
        if steps.size:
            keep = np.searchsorted(steps, st.thinned(steps, MOST_POINTS))
            nothing = np.full(keep.size, np.nan)
            yield MeanCurve(steps[keep], seconds[keep], values[keep], nothing, nothing)


def _points(trace: Trace, metric: str) -> tuple[st.Floats, st.Floats, st.Floats]:
    """Steps, seconds and finite values of one run."""
    values = trace.column(metric)
    known = np.isfinite(values)
    return trace.column("step")[known], trace.column(TIME)[known], values[known]


def logarithmic(task: Comparison, metric: str) -> bool:
    """Whether the metric can be drawn on a logarithmic axis: all values are positive."""
    columns = (trace.column(metric) for group in task.groups for trace in group.traces)
    return all(bool((column[np.isfinite(column)] > 0).all()) for column in columns)


def reference_lines(task: Comparison, metric: str) -> dict[str, float]:
    """The references that the axis can show: a logarithmic axis has no zero."""
    means = {name: value.mean for name, value in task.references(metric).items()}
    return {name: mean for name, mean in means.items() if mean > 0 or not logarithmic(task, metric)}


def value_range(task: Comparison, metric: str) -> tuple[float, float] | None:
    """The range of an axis: means and references with room for their bands, but not everything that diverged.

    None if no run finished.
    """
    curves = [curve for group in task.groups if (curve := mean_curve(group, metric))]
    if not curves:
        return None
    middle = np.concatenate([*(c.mean for c in curves), list(reference_lines(task, metric).values())])
    ends = np.concatenate([middle, *(np.concatenate([c.low, c.high]) for c in curves)])
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    if logarithmic(task, metric):
        return max(low, np.nanmin(middle) / BAND_ROOM) / 1.1, min(high, np.nanmax(middle) * BAND_ROOM) * 1.1
    return low - (high - low) / 20, high + (high - low) / 20


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
