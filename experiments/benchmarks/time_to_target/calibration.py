"""Cost of a forward pass, relative to a gradient: measured once per task and kept, so that all counts agree."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.results import read_record, write_json
from experiments.runner import Spec, isolated
from experiments.task import Problem

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
        pairs = interleaved(lambda: gradient(problem), lambda: forward(problem))
    ratio = median(second / first for first, second in pairs)
    return {
        "forward_cost": float(f"{ratio:.2g}"),
        "gradient_ms": round(1e3 * median(first for first, _ in pairs), 4),
        "forward_ms": round(1e3 * median(second for _, second in pairs), 4),
        "date": datetime.now(UTC).date().isoformat(),
    }


def gradient(problem: Problem) -> None:
    """A gradient evaluation, which counts 1."""
    problem.model.zero_grad()
    problem.loss(0).backward()


@torch.no_grad()
def forward(problem: Problem) -> None:
    """A forward pass, which counts a part of it."""
    problem.loss(0)


def interleaved(first: Callable[[], None], second: Callable[[], None]) -> list[tuple[float, float]]:
    """Processor seconds of one call of each, round by round."""
    calls = [max(1, int(ROUND / seconds(call, 5))) for call in (first, second)]
    return [(seconds(first, calls[0]), seconds(second, calls[1])) for _ in range(ROUNDS)]


def seconds(call: Callable[[], None], calls: int) -> float:
    """Processor seconds of one call, the mean of several."""
    call()  # what the other one left in the caches is not its fault
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls
