"""Output of the command line: tasks and methods, and how methods compare."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from .arguments import BadInput
from .methods import METHODS
from .results import check_writable, load_runs
from .runner import Spec
from .screen import complain, show_table, tell
from .studies import STUDIES
from .tasks import TASKS

SHOWN = 5
"""Number of columns of the comparison that fit a terminal; the page has all."""


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
