"""One run: a problem, a method, a learning rate and a seed, and the record that it leaves."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..runner import one_thread
from .methods import METHODS, Meter, Method, Spent
from .problems import PROBLEMS, Problem


@dataclass(frozen=True)
class Entry:
    """What to run."""

    problem: str
    method: str
    rate: float | None
    """None for methods without a learning rate."""
    seed: int


def entries(problem: Problem, method: Method, seeds: list[int]) -> list[Entry]:
    """All runs of a method on a problem."""
    rates = (None,) if method.base is None else problem.rates[method.base]
    return [Entry(problem.name, method.name, rate, seed) for seed in seeds for rate in rates]


def run(entry: Entry, methods: Mapping[str, Method] = METHODS) -> dict[str, Any]:
    """Make a run on one thread; raises ``MissingData`` where the problem's data are not on this machine."""
    problem, method = PROBLEMS[entry.problem], methods[entry.method]
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(entry.seed)
        meter = Meter(problem.build(entry.seed), problem.gradients)
        with suppress(Spent):
            method.run(meter, entry.rate or math.nan)
        return record(entry, meter)


def record(entry: Entry, meter: Meter) -> dict[str, Any]:
    """What is kept of a run."""
    seconds = time.process_time() - meter.started
    with torch.no_grad():
        final = float(meter.case.loss(None))
    return {
        "problem": entry.problem,
        "method": entry.method,
        "rate": entry.rate,
        "seed": entry.seed,
        "losses": meter.losses,
        "seconds": [float(f"{value:.4g}") for value in meter.seconds],
        "cpu_seconds": seconds,
        "final": final,
        "forward": meter.forward,
        "optimum": meter.case.optimum,
        "stats": counters(meter.optimizer),
    }


def counters(optimizer: Any) -> dict[str, float]:
    """The counts of ``Anderson``, or of a prototype that keeps them in a dictionary; empty for other optimizers."""
    if hasattr(optimizer, "stats"):
        return {name: value for name, value in optimizer.stats.as_dict().items() if value and math.isfinite(value)}
    return {name: float(value) for name, value in getattr(optimizer, "count", {}).items() if value}
