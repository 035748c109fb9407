"""Output of the command line: tasks and methods, the estimated time, and how methods compare."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from .arguments import BadInput
from .data import MissingData
from .methods import METHODS
from .progress import sign_of_life
from .results import load_runs
from .runner import Spec, estimate_seconds
from .screen import complain, duration, show_table, tell
from .studies import STUDIES
from .sweep import check_writable, unfinished
from .tasks import TASKS

SHOWN = 5
"""Number of columns of the comparison that fit a terminal; the page has all."""
ESTIMATING = 8.0
"""Approximate limit of the time of all estimates together, in seconds."""


def list_tables(console: Console) -> None:
    """All tasks, methods, studies and profiles."""
    tasks, quick = ({name: Spec(name, "base", 0, p).resolve() for name in TASKS} for p in ("paper", "quick"))
    rows = [[n, t.title, f"{t.steps:,}", f"{quick[n].steps:,}", t.metrics[t.metric]] for n, t in tasks.items()]
    show_table(console, "Tasks", ["task", "title", "steps", "steps, quick", "metric"], rows)
    methods = []
    for method in METHODS.values():
        fitting = [name for name, task in tasks.items() if method.applies(task)]
        methods.append([method.name, method.label, method.kind, method.about, short(fitting, len(tasks))])
    show_table(console, "Methods", ["method", "label", "kind", "about", "tasks"], methods)
    studies = [[name, study.about, str(len(study.specs()))] for name, study in STUDIES.items()]
    show_table(console, "Studies", ["study", "about", "runs"], studies)
    profiles = [["paper", "the paper's settings and lengths"], ["quick", "shorter runs, to try things out"]]
    show_table(console, "Profiles", ["profile", "about"], profiles)


def short(names: Sequence[str], total: int) -> str:
    """The names, or ``all``."""
    return "all" if len(names) == total else " ".join(names)


def announce(console: Console, specs: Sequence[Spec], results: Path, jobs: int | None) -> None:
    """Print the number of runs and the estimated time; without ``jobs``, only the time on one core."""
    left = unfinished(specs, results)
    done = f" ({len(specs) - len(left)} done before)" if len(left) < len(specs) else ""
    tell(console, f"{len(specs)} runs{done} in {results}")
    if left and (seconds := estimate(left, results)):
        spread = f"{duration(seconds / min(jobs, len(left)))} with {jobs} jobs, " if jobs else ""
        tell(console, f"Estimated time: {spread}{duration(seconds)} on one core")


def estimate(specs: Sequence[Spec], results: Path) -> float:
    """Seconds that these runs take one after the other, from a few steps of each variant. Reports missing data."""
    variants = {(spec.task, spec.variant): spec for spec in specs}
    budget = min(0.4, ESTIMATING / len(variants))
    seconds = dict.fromkeys(variants, 0.0)
    missing: dict[str, str] = {}
    for (task, variant), spec in variants.items():
        try:
            seconds[task, variant] = 0.0 if task in missing else estimate_one(spec, budget)
        except MissingData as problem:
            missing[task] = str(problem)
    for message in dict.fromkeys(missing.values()):
        complain(message)
    return sum(seconds[spec.task, spec.variant] * share_left(spec.folder(results)) for spec in specs)


def estimate_one(spec: Spec, budget: float) -> float:
    """Seconds of one run; 0 for one that cannot start, which reports the reason when it is run."""
    try:
        return estimate_seconds(spec, budget)
    except MissingData:
        raise
    except Exception:
        return 0.0


def share_left(folder: Path) -> float:
    """The approximate share that is left of an interrupted run; 1 for any other run."""
    sign = sign_of_life(folder)
    return 1 - sign["step"] / sign["steps"] if sign else 1.0


def show_comparison(console: Console, results: Path, tasks: Collection[str]) -> None:
    """A table for each of the tasks: how its methods ended."""
    from .comparison import collect
    from .page import comparison_text

    for comparison in collect(load_runs(results)[0])[0]:
        if comparison.task in tasks:
            table = comparison_text(comparison)
            rows = [[cell.text for cell in row[:SHOWN]] for row in table.rows]
            show_table(console, f"{comparison.title} (mean ± 95 % confidence)", table.headers[:SHOWN], rows)


def show_report(console: Console, results: Path, out: Path | None = None) -> None:
    """Make the page; report what could not be read, and where the page is."""
    from .report import NothingToReport, build_report

    check_writable(out or results)
    try:
        made = build_report(results, out)
    except NothingToReport as problem:
        raise BadInput(str(problem)) from problem
    for message in made.problems:
        complain(message)
    tell(console, f"Page: {made.html.resolve()}")
