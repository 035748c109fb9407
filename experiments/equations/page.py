"""The page on the study: its origin, ratios of errors, figures, and a table for each problem."""

from pathlib import Path

from rich.console import Console

from .. import page
from ..methods import SOLVERS as METHODS
from ..screen import show_table
from ..solvers.quasi_newton import PERIOD, WARM_UP, WARM_UP_RATE
from ..text import MISSING, Table, scientific
from .case import Problem
from .figures import draw_errors, draw_picture
from .race import Entry
from .scores import FAILED, FIRST_ORDER, Score, Scores

READING = f"""\
Every method trains the same float64 network from the same initial weights for a given processor time on one thread. The
time includes the set-up of the method (tracing, allocation) but not the import of packages, the reference solution or
the evaluation of the error. The error is that of the network at test points, relative to the solution in the L2 norm;
for surrogates it is the root of the mean squared error on test rows, in standard deviations of the targets. It is taken
at the end of the first step that ends after the given time. Numbers are geometric means over seeds, with the worst
seed over the best in brackets; a run that diverged counts as an error of 1000.

`GaussNewton` has its default options, on Adam with learning rate 0.001 and on SOAP with 0.003, which were not tuned.
Adam and SOAP were run at several learning rates, constant and with a cosine schedule to zero at the end of the time;
the best rate for each time is shown. A run with a schedule counts for its own length only. "Retained points" are those
with residuals above the mean, which stay for the next step, as they do with `GaussNewton`; "traced residuals" are the
loss and its gradient as a graph that is traced once with `make_fx`, without copies and duplicates; this tracing
is simpler than that of `GaussNewton`. On surrogates Adam and SOAP use one ordinary forward pass for all rows, or
batches. L-BFGS is torch's, with a strong Wolfe line search; self-scaled Broyden (SSBroyden) is our own, after
Al-Baali and Urbán et al. (2024), with SciPy's Wolfe line search. Both start after {WARM_UP} steps of Adam at
{WARM_UP_RATE:g}, use traced losses, and draw points anew every {PERIOD} iterations, except for those with large
residuals, which are kept. These settings were chosen from a few on Burgers' equation with one seed.
torch-levenberg-marquardt has its default options, except that it uses Cholesky's method, and new points at every step.
A table shows only the methods that were run on its problem. In figures, lines are geometric means over seeds, and bands
reach from the best seed to the worst."""
ON_RATIOS = """\
Error of `GaussNewton` on Adam divided by that of other methods, on the same seeds: below 1, `GaussNewton` is better.
Ratios above 1, where it is worse, are in bold."""


def build_page(results: Path, out: Path) -> tuple[Path, list[str]]:
    """Write page and figures of what is there; returns the page, and a message for each damaged line."""
    records, problems = Entry.load(results)
    scores = Scores(records)
    if not scores.records:
        raise page.NothingToReport(f"No run with a seed below 100 in {results}: see `python -m experiments equations`.")
    lengths = [f"{each:g}" for each in sorted({each["seconds"] for each in scores.records})]
    command = f"python -m experiments equations --seconds {lengths[-1]}"
    parts: list[str | Table] = [
        "# Equations and surrogates: errors after a given processor time",
        page.origin(command, scores.records, None, f"runs of {', '.join(lengths)} s"),
        READING,
    ]
    figures = {}
    if picture := draw_picture(scores, results):
        parts += ["![Burgers' equation: exact solution and errors of three methods](picture.png)"]
        figures["picture"] = picture
    if (ratios := ratio_table(scores)).rows:
        parts += ["## Over other methods", ON_RATIOS, ratios]
    for group in dict.fromkeys(problem.group for problem in scores.problems):
        members = [problem for problem in scores.problems if problem.group == group]
        figures[group] = draw_errors(scores, members)
        parts += [f"## {group.capitalize()}", f"![Error against processor time]({group}.png)"]
        for problem in members:
            about = f"`{problem.name}`: {' '.join((problem.build.__doc__ or '').split())}"
            parts += [f"### {problem.title}", about, error_table(scores, problem)]
    return page.write_page(out, parts, figures), problems


def show_page(console: Console, results: Path, out: Path) -> None:
    """Make the page, and print its tables."""
    page.show_page(console, build_page, results, out)
    scores = Scores(Entry.load(results)[0])
    for problem in scores.problems:
        table = error_table(scores, problem)
        show_table(console, f"{problem.title}: error after", table.headers, table.texts)


def error_table(scores: Scores, problem: Problem) -> Table:
    """Methods in rows, times in columns; rate and steps are those of the last time that a method reaches."""
    times = scores.times(problem.name)
    rows = []
    for method in scores.methods(problem.name):
        found = [scores.at(problem.name, [method], each) for each in times]
        if reached := [score for score in found if score is not None]:
            first, last = reached[0], reached[-1]
            steps = [run["steps"] for run in last.runs.values() if "steps" in run]
            rate = "" if last.rate is None else f"{last.rate:g}"
            seeds = " to ".join(map(str, sorted({len(last.errors), len(first.errors)})))
            mean_steps = f"{sum(steps) / len(steps):.0f}" if steps else ""
            rows.append([METHODS[method].label, rate, seeds, mean_steps, *map(cell, found)])
    return Table(["method", "rate", "seeds", "steps", *(f"{each:g} s" for each in times)], rows)


def cell(score: Score | None) -> str:
    """Mean and spread."""
    if score is None:
        return MISSING
    return shown(score.mean) + (f" ({score.spread:.2g})" if len(score.errors) > 1 else "")


def ratio_table(scores: Scores) -> Table:
    """Our error over that of others, for every problem and time."""
    headers = ["problem", "seconds", "over tuned Adam", "over tuned SOAP", "over the best other method", "which"]
    rows = []
    for problem in scores.problems:
        name, peers = problem.name, scores.peers(problem.name)
        for seconds in scores.times(name):
            best, over_best = scores.at(name, peers, seconds), scores.ratio(name, peers, seconds)
            if best and over_best is not None:
                ratios = [scores.ratio(name, scores.family(name, each), seconds) for each in FIRST_ORDER]
                # Losses are in bold.
                texts = [f"**{shown(each)}**" if each and each > 1 else shown(each) for each in (*ratios, over_best)]
                rows.append([problem.title, f"{seconds:g}", *texts, METHODS[best.method].label])
    return Table(headers, rows)


def shown(value: float | None) -> str:
    """An error or a ratio in a table."""
    return "diverged" if value is not None and value >= FAILED else scientific(value)
