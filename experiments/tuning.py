"""Learning rates of the base and its peers, tuned on seeds that are not reported."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from .task import Task

TABLE = Path(__file__).with_name("tuned.json")
"""Results of ``python -m experiments tune --save``: task -> method -> learning rate, and how it was measured."""


@cache
def table() -> dict[str, Any]:
    """The tuned rates that come with the library."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def tuned_rate(task: Task, method: str) -> float:
    """The tuned learning rate of a method; that of the task if none was tuned, or if it was set explicitly."""
    if task.learning_rate != task.__dataclass_fields__["learning_rate"].default:
        return task.learning_rate
    rates = table().get(task.name, {}).get("rates", {})
    return float(rates.get(method, task.learning_rate))
