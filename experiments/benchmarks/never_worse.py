"""Does wrapping ever hurt? `Anderson(base)` against `base`, for every dense optimizer of torch.optim.

    python -m experiments.benchmarks.never_worse --jobs 2                       the default options
    python -m experiments.benchmarks.never_worse --set "" --set residual=step   two variants, the base runs once
    python -m experiments.benchmarks.never_worse --set "" --set storage=bfloat16 --against defaults
    python -m experiments.benchmarks.never_worse --floor --optimizers RAdam Adagrad
    python -m experiments.benchmarks.never_worse --tune                         learning rates, from the base alone

A cell is the geometric mean over seeds of (final loss + 1e-8 x initial loss) of the wrapped run over the
same of the base run: below 1 is better, above 1.05 is marked "!"; a run that ended in NaN or infinity makes
the cell nan. The last row is the number of accepted jumps per run, over all optimizers and seeds.

With `--floor`, runs on noisy least squares go on for 6,000 steps, and a cell is the loss without noise, as a mean over
seeds and over the 500 steps up to the number above it: where a base ends higher when wrapped, this shows whether jumps
did harm, or led sooner to where the base ends.
"""

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any, NamedTuple

import torch
from joblib import Parallel, delayed
from torch import optim
from tyro.conf import UseAppendAction, arg

from experiments.benchmarks.common import chosen, command
from experiments.benchmarks.problems import PROBLEMS, Problem, noisy_least_squares
from experiments.text import header, table
from torch_anderson import Anderson, MovingAverage, Storage

MARK_ABOVE = 1.05
LOSS_FLOOR = 1e-8  # of the initial loss: below it both runs count as converged
TUNING_SEEDS = (100, 101)
FLOOR_STEPS, FLOOR_LENGTH = 6000, 500
"""Steps of a run with `--floor`, and those that a cell is the mean of."""
Rates = tuple[float, ...]
Options = dict[str, Any]


@dataclass(frozen=True)
class Base:
    """An optimizer with torch's defaults."""

    make: Callable[..., optim.Optimizer]
    tuned: Rates
    """Learning rates as printed by `--tune`, for each of PROBLEMS in turn."""
    rates: Rates
    """Those that `--tune` tries."""
    evaluations: int = 1
    """Gradients per step; the number of steps is divided by it."""
    matrices_only: bool = False


GRADIENT_RATES = (0.03, 0.1, 0.3, 1.0)
MOMENTUM_RATES = (0.01, 0.03, 0.1, 0.3)
SIGN_RATES = (0.003, 0.01, 0.03, 0.1)
Momentum = partial(optim.SGD, momentum=0.9)

BASES = {
    "ASGD": Base(optim.ASGD, (1.0, 0.1, 1.0, 1.0, 1.0), GRADIENT_RATES),
    "Adadelta": Base(optim.Adadelta, (10.0, 10.0, 3.0, 3.0, 1.0), (0.3, 1.0, 3.0, 10.0)),
    "Adafactor": Base(optim.Adafactor, (0.3, 0.3, 0.1, 0.1, 0.03), MOMENTUM_RATES),
    "Adagrad": Base(optim.Adagrad, (0.3, 1.0, 1.0, 0.3, 0.1), GRADIENT_RATES),
    "Adam": Base(optim.Adam, (0.03, 0.1, 0.03, 0.01, 0.1), SIGN_RATES),
    "AdamW": Base(optim.AdamW, (0.03, 0.1, 0.03, 0.01, 0.03), SIGN_RATES),
    "Adamax": Base(optim.Adamax, (0.1, 0.1, 0.1, 0.03, 0.1), SIGN_RATES),
    "LBFGS": Base(partial(optim.LBFGS, max_iter=5), (0.03, 0.03, 1.0, 0.03, 0.1), (0.01, 0.03, 0.1, 1.0), 5),
    "Muon": Base(optim.Muon, (0.03, 0.03, 0.01, 0.01, 0.01), SIGN_RATES, matrices_only=True),
    "NAdam": Base(optim.NAdam, (0.03, 0.03, 0.01, 0.01, 0.01), SIGN_RATES),
    "RAdam": Base(optim.RAdam, (0.1, 0.1, 0.03, 0.03, 0.1), SIGN_RATES),
    "RMSprop": Base(optim.RMSprop, (0.03, 0.03, 0.01, 0.01, 0.003), (0.001, 0.003, 0.01, 0.03)),
    "Rprop": Base(optim.Rprop, (0.1, 0.1, 0.01, 0.1, 0.01), (0.0001, 0.001, 0.01, 0.1)),
    "SGD": Base(optim.SGD, (1.0, 0.1, 1.0, 1.0, 1.0), GRADIENT_RATES),
    "SGD-momentum": Base(Momentum, (0.3, 0.03, 0.3, 0.3, 0.3), MOMENTUM_RATES),
    "SGD-Nesterov": Base(partial(Momentum, nesterov=True), (0.3, 0.03, 0.3, 0.3, 0.3), MOMENTUM_RATES),
}


