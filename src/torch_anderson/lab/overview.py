"""What the command line tells: which tasks and methods there are, the estimated time, and how methods compare."""

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from .methods import METHODS
from .progress import sign_of_life
from .results import load_runs
from .runner import Spec, estimate_seconds
from .screen import complain, duration, show_table, tell
from .sweep import unfinished
from .tasks import TASKS

if TYPE_CHECKING:
    from .comparison import Comparison
    from .statistics import Interval

ESTIMATING = 8.0
"""Seconds that all estimates together may take, about."""


def list_tables(console: Console) -> None:
    """All tasks, methods and profiles."""
    tasks, quick = ({name: Spec(name, "base", 0, p).resolve() for name in TASKS} for p in ("paper", "quick"))
    rows = [[n, t.title, f"{t.steps:,}", f"{quick[n].steps:,}", t.metrics[t.metric]] for n, t in tasks.items()]
    show_table(console, "Tasks", ["task", "title", "steps", "steps, quick", "metric"], rows)
    methods = []
    for method in METHODS.values():
        fitting = [name for name, task in tasks.items() if method.applies(task)]
        methods.append([method.name, method.label, method.kind, method.about, short(fitting, len(tasks))])
    show_table(console, "Methods", ["method", "label", "kind", "about", "tasks"], methods)
    profiles = [["paper", "the paper's settings and lengths"], ["quick", "shorter runs, to try things out"]]
    show_table(console, "Profiles", ["profile", "about"], profiles)


def short(names: Sequence[str], total: int) -> str:
    """The names, or that it is all of them."""
    return "all" if len(names) == total else " ".join(names)


def announce(console: Console, specs: Sequence[Spec], results: Path, jobs: int | None) -> None:
    """Say how much there is to do and how long it may take; without ``jobs`` in core time alone."""
    left = unfinished(specs, results)
    done = f" ({len(specs) - len(left)} done before)" if len(left) < len(specs) else ""
    tell(console, f"{len(specs)} runs{done} in {results}")
    if left:
        seconds = estimate(left, results)
        spread = f"{duration(seconds / min(jobs, len(left)))} with {jobs} jobs, " if jobs else ""
        tell(console, f"Estimated time: {spread}{duration(seconds)} on one core")


def estimate(specs: Sequence[Spec], results: Path) -> float:
    """Seconds that these runs take one after the other, from a few steps of each variant."""
    variants = {(spec.task, spec.variant): spec for spec in specs}
    budget = min(0.4, ESTIMATING / len(variants))
    seconds = {key: estimate_one(spec, budget) for key, spec in variants.items()}
    return sum(seconds[spec.task, spec.variant] * share_left(spec.folder(results)) for spec in specs)


def estimate_one(spec: Spec, budget: float) -> float:
    """Seconds of one run; 0 of one that does not even start, about which the run itself will complain."""
    try:
        return estimate_seconds(spec, budget)
    except Exception:
        return 0.0


def share_left(folder: Path) -> float:
    """Of a run that was stopped, the share that is left, about; 1 of any other."""
    sign = sign_of_life(folder)
    return 1 - sign["step"] / sign["steps"] if sign else 1.0


def show_comparison(console: Console, results: Path, tasks: Sequence[str]) -> None:
    """A table for each of the tasks: how its methods ended."""
    from .comparison import collect

    comparisons, _ = collect(load_runs(results)[0])
    columns = ["method", "seeds", "final", "best", "seconds", "time / base", "remark"]
    for comparison in comparisons:
        if comparison.task in tasks:
            label = comparison.metrics[comparison.metric]
            title = f"{comparison.title}: {label} (mean and 95 % interval over seeds)"
            show_table(console, title, columns, comparison_rows(comparison))


def comparison_rows(comparison: "Comparison") -> list[list[str]]:
    """One row a method, then what is not trained."""
    from .tables import time_ratio

    metric = comparison.metric
    rows = []
    for group in comparison.groups:
        seconds = sum(trace.end("seconds") for trace in group.traces) / len(group.traces)
        ratio = f"{time_ratio(comparison, group).mean:.2f}"
        numbers = [with_interval(group.final(metric)), with_interval(group.best(metric)), f"{seconds:.1f}", ratio]
        rows.append([group.label, str(len(group.traces)), *numbers, group.remark])
    references = comparison.references(metric).items()
    return rows + [[name, "", with_interval(value), "", "", "", "not trained"] for name, value in references]


def with_interval(value: "Interval") -> str:
    """The mean, and how far the interval reaches where there is one."""
    return f"{value.mean:.4g}" + ("" if isnan(value.half) else f" ± {value.half:.2g}")


def show_report(console: Console, results: Path, out: Path | None = None) -> None:
    """Make the page; say what could not be read, and where the page is."""
    from .report import build_report

    for problem in load_runs(results)[1]:
        complain(problem)
    made = build_report(results, out)
    tell(console, f"Page: {made.html.resolve()}")
