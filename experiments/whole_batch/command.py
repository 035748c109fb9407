"""``python -m experiments whole-batch``: what is to be done, the runs with their progress, and the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..arguments import parse_seeds
from ..jobs import announce, how_many, make
from ..methods import DESCENTS as METHODS
from ..methods import Method
from ..runner import named
from ..screen import complain
from ..sweep import check_writable
from .batches import batched, endings
from .page import show_page
from .problems import PROBLEMS, Problem
from .race import entries
from .store import BATCHES_FOLDER, ENDINGS_FOLDER, FAMILY_FOLDER
from .sweep import Job, unfinished, without_data


def carry_out(
    console: Console,
    *,
    problems: Sequence[str],
    methods: Sequence[str],
    seeds: str,
    jobs: int | None,
    results: Path,
    out: Path,
    only: str | None,
    dry_run: bool,
) -> bool:
    """Make the runs and the page; returns whether a run failed."""
    processes = how_many(jobs)
    failed = False
    if only != "page":
        asked = plan(problems, methods, parse_seeds(seeds), results)
        left = asked.left()
        announce(console, asked.total, [job for jobs in left.values() for job in jobs], results, processes)
        if dry_run:
            return False
        check_writable(results)
        failed = not make(console, {results / name: jobs for name, jobs in left.items()}, processes)
    if only != "runs":
        show_page(console, results, out)
    return failed


@dataclass(frozen=True)
class Plan:
    """The runs that were asked for, by the folder that they are kept in."""

    results: Path
    jobs: dict[str, list[Job]]

    @property
    def total(self) -> int:
        """The number of runs."""
        return sum(map(len, self.jobs.values()))

    def left(self) -> dict[str, list[Job]]:
        """The runs that are still to be made; complains about damaged ones."""
        found = {name: unfinished(jobs, self.results / name) for name, jobs in self.jobs.items()}
        for message in (message for _, problems in found.values() for message in problems):
            complain(message)
        return {name: left for name, (left, _) in found.items()}


def plan(problems: Sequence[str], methods: Sequence[str], seeds: Sequence[int], results: Path) -> Plan:
    """The runs of these problems and methods, or of all."""
    here, able = available(problems, methods, METHODS)
    problem_names, method_names = ({each.name for each in some} for some in (here, able))
    jobs: dict[str, list[Job]] = {
        FAMILY_FOLDER: [*entries(here, able, seeds)],
        BATCHES_FOLDER: [job for job in batched(problem_names, seeds) if job.method in method_names],
        ENDINGS_FOLDER: [job for job in endings(problem_names, seeds) if job.method in method_names],
    }
    return Plan(results, jobs)


def available(
    problems: Sequence[str], methods: Sequence[str], table: Mapping[str, Method]
) -> tuple[list[Problem], list[Method]]:
    """What was asked for by name, or all of it, as far as it can run here; complains about the rest."""
    chosen = [named("problem", name, PROBLEMS) for name in problems or PROBLEMS]
    able = [named("method", name, table) for name in methods or table]
    missing = without_data(problem.name for problem in chosen)
    for message in (*missing.values(), *(method.missing for method in able if method.missing)):
        complain(message)
    return [each for each in chosen if each.name not in missing], [each for each in able if not each.missing]