class Case(NamedTuple):
    optimizer: str
    problem: str
    seed: int


class Run(NamedTuple):
    """How one run ended; `stats` is what the wrapper counted."""

    initial: float
    final: float
    stats: dict[str, Any]

    @property
    def score(self) -> float:
        return self.final + LOSS_FLOOR * self.initial if math.isfinite(self.final) else math.nan


Runs = dict[tuple[str | None, Case], Run]
"""By variant, None for the base alone, and case."""
Cells = dict[tuple[str, str], float]
"""By optimizer and problem."""


def tuned_rate(case: Case) -> float:
    return dict(zip(PROBLEMS, BASES[case.optimizer].tuned, strict=True))[case.problem]


def steps(problem: Problem, name: str, rate: float, options: Options | None) -> Iterator[Any]:
    """Train with the base, or with the base wrapped with options; yields the optimizer after each step."""
    base = BASES[name]
    optimizer: Any = base.make(problem.parameters, lr=rate)
    if options is not None:
        optimizer = Anderson(optimizer, **options)
    for k in range(problem.steps // base.evaluations):
        batch = {} if options is None else {"loss_fn": partial(problem.batch_loss, k)}
        optimizer.step(problem.closure(k), **batch)
        yield optimizer


def train(case: Case, rate: float, options: Options | None = None) -> Run:
    """One run of the base alone, or of the base wrapped with the given options."""
    torch.set_num_threads(1)
    problem = PROBLEMS[case.problem](case.seed, matrices_only=BASES[case.optimizer].matrices_only)
    initial = problem.full_loss()
    *_, optimizer = steps(problem, case.optimizer, rate, options)
    return Run(initial, problem.full_loss(), {} if options is None else optimizer.stats.as_dict())


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; nan if any value is, so that a diverged run is not averaged away.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


# Comparison


def compare(cases: list[Case], variants: dict[str, Options], jobs: int) -> Runs:
    """The runs of all variants and, under the name None, of the base; the base runs once for all variants."""
    settings: dict[str | None, Options | None] = {None: None} | {**variants}
    keys = list(product(settings, cases))
    runs = Parallel(n_jobs=jobs)(delayed(train)(case, tuned_rate(case), settings[name]) for name, case in keys)
    return dict(zip(keys, runs, strict=True))


def ratios(runs: Runs, variant: str, against: str | None) -> Cells:
    """Cells of the variant's table: ratios to the base, or to another variant."""
    by_cell: dict[tuple[str, str], list[float]] = {}
    for name, case in runs:
        if name == variant:
            ratio = runs[variant, case].score / runs[against, case].score
            by_cell.setdefault((case.optimizer, case.problem), []).append(ratio)
    return {cell: geometric_mean(values) for cell, values in by_cell.items()}


def comparison_table(cells: Cells, runs: Runs, variant: str) -> str:
    """A row for each optimizer, and one for the mean number of accepted jumps per run."""
    optimizers, problems = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    rows = [[optimizer, *(cells[optimizer, problem] for problem in problems)] for optimizer in optimizers]
    shown = [[name, *(f"{'' if r <= MARK_ABOVE else '! '}{r:.3f}" for r in row)] for name, *row in rows]
    jumps = {problem: [run.stats["accepted"] for (name, case), run in runs.items() if name == variant
                       and case.problem == problem] for problem in problems}  # fmt: skip
    shown.append(["jumps accepted", *(f"{sum(counts) / len(counts):.1f}" for counts in jumps.values())])
    return table(shown, ["ratio", *problems])


def summary(variant: str, cells: Cells) -> str:
    """One line: the worst cell (nan is worst), how many are marked, the mean of the numbers."""
    worst = max(cells, key=lambda cell: (math.isnan(cells[cell]), cells[cell]))
    marked = sum(not ratio <= MARK_ABOVE for ratio in cells.values())
    mean = geometric_mean([ratio for ratio in cells.values() if not math.isnan(ratio)] or [math.nan])
    return (
        f"{variant}: worst {cells[worst]:.3f} ({' on '.join(worst)}), "
        f"{marked} of {len(cells)} above {MARK_ABOVE}, geometric mean {mean:.3f}"
    )


# The floor of noise, and learning rates


def floor_losses(name: str, seed: int, options: Options | None) -> list[float]:
    """Mean losses without noise of each `FLOOR_LENGTH` steps on noisy least squares."""
    torch.set_num_threads(1)
    problem = noisy_least_squares(seed, steps=FLOOR_STEPS * BASES[name].evaluations)
    rate = tuned_rate(Case(name, "noisy_least_squares", seed))
    losses = [problem.full_loss() for _ in steps(problem, name, rate, options)]
    return torch.tensor(losses).reshape(-1, FLOOR_LENGTH).mean(1).tolist()


def floor_table(optimizers: Sequence[str], seeds: Sequence[int], jobs: int) -> str:
    """Two rows for each optimizer: alone, and wrapped."""
    rows = []
    settings: list[Options | None] = [None, {}]
    for name, options in product(optimizers, settings):
        runs = torch.tensor(Parallel(n_jobs=jobs)(delayed(floor_losses)(name, seed, options) for seed in seeds))
        label = name if options is None else f"Anderson({name})"
        rows.append([label, *(f"{x:.1e}" for x in runs.mean(0).tolist())])
    return table(rows, ["mean loss up to step", *map(str, range(FLOOR_LENGTH, FLOOR_STEPS + 1, FLOOR_LENGTH))])


def best_rates(optimizers: Sequence[str], problems: Sequence[str], jobs: int) -> dict[str, Rates]:
    """The rates with the lowest score of the base alone, for each problem."""
    keys = [(o, p, rate) for o, p in product(optimizers, problems) for rate in BASES[o].rates]
    trials = list(product(keys, TUNING_SEEDS))
    runs = Parallel(n_jobs=jobs)(delayed(train)(Case(o, p, seed), rate) for (o, p, rate), seed in trials)
    scores: dict[tuple[str, str, float], list[float]] = {key: [] for key in keys}
    for (key, _), run in zip(trials, runs, strict=True):
        scores[key].append(run.score)
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for (o, p, rate), values in scores.items():
        if not math.isnan(score := geometric_mean(values)):
            best[o, p] = min(best.get((o, p), (math.inf, 0.0)), (score, rate))
    return {o: tuple(best[o, p][1] for p in problems) for o in optimizers}


# Command line


def parse_options(text: str) -> Options:
    """The options in "key=value,key=value"; a value that is no Python literal is a string.

    The value of ``average`` is its window, and that of ``storage`` the type of the history.

    >>> parse_options("residual=step,period=10,safeguard=loss")
    {'residual': 'step', 'period': 10, 'safeguard': 'loss'}
    """
    objects: dict[str, Callable[[Any], object]] = {
        "average": MovingAverage,
        "storage": lambda name: Storage(dtype=getattr(torch, name)),
    }
    options: Options = {}
    for key, value in (item.split("=", 1) for item in text.split(",") if item):
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
        if key in objects:
            options[key] = objects[key](options[key])
    return options


def main(
    variants: Annotated[UseAppendAction[tuple[str, ...]], arg(name="set")] = (),
    against: str | None = None,
    optimizers: tuple[str, ...] = (),
    problems: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    jobs: int = 1,
    floor: bool = False,
    tune: bool = False,
) -> None:
    """Print the tables.

    Args:
        variants: A variant, as "key=value,..."; repeat for more.
        against: Ratios to this variant, not to the base.
        optimizers: Names; default: all.
        problems: Names; default: all.
        seeds: A run for each.
        jobs: Processes, of one thread each.
        floor: Losses on noisy least squares over many steps.
        tune: Print the best learning rates of the base alone.
    """
    torch.set_num_threads(1)
    names, where = chosen(optimizers, BASES), chosen(problems, PROBLEMS)
    print(header(), f"· {jobs} process(es)")
    if tune:
        for name, rates in best_rates(names, where, jobs).items():
            print(f"{name}: {rates}, for {', '.join(where)}")
        return
    if floor:
        print(floor_table(names, seeds, jobs))
        return
    options = {text or "defaults": parse_options(text) for text in variants or [""]}
    runs = compare([Case(*each) for each in product(names, where, seeds)], options, jobs)
    cells = {variant: ratios(runs, variant, against) for variant in options}
    for variant in options:
        print(f"\n{variant}\n\n{comparison_table(cells[variant], runs, variant)}")
    print("", *(summary(variant, cells[variant]) for variant in options), sep="\n")


if __name__ == "__main__":
    command(main)
