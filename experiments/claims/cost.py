"""The paper's claims about computational cost, judged by the CPU times of runs of this library.

The paper factorises R by QR; the library updates the Gram matrix of R's columns instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from ..comparison import settings_without
from ..results import Run
from ..statistics import geometric_mean
from . import evidence as ev
from .measures import FINAL, SECONDS, seconds_per_step
from .verdict import Claims, Curve, Finding

TASK = "admissions"
TOLERANCE = 0.25
"""Amount by which a measured exponent may exceed that of an upper bound."""
RESTORED = 1.1
"""Largest ratio to the base's cost that counts as restored."""
STUDY = "cost"
CLAIMS = Claims()

Formula = Callable[[int, int], float]
"""Work of the acceleration in a step, in units of n, from history_size and period."""


@dataclass(frozen=True)
class Point:
    """The CPU time of a step with some history_size and period."""

    size: int
    period: int
    seconds: float


def paper_formula(size: int, period: int) -> float:
    """A QR factorisation every period: m²/p."""
    return size**2 / period


def our_formula(size: int, period: int) -> float:
    """One row of the Gram matrix and two products with a vector every period, if pairs are stored as often: m/p."""
    return size / period


def timed(runs: Sequence[Run]) -> tuple[list[Run], ev.BySeed]:
    """Runs of Anderson that store as often as they accelerate, with those of base; raises ``Missing``."""
    chosen = [
        run for run in ev.select(runs, TASK, "anderson") if ev.setting(run, "store_period") == ev.setting(run, "period")
    ]
    problems: dict[str, list[Run]] = {}
    for run in chosen:
        problems.setdefault(settings_without(run, ("history_size", "period", "store_period")), []).append(run)
    found = max(problems.values(), key=lambda group: len(set(map(sizes, group))), default=[])
    base = ev.by_seed(ev.select(ev.same_problem(runs, found[0]), TASK, "base")) if found else {}
    if len(base) < ev.LEAST_SEEDS or len(set(map(sizes, found))) < 3:
        raise ev.from_study(
            STUDY, "No three settings of history_size and period with runs of base on the same problem."
        )
    return found, base


def sizes(run: Run) -> tuple[int, int]:
    """history_size and period."""
    return ev.setting(run, "history_size"), ev.setting(run, "period")


def points(found: Sequence[Run], base: ev.BySeed) -> list[Point]:
    """Geometric means over seeds, base as a history of size 0."""
    times = {(0, 1): [seconds_per_step(run) for run in base.values()]}
    for run in sorted(found, key=sizes):
        times.setdefault(sizes(run), []).append(seconds_per_step(run))
    return [Point(*key, geometric_mean(seconds)) for key, seconds in times.items()]


def fit(measured: Sequence[Point], formula: Formula) -> tuple[float, float, float]:
    """The two constants of base + work that fit best, by relative errors, and the largest relative error left.

    >>> fit([Point(0, 1, 1.0), Point(2, 1, 3.0), Point(4, 2, 5.0)], lambda m, p: m**2 / p)
    (1.0, 0.5, 0.0)
    """
    work = np.array([[1.0, formula(point.size, point.period)] for point in measured])
    seconds = np.array([point.seconds for point in measured])
    constants, _ = nnls(work / seconds[:, None], np.ones(len(measured)))
    error = np.abs(work @ constants / seconds - 1).max()
    first, second, largest = np.round([*constants, error], 15).tolist()
    return first, second, largest


@CLAIMS.claim(
    "cost: formula",
    "Section Computational cost",
    "Training costs O(I B n + floor(I/p) n m²): AA adds at most of the order of m² per acceleration.",
)
def cost_formula(runs: Sequence[Run]) -> Finding:
    """Judged as the upper bound that O() is, with the library's solver in place of the paper's QR factorisation.
    Reproduced if the CPU time that an acceleration at each step adds grows from one history_size to the next with an
    exponent of at most 2.25.
    """
    measured = points(*timed(runs))
    errors = {name: fit(measured, formula)[2] for name, formula in (("m²/p", paper_formula), ("m/p", our_formula))}
    fits = ", ".join(f"{error:.0%} with {name}" for name, error in errors.items())
    numbers = f"{exponent_text(measured)}. Largest error of base + constant times a formula, both fitted: {fits}."
    return Finding(within_bound(measured), numbers, cost_figure(measured))


def overhead(measured: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Milliseconds that an acceleration at each step adds, by history_size."""
    base = measured[0].seconds
    extra = [(float(p.size), 1e3 * (p.seconds - base)) for p in measured[1:] if p.period == 1 and p.seconds > base]
    return [size for size, _ in extra], [milliseconds for _, milliseconds in extra]


def exponent_text(measured: Sequence[Point]) -> str:
    """How the overhead grows with history_size."""
    at, extra = overhead(measured)
    if len(at) < 2:
        return "No overhead measured"
    pairs = ", ".join(f"{milliseconds:.3g} ms at m = {size:g}" for size, milliseconds in zip(at, extra, strict=True))
    return f"An acceleration adds {pairs}, exponent of m {np.polyfit(np.log(at), np.log(extra), 1)[0]:.2f}"


def within_bound(measured: Sequence[Point]) -> bool | None:
    """Whether the overhead grows no faster than m²; None if it was measured at fewer than two sizes."""
    at, extra = overhead(measured)
    if len(at) < 2:
        return None
    growth = np.diff(np.log(extra)) / np.diff(np.log(at))
    return bool(np.all(growth <= 2 + TOLERANCE))


def cost_figure(measured: Sequence[Point]) -> Curve:
    """Overhead by history_size, measured and by both formulas."""
    at, extra = overhead(measured)
    lines = {"measured": (at, extra)}
    for name, formula in (("m", our_formula), ("m²", paper_formula)):
        constant = fit(measured, formula)[1]
        lines[name] = (at, [1e3 * constant * formula(int(size), 1) for size in at])
    return ev.trend_figure("Cost of an acceleration", "history_size", "milliseconds", **lines)


@CLAIMS.claim("cost: larger p", "Section Computational cost", "The cost of AA can be mitigated by increasing p.")
def cost_period(runs: Sequence[Run]) -> Finding:
    """Reproduced if the exponent of the CPU time of a step against the period has an interval below 0."""
    found, _ = timed(runs)
    result = ev.studied_trend(ev.sweep(found, "period", "store_period"), SECONDS.value, STUDY)
    return Finding(
        result.slope.below(0), f"Seconds {result}", ev.trend_figure("Cost", "period", "seconds", measured=result.line)
    )


@CLAIMS.claim(
    "cost: p of order m² restores it",
    "Section Computational cost",
    "With p of order m² (the paper writes 1/m²) the cost is that of the first-order optimizer.",
)
def cost_restored(runs: Sequence[Run]) -> Finding:
    """Reproduced if the ratio of CPU time of a step, Anderson with p ≥ m² to base, has an interval below 1.1."""
    found, base = timed(runs)
    restoring = [(size, period) for size, period in map(sizes, found) if period >= size**2 > 1]
    rare = ev.by_seed([run for run in found if restoring and sizes(run) == min(restoring)])
    time, end = (ev.compare("Anderson with p ≥ m² to base", rare, base, measure) for measure in (SECONDS, FINAL))
    if time.ratio.count < ev.LEAST_SEEDS:
        raise ev.from_study(STUDY, "No runs with p ≥ m².")
    return Finding(time.ratio.below(RESTORED), f"{time} {end}")
