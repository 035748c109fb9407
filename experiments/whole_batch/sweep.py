"""Which runs are to be made: those that are not there yet, on problems whose data are."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from ..data import MissingData
from ..jobs import key
from .batches import Batched, Ending
from .problems import PROBLEMS
from .race import Entry
from .store import load

Job = Entry | Batched | Ending
"""A run to make; its fields distinguish it from others of its kind."""


def unfinished(jobs: Sequence[Job], folder: Path) -> tuple[list[Job], list[str]]:
    """The runs that are not there yet, and a message for each damaged line among those that are."""
    records, problems = load(folder)
    done = {key(each, jobs[0]) for each in records} if jobs else set()
    return [job for job in jobs if key(asdict(job), job) not in done], problems


def without_data(problems: Iterable[str]) -> dict[str, str]:
    """The problems whose data are not on this machine, each with a message that says how to get them."""
    missing = {}
    for name in problems:
        try:
            PROBLEMS[name].build(0)
        except MissingData as problem:
            missing[name] = f"{name} is left out: {problem}"
    return missing
