"""Cost of a forward pass, relative to a gradient: measured once per task and kept, so that all counts agree."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.benchmarks.common import ratio, take_turns, timed
from experiments.results import read_record, write_json
from experiments.runner import Spec, isolated

from .field import BASE, SETTINGS

FILE = "calibration.json"
ROUNDS = 15
"""In which both take turns."""
ROUND = 0.05
"""Seconds, about, that each gets in a round."""


def calibration(tasks: Iterable[str], results: Path) -> dict[str, dict[str, Any]]:
    """Task -> forward_cost and how it was measured; missing ones are measured and stored in the folder."""
    path = results / FILE
    kept = read_record(path) if path.exists() else {}
    for task in tasks:
        if task not in kept:
            kept[task] = measure(task)
            write_json(path, kept)
    return {task: kept[task] for task in tasks}


def settings(task: str, calibrated: Mapping[str, Any]) -> dict[str, Any]:
    """The task's settings with the measured cost."""
    return SETTINGS[task] | {"forward_cost": calibrated["forward_cost"]}


def measure(task: str) -> dict[str, Any]:
    """Times of a gradient and of a forward pass without a graph, and the median of their ratio."""
    with isolated():
        torch.manual_seed(0)
        problem = Spec(task, BASE, 0, overrides=SETTINGS[task]).resolve().start(0)

        def gradient() -> None:
            problem.model.zero_grad()
            problem.loss(0).backward()

        @torch.no_grad()
        def forward() -> None:
            problem.loss(0)

        turns = {call: seconds_of(call) for call in (gradient, forward)}
        times = take_turns(turns, ROUNDS, warmup=1)
    return {
        "forward_cost": float(f"{ratio(times[forward], times[gradient]):.2g}"),
        "gradient_ms": round(1e3 * median(times[gradient]), 4),
        "forward_ms": round(1e3 * median(times[forward]), 4),
        "date": datetime.now(UTC).date().isoformat(),
    }


def seconds_of(call: Callable[[], None]) -> Callable[[], float]:
    """A measure of the processor seconds of one call, the mean over a round of many."""

    def repeat(calls: int) -> None:
        for _ in range(calls):
            call()

    def mean(calls: int) -> float:
        call()  # what the other one left in the caches is not its fault
        return timed(lambda: repeat(calls), time.process_time) / calls

    calls = max(1, int(ROUND / mean(5)))
    return lambda: mean(calls)
