"""What each part of `Anderson(base)` is worth: the same runs with one part switched off.

    python -m experiments.benchmarks.gradient_ablation --problems softmax mlp relu sine --seeds 10 11

Parts are switched off by setting a constant of the private modules, since no user should have to. A ratio is gradients
to the target without the part over gradients with it, for the same problem, base, learning rate and seed; a run that
does not reach its target counts as twice the allowed gradients. Targets: `python -m experiments whole-batch`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import geometric_mean
from typing import Any

from experiments.benchmarks.common import changed, chosen, command
from experiments.methods import DESCENTS, Method, wrapped_in
from experiments.results import Record
from experiments.text import header, table
from experiments.whole_batch.problems import BASES, PROBLEMS
from experiments.whole_batch.race import Entry, entries, run
from experiments.whole_batch.scores import LBFGS, Scores, end, gradients_to, stable
from torch_anderson import Anderson
from torch_anderson._anderson import gradient, quasi_newton

WORSE = 1.03


@dataclass(frozen=True)
class Variant:
    """Constants to set, by module and name, and options of `Anderson`."""

    constants: dict[tuple[Any, str], Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


FULL = "all parts"
VARIANTS = {
    FULL: Variant(),
    "no least squares, limited-memory BFGS alone": Variant({(quasi_newton, "EXPLAINED"): 0.0}),
    "rejected jumps are not shortened": Variant({(gradient, "RETRIES"): 0}),
    "the base's momentum stays after a jump": Variant({(gradient, "FIRST_MOMENTS"): ()}),
    "jumps of any length": Variant({(gradient, "GROWTH"): math.inf}),
    "no rest after rejections": Variant({(gradient, "TOO_MANY_REFUSALS"): 2.0}),
    "no test for noise": Variant({(gradient, "PROBATION"): 0}),
    "no test by the next gradient": Variant(options={"safeguard": None}),
    "history of 5 pairs": Variant(options={"history_size": 5}),
    "history of 20 pairs": Variant(options={"history_size": 20}),
}


def runs(
    problems: Sequence[str], names: Sequence[str], seeds: Sequence[int], methods: dict[str, Method] = DESCENTS
) -> dict[Entry, Record]:
    """All runs of these methods."""
    asked = entries([PROBLEMS[name] for name in problems], [methods[name] for name in names], seeds)
    return {entry: run(entry, methods) for entry in asked}


def needed(entry: Entry, record: Record, scores: Scores) -> float:
    """Gradients to the target; twice the allowed ones if it was not reached."""
    found = gradients_to(record, scores.goals[entry.problem, entry.seed])
    return found if math.isfinite(found) else 2.0 * PROBLEMS[entry.problem].gradients


def row(
    name: str, ours: dict[Entry, Record], full: dict[Entry, Record], peers: dict[Entry, Record], scores: Scores
) -> list[Any]:
    """A line of the table: ratios by base, all, and how many runs end above that of their base."""
    ratios = {each: needed(each, ours[each], scores) / needed(each, full[each], scores) for each in ours}
    by_base = [geometric_mean(r for each, r in ratios.items() if each.method == f"anderson-{base}") for base in BASES]
    pairs = [(a, peers[replace(each, method=each.method.removeprefix("anderson-"))]) for each, a in ours.items()]
    compared = [(a, b) for a, b in pairs if stable(b)]
    floor = 1e-12
    above = sum(end(a) > WORSE * end(b) + floor for a, b in compared)
    return [name, *by_base, geometric_mean(ratios.values()), max(ratios.values()), f"{above} of {len(compared)}"]


def main(
    problems: tuple[str, ...] = ("softmax", "huber", "mlp", "relu", "sine"),
    seeds: tuple[int, ...] = (10, 11),
    variants: tuple[str, ...] = (),
) -> None:
    """Run and print the table.

    Args:
        problems: Names of problems with whole batches.
        seeds: A run for each.
        variants: Parts to switch off; default: all.
    """
    names = [FULL, *(name for name in chosen(variants, VARIANTS) if name != FULL)]
    problems = tuple(chosen(problems, PROBLEMS))
    print(header(), f"· {', '.join(problems)} · seeds {', '.join(map(str, seeds))}\n", flush=True)
    found = {}
    for name in names:
        with changed((module, constant, value) for (module, constant), value in VARIANTS[name].constants.items()):
            methods = wrapped_in(partial(Anderson, **VARIANTS[name].options))
            found[name] = runs(problems, [f"anderson-{base}" for base in BASES], seeds, methods)
    peers = runs(problems, (*LBFGS, *BASES), seeds)
    scores = Scores([*peers.values(), *found[FULL].values()])
    rows = [row(name, ours, found[FULL], peers, scores) for name, ours in found.items()]
    print(table(rows, ["", *BASES, "all", "worst", f"above {WORSE} x base"]))


if __name__ == "__main__":
    command(main)
