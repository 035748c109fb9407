"""Output of the command line: tasks and methods, and how methods compare."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from .methods import METHODS
from .results import load_runs
from .runner import Spec
from .screen import show_table
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
    from .tables import comparison_text

    for comparison in collect(load_runs(results)[0])[0]:
        if comparison.task in tasks:
            table = comparison_text(comparison)
            rows = [row[:SHOWN] for row in table.texts]
            show_table(console, f"{comparison.title} (mean ± 95 % confidence)", table.headers[:SHOWN], rows)
