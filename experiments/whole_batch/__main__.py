"""A quick look for developers: ``python -m experiments.whole_batch --problems softmax mlp --seeds 0:2``.

Prints the gradients that each method needs, and keeps no results; L-BFGS always runs, because targets depend on it, and
known runs of other methods are used if there are any. ``python -m experiments whole-batch`` makes the whole study.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from joblib import Parallel, delayed
from rich.console import Console

import torch_anderson

from ..arguments import parse_seeds
from ..methods import DESCENTS as METHODS
from ..methods import Method, wrapped_in
from ..screen import show_table, tell
from .command import available
from .problems import FAMILY, Problem
from .race import Entry, entries, run
from .scores import LBFGS, Record, Scores, middle, shown
from .store import FAMILY_FOLDER, load


def arguments() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.whole_batch", description=__doc__)
    tuned = [problem.name for problem in FAMILY if not problem.held_out and not problem.name.startswith("fashion")]
    parser.add_argument("--problems", nargs="+", default=tuned, metavar="NAME", help="default: all but held-out ones")
    ours = ["anderson-sgd", "anderson-nesterov", "anderson-adam"]
    parser.add_argument("--methods", nargs="+", default=ours, metavar="NAME", help="or `all`")
    parser.add_argument("--seeds", default="0:2", help="as in 7, or 0,3,5, or 0:5 (without 5)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--wrapper", metavar="MODULE:NAME", help="another class in the place of Anderson")
    parser.add_argument("--closure", action="store_true", help="call step(closure), so that losses are seen")
    parser.add_argument("--results", type=Path, default=Path("results/whole-batch"), help="peers' runs, for targets")
    parser.add_argument("--stats", action="store_true", help="print the wrapper's counters, means over runs")
    return parser.parse_args()


def wrapper(text: str | None) -> Any:
    """The class that is meant by ``module:name``."""
    if text is None:
        return torch_anderson.Anderson
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)


def attempt(entry: Entry, wrapper_name: str | None, closure: bool) -> Record:
    """Make a run in any process."""
    return run(entry, wrapped_in(wrapper(wrapper_name), closure=closure))


def compare(console: Console, problem: Problem, methods: list[Method], seeds: list[int], given: Any) -> None:
    """Run the methods on a problem and print a row for each."""
    names = {method.name for method in methods}
    kept, _ = load(given.results / FAMILY_FOLDER)
    known = [each for each in kept if each["problem"] == problem.name and each["method"] not in names]
    known = [each for each in known if each["seed"] in seeds and not each["method"].startswith("anderson")]
    unknown = [seed for seed in seeds if seed not in {each["seed"] for each in known if each["method"] in LBFGS}]
    extra = [METHODS[name] for name in LBFGS if name not in names]
    wanted = [*entries([problem], methods, seeds), *entries([problem], extra, unknown)]
    records = Parallel(n_jobs=given.jobs)(delayed(attempt)(each, given.wrapper, given.closure) for each in wanted)
    show(console, Scores([*known, *records]), problem, list(dict.fromkeys(each.method for each in wanted)), given.stats)


def show(console: Console, scores: Scores, problem: Problem, methods: Sequence[str], stats: bool) -> None:
    """The table of a problem."""
    rows = [list(row(scores, problem, method, stats)) for method in methods]
    columns = ["method", "rate 1", "rate 2", "rate 3", "rate 4", "worst", "worst loss/base", "final losses", "s/run"]
    title = f"{problem.title}: gradients to target, rates {dict(problem.rates)}"
    show_table(console, title, [*columns, "counts"] if stats else columns, rows)


def row(scores: Scores, problem: Problem, method: str, stats: bool) -> Iterator[str]:
    """One method."""
    rates = scores.rates(problem.name, method)
    runs = [list(scores.runs(problem.name, method, rate).values()) for rate in rates]
    counts = [scores.counts(problem.name, method, rate).values() for rate in rates]
    every = [each for some in runs for each in some]
    yield method
    yield from [shown(middle(each)) for each in counts] + [""] * (4 - len(rates))
    yield shown(max(count for each in counts for count in each))
    yield worst_loss(scores, problem, method)
    yield " ".join(f"{median(each['final'] for each in some):.3g}" for some in runs)
    yield f"{sum(each['cpu_seconds'] for each in every) / len(every):.2f}"
    yield from [mean_counts(every)] if stats else []


def worst_loss(scores: Scores, problem: Problem, method: str) -> str:
    """The highest loss at the end over the base's at the same rate and seed, if runs of the base are known."""
    base = METHODS[method].base
    ratios = scores.over_base([problem], "loss", [base]) if base and METHODS[method].ours else {}
    return f"{max(ratios.values()):.3g}" if ratios else ""


def mean_counts(records: Sequence[Record]) -> str:
    """The wrapper's counters, means over runs."""
    names = dict.fromkeys(name for each in records for name in each["stats"])
    means = {name: sum(each["stats"].get(name, 0.0) for each in records) / len(records) for name in names}
    return " ".join(f"{name}={value:.3g}" for name, value in means.items())


def main() -> int:
    """Carry it out; returns the exit code."""
    given, console, started = arguments(), Console(), time.perf_counter()
    table = wrapped_in(wrapper(given.wrapper), closure=given.closure)
    problems, methods = available(given.problems, [] if given.methods == ["all"] else given.methods, table)
    for problem in problems:
        compare(console, problem, methods, parse_seeds(given.seeds), given)
    tell(console, f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
