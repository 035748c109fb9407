"""``python -m experiments equations``: what is to be done, the runs with their progress, and the page."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..arguments import BadInput, parse_seeds
from ..jobs import announce, how_many, make
from ..lines import Record
from ..methods import SOLVERS as METHODS
from ..methods import Method
from ..optimizers import missing
from ..runner import named
from ..screen import complain
from ..sweep import check_writable
from .case import Problem
from .page import show_page
from .problems import PROBLEMS
from .race import Entry, entries
from .scores import best_rates
from .store import load, unfinished


def carry_out(
    console: Console,
    *,
    problems: Sequence[str],
    methods: Sequence[str],
    seeds: str,
    seconds: float,
    rates: Sequence[float],
    best: bool,
    jobs: int | None,
    results: Path,
    out: Path,
    only: str | None,
    dry_run: bool,
) -> bool:
    """Make the runs and the page; returns whether a run failed."""
    processes = how_many(jobs)
    if not (seconds > 0 and math.isfinite(seconds)):
        raise BadInput(f"Invalid seconds: {seconds:g}. Allowed: a finite number above 0.")
    failed = False
    if only != "page":
        records = known(results)
        asked = plan(problems, methods, parse_seeds(seeds), seconds, best_rates(records) if best else None)
        asked = [entry for entry in asked if not rates or entry.rate in chosen_rates(entry.method, rates)]
        if not asked:
            raise BadInput("No run is left: none of these methods has one of these rates.")
        left = unfinished(asked, records)
        announce(console, len(asked), left, results, processes)
        if dry_run:
            return False
        check_writable(results)
        failed = not make(console, {results: left}, processes)
    if only != "runs":
        show_page(console, results, out)
    return failed


def chosen_rates(method: str, rates: Sequence[float]) -> Sequence[float | None]:
    """Those that a method is run at: what was asked for, if it has a choice."""
    own = METHODS[method].rates
    return own if len(own) == 1 else rates


def known(results: Path) -> list[Record]:
    """The runs that are there; complains about damaged ones."""
    records, problems = load(results)
    for message in problems:
        complain(message)
    return records


def plan(
    problems: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    seconds: float,
    rates: dict[tuple[str, str], float | None] | None = None,
) -> list[Entry]:
    """The runs of these problems and methods, or of all; with ``rates``, at these alone where there is a choice."""
    asked = entries(*available(problems, methods), seeds, seconds)
    if rates is None:
        return asked
    return [entry for entry in asked if rates.get((entry.problem, entry.method), entry.rate) == entry.rate]


def available(problems: Sequence[str], methods: Sequence[str]) -> tuple[list[Problem], list[Method]]:
    """What was asked for by name, or all of it, as far as it can run here; complains about the rest."""
    chosen = [named("problem", name, PROBLEMS) for name in problems or PROBLEMS]
    able = [named("method", name, METHODS) for name in methods or METHODS]
    absent = {each.name: missing(each.title, each.needs) for each in chosen}
    absent |= {each.name: missing(each.label, each.needs) for each in able}
    for message in filter(None, absent.values()):
        complain(message)
    return [each for each in chosen if not absent[each.name]], [each for each in able if not absent[each.name]]
