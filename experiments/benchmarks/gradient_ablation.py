"""What each part of `Anderson(base)` is worth: the same runs with one part switched off.

    python -m experiments.benchmarks.gradient_ablation --problems softmax mlp relu sine --seeds 10 11

Parts are switched off by setting a constant of the private modules, since no user should have to. A ratio is gradients
to the target without the part over gradients with it, for the same problem, base, learning rate and seed; a run that
does not reach its target counts as twice the allowed gradients. Targets: `python -m experiments whole-batch`.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import geometric_mean
from typing import Any

from experiments.benchmarks.report import header, table
from experiments.whole_batch.methods import all_methods
from experiments.whole_batch.problems import BASES, PROBLEMS
from experiments.whole_batch.race import Entry, Record, entries, run
from experiments.whole_batch.scores import LBFGS, Scores, end, gradients_to, stable
from torch_anderson import Anderson
from torch_anderson._anderson import gradients, secants

WORSE = 1.03


@dataclass(frozen=True)
class Variant:
    """Constants to set, by module and name, and options of `Anderson`."""

    constants: dict[tuple[Any, str], Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


FULL = "all parts"
VARIANTS = {
    FULL: Variant(),
    "no least squares, limited-memory BFGS alone": Variant({(secants, "EXPLAINED"): 0.0}),
    "rejected jumps are not shortened": Variant({(gradients, "RETRIES"): 0}),
    "the base's momentum stays after a jump": Variant({(gradients, "FIRST_MOMENTS"): ()}),
    "jumps of any length": Variant({(gradients, "GROWTH"): math.inf}),
    "no rest after rejections": Variant({(gradients, "TOO_MANY"): 2.0}),
    "no test for noise": Variant({(gradients, "PROBATION"): 0}),
    "no test by the next gradient": Variant(options={"safeguard": None}),
    "history of 5 pairs": Variant(options={"history_size": 5}),
    "history of 20 pairs": Variant(options={"history_size": 20}),
}


@contextmanager
def without_part(variant: Variant) -> Iterator[None]:
    """A context in which the constants have the values of a variant."""
    kept = {(module, name): getattr(module, name) for module, name in variant.constants}
    try:
        for (module, name), value in variant.constants.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)


def ours(problems: list[str], seeds: list[int], variant: Variant) -> list[Record]:
    """All runs of ``Anderson`` with a variant."""
    methods = all_methods(partial(Anderson, **variant.options))
    chosen = [methods[f"anderson-{base}"] for base in BASES]
    with without_part(variant):
        return [run(each, methods) for each in entries([PROBLEMS[name] for name in problems], chosen, seeds)]


def peers(problems: list[str], seeds: list[int]) -> list[Record]:
    """The runs that targets and comparisons need: L-BFGS, and the bases alone."""
    methods = all_methods()
    chosen = [methods[name] for name in (*LBFGS, *BASES)]
    return [run(each) for each in entries([PROBLEMS[name] for name in problems], chosen, seeds)]


def key(record: Record) -> Entry:
    """What was run."""
    return Entry(record["problem"], record["method"], record["rate"], record["seed"])


def needed(record: Record, scores: Scores) -> float:
    """Gradients to the target; twice the allowed ones if it was not reached."""
    found = gradients_to(record, scores.goals[record["problem"], record["seed"]])
    return found if math.isfinite(found) else 2.0 * PROBLEMS[record["problem"]].gradients


def row(name: str, records: list[Record], full: list[Record], base: dict[Entry, Record], scores: Scores) -> list[Any]:
    """A line of the table: ratios by base, all, and how many runs end above that of their base."""
    before = {key(each): needed(each, scores) for each in full}
    ratios = {key(each): needed(each, scores) / before[key(each)] for each in records}
    by_base = [geometric_mean(r for entry, r in ratios.items() if entry.method == f"anderson-{base}") for base in BASES]
    pairs = [(each, base[plain(key(each))]) for each in records]
    compared = [(a, b) for a, b in pairs if stable(b)]
    floor = 1e-12
    above = sum(end(a) > WORSE * end(b) + floor for a, b in compared)
    return [name, *by_base, geometric_mean(ratios.values()), max(ratios.values()), f"{above} of {len(compared)}"]


def plain(entry: Entry) -> Entry:
    """The run of the base alone."""
    return Entry(entry.problem, entry.method.removeprefix("anderson-"), entry.rate, entry.seed)


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["softmax", "huber", "mlp", "relu", "sine"], choices=PROBLEMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="NAME")
    given = parser.parse_args()
    print(header(), f"· {', '.join(given.problems)} · seeds {', '.join(map(str, given.seeds))}\n", flush=True)
    names = [FULL, *(name for name in given.variants if name != FULL)]
    found = {name: ours(given.problems, given.seeds, VARIANTS[name]) for name in names}
    others = peers(given.problems, given.seeds)
    scores = Scores([*others, *found[FULL]])
    base = {key(each): each for each in others if each["method"] in BASES}
    rows = [row(name, found[name], found[FULL], base, scores) for name in names]
    print(table(rows, ["", *BASES, "all", "worst", f"above {WORSE} x base"]))


if __name__ == "__main__":
    main()
