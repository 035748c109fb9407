"""The page on the study: its origin, ratios of errors, figures, and a table for each problem."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from ..arguments import BadInput
from ..figures import save
from ..methods import SOLVERS as METHODS
from ..page import Cell, Table, wrapped
from ..provenance import origin
from ..results import check_writable, write_bytes
from ..screen import complain, show_table, tell
from ..solvers.quasi_newton import PERIOD, WARM_UP, WARM_UP_RATE
from .case import Problem
from .figures import draw_errors, draw_picture
from .race import Entry
from .scores import FIRST_ORDER, Score, Scores

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
        raise BadInput(f"No run with a seed below 100 in {results}: see `python -m experiments equations`.")
    out.mkdir(parents=True, exist_ok=True)
    for group in groups(scores):
        save(draw_errors(scores, members(scores, group)), out, group)
    picture = draw_picture(scores, results)
    if picture:
        save(picture, out, "picture")
    page = out / "README.md"
    write_bytes(page, text(scores, picture is not None).encode())
    return page, problems


def show_page(console: Console, results: Path, out: Path) -> None:
    """Make the page; say what could not be read, and where the page is."""
    check_writable(out)
    page, problems = build_page(results, out)
    for message in problems:
        complain(message)
    scores = Scores(Entry.load(results)[0])
    for problem in scores.problems:
        table = error_table(scores, problem)
        rows = [[each.text for each in row] for row in table.rows]
        show_table(console, f"{problem.title}: error after", table.headers, rows)
    tell(console, f"Page: {page.resolve()}")


def groups(scores: Scores) -> list[str]:
    """The groups of problems with runs."""
    return list(dict.fromkeys(problem.group for problem in scores.problems))


def members(scores: Scores, group: str) -> list[Problem]:
    """The problems of a group with runs."""
    return [problem for problem in scores.problems if problem.group == group]


def text(scores: Scores, picture: bool) -> str:
    """The whole page."""
    parts = ["# Equations and surrogates: errors after a given processor time"]
    lengths = sorted({each["seconds"] for each in scores.records})
    parts += [origin(f"python -m experiments equations --seconds {lengths[-1]:g}", scores.records)]
    parts[-1] += f"\n- runs of {', '.join(f'{each:g}' for each in lengths)} s"
    parts += [wrapped(paragraph) for paragraph in READING.split("\n\n")]
    if picture:
        parts += ["![Burgers' equation: exact solution and errors of three methods](picture.png)"]
    ratios = ratio_table(scores)
    parts += ["## Over other methods", wrapped(ON_RATIOS), ratios.markdown()] if ratios.rows else []
    for group in groups(scores):
        parts += [f"## {group.capitalize()}", f"![Error against processor time]({group}.png)"]
        for problem in members(scores, group):
            parts += [f"### {problem.title}", wrapped(about(problem)), error_table(scores, problem).markdown()]
    return "\n\n".join(parts) + "\n"


def about(problem: Problem) -> str:
    """What is solved."""
    return f"`{problem.name}`: {' '.join((problem.build.__doc__ or '').split())}"


def error_table(scores: Scores, problem: Problem) -> Table:
    """Methods in rows, times in columns."""
    times = scores.times(problem.name)
    headers = ["method", "rate", "seeds", "steps", *(f"{each:g} s" for each in times)]
    rows = [list(error_row(scores, problem, method, times)) for method in scores.methods(problem.name)]
    return Table(headers, [row for row in rows if row])


def error_row(scores: Scores, problem: Problem, method: str, times: Sequence[float]) -> Iterator[Cell]:
    """One method; rate and steps are those of the last time that it reaches."""
    found = [scores.at(problem.name, [method], each) for each in times]
    reached = [score for score in found if score is not None]
    if not reached:
        return
    last = reached[-1]
    steps = [run["steps"] for run in last.runs.values() if "steps" in run]
    yield Cell(METHODS[method].label)
    yield Cell("" if last.rate is None else f"{last.rate:g}")
    yield Cell(" to ".join(map(str, sorted({len(reached[-1].errors), len(reached[0].errors)}))))
    yield Cell(f"{sum(steps) / len(steps):.0f}" if steps else "")
    yield from (Cell(cell(score)) for score in found)


def cell(score: Score | None) -> str:
    """Mean and spread."""
    if score is None:
        return "–"
    spread = f" ({score.spread:.2g})" if len(score.errors) > 1 else ""
    return shown(score.mean) + spread


def ratio_table(scores: Scores) -> Table:
    """Our error over that of others, for every problem and time."""
    headers = ["problem", "seconds", "over tuned Adam", "over tuned SOAP", "over the best other method", "which"]
    rows = []
    for problem in scores.problems:
        for seconds in scores.times(problem.name):
            if scores.ratio(problem.name, scores.peers(problem.name), seconds) is not None:
                rows.append([Cell(each) for each in ratio_row(scores, problem, seconds)])
    return Table(headers, rows)


def ratio_row(scores: Scores, problem: Problem, seconds: float) -> list[str]:
    """One problem at one time."""
    name = problem.name
    ratios = [scores.ratio(name, scores.family(name, each), seconds) for each in FIRST_ORDER]
    best = scores.at(name, scores.peers(name), seconds)
    ratios.append(scores.ratio(name, scores.peers(name), seconds))
    which = METHODS[best.method].label if best else "–"
    return [problem.title, f"{seconds:g}", *map(marked, ratios), which]


def marked(ratio: float | None) -> str:
    """A ratio; in bold where it is a loss."""
    return f"**{shown(ratio)}**" if ratio is not None and ratio > 1 else shown(ratio)


def shown(value: float | None) -> str:
    """An error in a table.

    >>> shown(1.234e-5), shown(None), shown(float("inf"))
    ('1.2e-5', '–', 'diverged')
    """
    if value is None:
        return "–"
    return "diverged" if value >= 1e3 else f"{value:.1e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e")
