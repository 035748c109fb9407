"""Numbers of the study of batch sizes: ours over the base with the same batches."""

from collections.abc import Iterable, Mapping
from typing import Any

from .problems import BASES
from .scores import Record

ByBatch = Mapping[tuple[str, str, int], Mapping[str, list[float]]]
"""Problem, base and batch size -> measure -> values, one for each seed."""


def by_batch(records: Iterable[Record]) -> ByBatch:
    """Final loss and time over the base's, and the number of jumps."""
    runs = {(each["problem"], each["method"], each["batch"], each["seed"]): each for each in records}
    found: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for (problem, method, batch, seed), ours in sorted(runs.items(), key=lambda item: str(item[0])):
        base = method.rpartition("-")[2]
        alone = runs.get((problem, base, batch, seed))
        if method == base or alone is None or base not in BASES:
            continue
        values = found.setdefault((problem, base, batch or ours["samples"]), {"loss": [], "accepted": [], "time": []})
        for name, value in compared(ours, alone).items():
            values[name].append(value)
    return found


def compared(ours: Record, alone: Record) -> dict[str, Any]:
    """One pair."""
    return {
        "loss": ours["final"] / alone["final"],
        "accepted": ours["stats"].get("accepted", 0.0),
        "time": ours["cpu_seconds"] / alone["cpu_seconds"],
    }
