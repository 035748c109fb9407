"""Does wrapping ever hurt? `Anderson(base)` against `base`, for every dense optimizer of torch.optim.

    python -m experiments.benchmarks.never_worse --jobs 2                       the default options
    python -m experiments.benchmarks.never_worse --set "" --set residual=step   two variants, the base runs once
    python -m experiments.benchmarks.never_worse --set "" --set storage=bfloat16 --against defaults
    python -m experiments.benchmarks.never_worse --tune                         learning rates, from the base alone

A cell is the geometric mean over seeds of (final loss + 1e-8 x initial loss) of the wrapped run over the
same of the base run: below 1 is better, above 1.05 is marked "!"; a run that ended in NaN or infinity makes
the cell nan. The last row is the number of accepted jumps per run, over all optimizers and seeds.
"""

import argparse
import ast
import csv
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from joblib import Parallel, delayed
from torch import optim

from experiments.benchmarks.problems import PROBLEMS
from experiments.benchmarks.report import header, table
from torch_anderson import Anderson, MovingAverage, Storage

MARK_ABOVE = 1.05
LOSS_FLOOR = 1e-8  # of the initial loss: below it both runs count as converged
TUNING_SEEDS = (100, 101)


@dataclass(frozen=True)
class Base:
    """An optimizer with torch's defaults, and the learning rates that `--tune` tries."""

    make: Callable[..., optim.Optimizer]
    rates: tuple[float, ...]
    evaluations: int = 1
    """Gradients per step; the number of steps is divided by it."""
    matrices_only: bool = False


GRADIENT_RATES = (0.03, 0.1, 0.3, 1.0)
MOMENTUM_RATES = (0.01, 0.03, 0.1, 0.3)
SIGN_RATES = (0.003, 0.01, 0.03, 0.1)

BASES = {
    "ASGD": Base(optim.ASGD, GRADIENT_RATES),
    "Adadelta": Base(optim.Adadelta, (0.3, 1.0, 3.0, 10.0)),
    "Adafactor": Base(optim.Adafactor, (0.01, 0.03, 0.1, 0.3)),
    "Adagrad": Base(optim.Adagrad, (0.03, 0.1, 0.3, 1.0)),
    "Adam": Base(optim.Adam, SIGN_RATES),
    "AdamW": Base(optim.AdamW, SIGN_RATES),
    "Adamax": Base(optim.Adamax, SIGN_RATES),
    "LBFGS": Base(partial(optim.LBFGS, max_iter=5), (0.01, 0.03, 0.1, 1.0), evaluations=5),
    "Muon": Base(optim.Muon, SIGN_RATES, matrices_only=True),
    "NAdam": Base(optim.NAdam, SIGN_RATES),
    "RAdam": Base(optim.RAdam, SIGN_RATES),
    "RMSprop": Base(optim.RMSprop, (0.001, 0.003, 0.01, 0.03)),
    "Rprop": Base(optim.Rprop, (0.0001, 0.001, 0.01, 0.1)),
    "SGD": Base(optim.SGD, GRADIENT_RATES),
    "SGD-momentum": Base(partial(optim.SGD, momentum=0.9), MOMENTUM_RATES),
    "SGD-Nesterov": Base(partial(optim.SGD, momentum=0.9, nesterov=True), MOMENTUM_RATES),
}

# Printed by --tune, for each of PROBLEMS in turn.
RATES = {
    "ASGD": (1.0, 0.1, 1.0, 1.0, 1.0),
    "Adadelta": (10.0, 10.0, 3.0, 3.0, 1.0),
    "Adafactor": (0.3, 0.3, 0.1, 0.1, 0.03),
    "Adagrad": (0.3, 1.0, 1.0, 0.3, 0.1),
    "Adam": (0.03, 0.1, 0.03, 0.01, 0.1),
    "AdamW": (0.03, 0.1, 0.03, 0.01, 0.03),
    "Adamax": (0.1, 0.1, 0.1, 0.03, 0.1),
    "LBFGS": (0.03, 0.03, 1.0, 0.03, 0.1),
    "Muon": (0.03, 0.03, 0.01, 0.01, 0.01),
    "NAdam": (0.03, 0.03, 0.01, 0.01, 0.01),
    "RAdam": (0.1, 0.1, 0.03, 0.03, 0.1),
    "RMSprop": (0.03, 0.03, 0.01, 0.01, 0.003),
    "Rprop": (0.1, 0.1, 0.01, 0.1, 0.01),
    "SGD": (1.0, 0.1, 1.0, 1.0, 1.0),
    "SGD-momentum": (0.3, 0.03, 0.3, 0.3, 0.3),
    "SGD-Nesterov": (0.3, 0.03, 0.3, 0.3, 0.3),
}


