"""Cost of one jump along the tangent on Burgers' equation, in ordinary gradients on the same samples.

    OMP_NUM_THREADS=1 python -m experiments.benchmarks.tangent_cost

Processor time, median of jumps over median of gradients, which take turns; and the peak memory of a separate process,
and of one that makes steps of Adam only. A third of the samples is fitted. With "dense", no rows are stored as factors.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import NamedTuple

import torch
from torch.optim import Adam

from experiments.benchmarks.common import Change, changed, command, timed
from experiments.equations.case import network
from experiments.equations.problems import burgers
from experiments.text import header, table
from torch_anderson import GaussNewton, Objective
from torch_anderson._gauss_newton import control, jacobian

JUMPS = 9


class Setting(NamedTuple):
    layers: int
    width: int
    samples: int
    dense: bool = False


SETTINGS = [
    Setting(4, 20, 1500),
    Setting(3, 200, 768),
    Setting(3, 200, 768, dense=True),
    Setting(3, 225, 768),
    Setting(3, 700, 768),
    Setting(3, 700, 1500),
]


def prepared(setting: Setting) -> Objective:
    """The equation with so many samples and weights."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    terms = burgers().terms
    edges = setting.samples // 5
    counts = {"interior": setting.samples - edges, "edges": edges}
    terms = {name: replace(term, count=counts[name]) for name, term in terms.items()}
    return Objective(network(2, setting.width, setting.layers), **terms)


def peak() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f}"


def adam_memory(setting: Setting) -> list[str]:
    """The peak memory of steps of Adam, measured in a separate process."""
    objective = prepared(setting)
    optimizer = Adam(objective.model.parameters())
    for _ in range(3):
        optimizer.step(objective)
    return [peak()]


def measure(setting: Setting) -> list[str]:
    """A row of the table, measured in a separate process."""
    changes: list[Change] = [(control, "FIRST_ROWS", setting.samples // 3)]
    if setting.dense:
        changes.append((jacobian, "FACTORS_FROM", float("inf")))
    objective = prepared(setting)
    plain = Objective(objective.model, **objective.terms)
    optimizer = GaussNewton(Adam(objective.model.parameters()))
    jumps: list[float] = []
    gradients: list[float] = []
    with changed(changes):
        optimizer.step(objective)
        while len(jumps) < JUMPS:
            before = optimizer.stats.counts["attempted"]
            spent = timed(partial(optimizer.step, objective), time.process_time)
            if optimizer.stats.counts["attempted"] > before:  # not a step of the base
                jumps.append(spent)
            gradients.append(timed(plain, time.process_time))
    jump, gradient, latest = median(jumps), median(gradients), optimizer.stats.latest
    assert latest is not None
    weights = sum(p.numel() for p in objective.model.parameters())
    size = f"{setting.layers} x {setting.width}", f"{weights:,}", f"{setting.samples:,}", str(latest.rank)
    kind = "dense" if setting.dense else "as chosen"
    return [*size, kind, f"{1e3 * jump:.0f}", f"{jump / gradient:.2f}", peak()]


def alone(call: Callable[[Setting], list[str]], setting: Setting) -> list[str]:
    """Make a call in a separate process, whose peak memory is that of the call."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(call, (setting,))


def main() -> None:
    columns = ["network", "weights", "samples", "rows", "storage", "ms", "jump, in gradients", "peak GB", "of Adam"]
    found = [[*alone(measure, setting), *alone(adam_memory, setting)] for setting in SETTINGS]
    print(header())
    print(table(found, columns))


if __name__ == "__main__":
    command(main)
