"""The numbers that were aimed for, beside those that were measured."""

from collections.abc import Iterator
from statistics import geometric_mean

from ..page import Cell, Table
from .methods import LABELS
from .scores import FIRST_ORDER, OURS, Scores

ERRORS: dict[tuple[str, float], tuple[float, float]] = {
    ("burgers2d", 20): (1e-4, 2e-5), ("burgers2d", 120): (3e-6, 5e-7), ("burgers2d", 600): (5e-7, 5e-8),
    ("convection", 20): (3e-4, 1e-4), ("poisson3d", 20): (5e-5, 1.7e-5), ("helmholtz", 20): (3e-4, 1e-4),
    ("reaction", 20): (5e-6, 1.7e-6),
}  # fmt: skip
"""Problem and seconds -> error to reach, and error to aim for."""
RATIOS: dict[tuple[str, str], tuple[float, float | None]] = {
    ("burgers2d", "adam"): (1e-3, 2e-4), ("burgers2d", "soap"): (1 / 300, 1e-3),
    ("burgers2d-fixed", "adam"): (1 / 20, None), ("burgers2d-fixed", "soap"): (1 / 5, None),
    ("burgers2d-wide", "soap"): (1.0, None),
}  # fmt: skip
"""Problem and family of methods -> error over that of the family after a minute: to reach, and to aim for."""
OVER_FIRST_ORDER = ("convection", "poisson3d", "helmholtz", "reaction", "poisson10d", "allen-cahn", "kdv")
WIDE = "burgers2d-wide"
"""A network that is not expected to solve its equation in a minute."""
UNKNOWN = "–"
SMALL, SPREAD = 1e-2, 30.0
"""After a minute, every seed is to be below this error, and the worst within this factor of the best."""


def shown(value: float | None) -> str:
    """An error in a table.

    >>> shown(1.234e-5), shown(None), shown(float("inf"))
    ('1.2e-5', '–', 'diverged')
    """
    if value is None:
        return UNKNOWN
    return "diverged" if value >= 1e3 else f"{value:.1e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e")


def wanted_table(scores: Scores) -> Table:
    """What was wanted, and what came out, as far as there are runs."""
    rows = [*errors(scores), *ratios(scores), *surrogates(scores), *seeds(scores)]
    measured = [[Cell(each) for each in row] for row in rows if row[-1] != UNKNOWN]
    return Table(["what", "measured", "reach", "aim", "reached"], measured)


def row(what: str, measured: str, reach: str, aim: str, reached: bool | None) -> list[str]:
    """A line; ``reached`` is None without runs."""
    return [what, measured, reach, aim, UNKNOWN if reached is None else "yes" if reached else "**no**"]


def errors(scores: Scores) -> Iterator[list[str]]:
    """Errors after given times."""
    for (problem, seconds), (reach, aim) in ERRORS.items():
        score = scores.at(problem, [OURS], seconds)
        mean = score.mean if score else None
        what = f"{problem}, {seconds:g} s: error"
        yield row(what, shown(mean), shown(reach), shown(aim), None if mean is None else mean <= reach)


def ratios(scores: Scores) -> Iterator[list[str]]:
    """Errors over those of first-order methods."""
    for (problem, family), (reach, aim) in RATIOS.items():
        value = scores.ratio(problem, scores.family(problem, family), 60)
        what = f"{problem}, 60 s: error over tuned {LABELS[family]}"
        yield row(
            what, shown(value), shown(reach), shown(aim) if aim else "", None if value is None else value <= reach
        )
    for problem in OVER_FIRST_ORDER:
        value = scores.ratio(problem, scores.family(problem, *FIRST_ORDER), 60)
        what = f"{problem}, 60 s: error over the better of tuned Adam and SOAP"
        yield row(what, shown(value), "1.0e-2, all but one", "1.0e-3", None if value is None else value <= 1e-2)


def surrogates(scores: Scores) -> Iterator[list[str]]:
    """Both surrogates together."""
    named = [problem for problem in scores.problems if problem.data]
    for seconds in (20.0, 60.0):
        found = [scores.ratio(each.name, scores.family(each.name, *FIRST_ORDER), seconds) for each in named]
        values = [value for value in found if value is not None]
        what = f"surrogates, {seconds:g} s: test RMSE over the best first-order method"
        mean = geometric_mean(values) if values else None
        each = f" ({', '.join(map(shown, values))})" if values else ""
        yield row(what, shown(mean) + each, "0.2", "0.05", None if mean is None else mean <= 0.2)


def seeds(scores: Scores) -> Iterator[list[str]]:
    """Whether all seeds solve every equation."""
    for problem in (each for each in scores.problems if not each.data and each.name != WIDE):
        score = scores.at(problem.name, [OURS], 60)
        if score is None:
            continue
        below = sum(error < SMALL for error in score.errors.values())
        measured = f"{below} of {len(score.errors)} below 1e-2; worst over best {score.spread:.3g}"
        reached = below == len(score.errors) and score.spread <= SPREAD
        yield row(f"{problem.name}, 60 s: seeds", measured, "all; within 30", "", reached)