class Case(NamedTuple):
    optimizer: str
    problem: str
    seed: int


class Run(NamedTuple):
    """How one run ended; `stats` is what the wrapper counted."""

    initial: float
    final: float
    seconds: float
    stats: dict[str, Any]

    @property
    def score(self) -> float:
        return self.final + LOSS_FLOOR * self.initial if math.isfinite(self.final) else math.nan


Runs = dict[tuple[str | None, Case], Run]
"""By variant, None for the base alone, and case."""


def train(case: Case, rate: float, options: dict[str, Any] | None = None) -> Run:
    """One run of the base alone, or of the base wrapped with the given options."""
    torch.set_num_threads(1)
    base = BASES[case.optimizer]
    problem = PROBLEMS[case.problem](case.seed, matrices_only=base.matrices_only)
    optimizer: Any = base.make(problem.parameters, lr=rate)
    if options is not None:
        optimizer = Anderson(optimizer, **options)
    initial, start = problem.full_loss(), time.perf_counter()
    for k in range(problem.steps // base.evaluations):
        batch = {} if options is None else {"loss_fn": partial(problem.batch_loss, k)}
        optimizer.step(problem.closure(k), **batch)
    seconds = time.perf_counter() - start
    return Run(initial, problem.full_loss(), seconds, {} if options is None else optimizer.stats.as_dict())


def tuned_rate(case: Case) -> float:
    return dict(zip(PROBLEMS, RATES[case.optimizer], strict=True))[case.problem]


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; nan if any value is, so that a diverged run is not averaged away.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


# Comparison


def compare(cases: list[Case], variants: dict[str, dict[str, Any]], jobs: int) -> Runs:
    """The runs of all variants and, under the name None, of the base; the base runs once for all variants."""
    settings: dict[str | None, dict[str, Any] | None] = {None: None} | {**variants}
    keys = list(product(settings, cases))
    runs = Parallel(n_jobs=jobs)(delayed(train)(case, tuned_rate(case), settings[name]) for name, case in keys)
    return dict(zip(keys, runs, strict=True))


def ratios(runs: Runs, variant: str, against: str | None) -> dict[tuple[str, str], float]:
    """Cells of the variant's table: (optimizer, problem) -> ratio to the base, or to another variant."""
    by_cell: dict[tuple[str, str], list[float]] = {}
    for name, case in runs:
        if name == variant:
            ratio = runs[variant, case].score / runs[against, case].score
            by_cell.setdefault((case.optimizer, case.problem), []).append(ratio)
    return {cell: geometric_mean(values) for cell, values in by_cell.items()}


def accepted_jumps(runs: Runs, variant: str) -> dict[str, float]:
    """Mean number of accepted jumps per run of the variant, by problem."""
    by_problem: dict[str, list[float]] = {}
    for (name, case), run in runs.items():
        if name == variant:
            by_problem.setdefault(case.problem, []).append(run.stats["accepted"])
    return {problem: sum(counts) / len(counts) for problem, counts in by_problem.items()}


def comparison_table(cells: dict[tuple[str, str], float], jumps: dict[str, float]) -> str:
    """A row for each optimizer, and one for the number of accepted jumps."""
    optimizers, problems = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    rows = [[optimizer, *(_cell(cells[optimizer, problem]) for problem in problems)] for optimizer in optimizers]
    rows.append(["jumps accepted", *(f"{jumps[problem]:.1f}" for problem in problems)])
    return table(rows, ["ratio", *problems])


def _cell(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio <= MARK_ABOVE else f"! {ratio:.3f}"


def summary(variant: str, cells: dict[tuple[str, str], float]) -> str:
    """One line: the worst cell (nan is worst), how many are marked, the mean of the numbers."""
    worst = max(cells, key=lambda cell: (math.isnan(cells[cell]), cells[cell]))
    marked = sum(not ratio <= MARK_ABOVE for ratio in cells.values())
    mean = geometric_mean([ratio for ratio in cells.values() if not math.isnan(ratio)] or [math.nan])
    return (
        f"{variant}: worst {cells[worst]:.3f} ({' on '.join(worst)}), "
        f"{marked} of {len(cells)} above {MARK_ABOVE}, geometric mean {mean:.3f}"
    )


def write_csv(path: str, runs: Runs) -> None:
    """One row per run; the base's rows have the variant "base"."""
    rows = [
        {"variant": name or "base", **case._asdict(), "initial": run.initial, "final": run.final}
        | {"seconds": round(run.seconds, 3)}
        | run.stats
        for (name, case), run in runs.items()
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


# Learning rates


def tune(optimizers: list[str], problems: list[str], jobs: int) -> dict[str, tuple[float, ...]]:
    """The rates with the lowest score of the base alone: a row of RATES for every optimizer."""
    keys = [(o, p, rate) for o, p in product(optimizers, problems) for rate in BASES[o].rates]
    trials = list(product(keys, TUNING_SEEDS))
    runs = Parallel(n_jobs=jobs)(delayed(train)(Case(o, p, seed), rate) for (o, p, rate), seed in trials)
    scores: dict[tuple[str, str, float], list[float]] = {}
    for (key, _), run in zip(trials, runs, strict=True):
        scores.setdefault(key, []).append(run.score)
    best = {key: geometric_mean(values) for key, values in scores.items()}
    return {o: tuple(_best_rate(best, o, p) for p in problems) for o in optimizers}


def _best_rate(scores: dict[tuple[str, str, float], float], optimizer: str, problem: str) -> float:
    candidates = [rate for rate in BASES[optimizer].rates if not math.isnan(scores[optimizer, problem, rate])]
    return min(candidates, key=lambda rate: scores[optimizer, problem, rate])


# Command line


def parse_options(text: str) -> dict[str, Any]:
    """The options in "key=value,key=value"; a value that is no Python literal is a string.

    The value of ``average`` is its window, and that of ``storage`` the type of the history.

    >>> parse_options("residual=step,period=10,safeguard=loss")
    {'residual': 'step', 'period': 10, 'safeguard': 'loss'}
    """
    options = {key: _literal(value) for key, value in (item.split("=", 1) for item in text.split(",") if item)}
    return {key: OBJECTS[key](value) if key in OBJECTS else value for key, value in options.items()}


OBJECTS: dict[str, Callable[..., object]] = {
    "average": MovingAverage,
    "storage": lambda name: Storage(dtype=getattr(torch, name)),
}
"""Options that are objects, with what makes one from a value on the command line."""


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", metavar="KEY=VALUE,...", help="a variant; repeat for more")
    parser.add_argument("--against", metavar="VARIANT", help="ratios to this variant, not to the base")
    parser.add_argument("--optimizers", nargs="+", choices=BASES, default=list(BASES), metavar="NAME")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--csv", metavar="FILE", help="write every run there")
    parser.add_argument("--tune", action="store_true", help="print the best learning rates of the base alone")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    print(header(), f"· {args.jobs} process(es)")
    if args.tune:
        rates = tune(args.optimizers, args.problems, args.jobs)
        print("#", *args.problems, *(f'\n    "{optimizer}": {row},' for optimizer, row in rates.items()))
        return
    variants = {text or "defaults": parse_options(text) for text in args.set or [""]}
    runs = compare([Case(*c) for c in product(args.optimizers, args.problems, args.seeds)], variants, args.jobs)
    if args.csv:
        write_csv(args.csv, runs)
    cells = {variant: ratios(runs, variant, args.against) for variant in variants}
    for variant in variants:
        print(f"\n{variant}\n\n{comparison_table(cells[variant], accepted_jumps(runs, variant))}")
    print("", *(summary(variant, cells[variant]) for variant in variants), sep="\n")


if __name__ == "__main__":
    main()
