"""A quick look for developers: ``python -m torch_anderson.lab.whole_batch --problems softmax mlp --seeds 0:2``.

Prints the gradients each method needs, and keeps no results. ``torch-anderson whole-batch`` makes the whole study.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from joblib import Parallel, delayed
from rich.console import Console

import torch_anderson

from ..arguments import parse_seeds
from ..data import MissingData
from ..runner import named
from ..screen import complain, show_table, tell
from .methods import Method, all_methods
from .problems import FAMILY, PROBLEMS, Problem
from .race import Entry, entries, run
from .scores import Place, Record, gradients_to, median_gradients, place, shown, targets
from .store import FAMILY_FOLDER, load

TARGET_METHODS = ("lbfgs-10", "lbfgs-100")
"""They always run, because the target depends on the lowest loss that any method found."""


def arguments() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(prog="python -m torch_anderson.lab.whole_batch", description=__doc__)
    tuned = [problem.name for problem in FAMILY if not problem.held_out and problem.name != "fashion"]
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


def attempt(entry: Entry, wrapper_name: str | None, closure: bool) -> dict[str, Any] | None:
    """Make a run in any process; None where data are missing."""
    try:
        return run(entry, all_methods(wrapper(wrapper_name), closure))
    except MissingData as problem:
        complain(f"{entry.problem} is left out: {problem}")
        return None


def compare(console: Console, problem: Problem, methods: list[Method], seeds: list[int], given: Any) -> None:
    """Run the methods on a problem and print a row for each."""
    kept = [
        each
        for each in load(given.results / FAMILY_FOLDER)[0]
        if each["problem"] == problem.name and each["seed"] in seeds
    ]
    names = {method.name for method in methods}
    known = [each for each in kept if each["method"] not in names]
    wanted = entries([problem], methods, seeds)
    if not any(each["method"] in TARGET_METHODS for each in known):
        extra = [all_methods()[name] for name in TARGET_METHODS if name not in names]
        wanted += entries([problem], extra, seeds)
    found = Parallel(n_jobs=given.jobs)(delayed(attempt)(each, given.wrapper, given.closure) for each in wanted)
    records = [each for each in found if each is not None]
    if records:
        show(console, problem, records, targets([*records, *known]), given.stats)


def show(console: Console, problem: Problem, records: list[Record], goals: Mapping[Place, float], stats: bool) -> None:
    """The table of a problem."""
    rows = []
    for method in dict.fromkeys(each["method"] for each in records):
        mine = [each for each in records if each["method"] == method]
        rates = list(dict.fromkeys(each["rate"] for each in mine))
        by_rate = [[each for each in mine if each["rate"] == rate] for rate in rates]
        worst = max(gradients_to(each, goals[place(each)]) for each in mine)
        cells = [shown(median_gradients(runs, goals)) for runs in by_rate] + [""] * (4 - len(rates))
        finals = " ".join(f"{median(each['final'] for each in runs):.3g}" for runs in by_rate)
        seconds = f"{sum(each['cpu_seconds'] for each in mine) / len(mine):.2f}"
        rows.append([method, *cells, shown(worst), finals, seconds, mean_counts(mine) if stats else ""])
    columns = ["method", "rate 1", "rate 2", "rate 3", "rate 4", "worst", "final losses", "s/run", "counts"]
    show_table(console, f"{problem.title}: gradients to target, rates {dict(problem.rates)}", columns, rows)


def mean_counts(records: list[Record]) -> str:
    """The wrapper's counters, means over runs."""
    names = dict.fromkeys(name for each in records for name in each["stats"])
    means = {name: sum(each["stats"].get(name, 0.0) for each in records) / len(records) for name in names}
    return " ".join(f"{name}={value:.3g}" for name, value in means.items())


def main() -> int:
    """Carry it out; returns the exit code."""
    given, console, started = arguments(), Console(), time.perf_counter()
    methods = all_methods(wrapper(given.wrapper), given.closure)
    chosen = [named("method", name, methods) for name in (methods if given.methods == ["all"] else given.methods)]
    for message in filter(None, (method.missing for method in chosen)):
        complain(message)
    chosen = [method for method in chosen if not method.missing]
    for name in given.problems:
        compare(console, named("problem", name, PROBLEMS), chosen, parse_seeds(given.seeds), given)
    tell(console, f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
