"""The runs that are there, and those that are still to be made."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..lines import Record
from ..lines import load as load_lines
from ..methods import SOLVERS as METHODS
from .race import Entry

KINDS: dict[str, type] = {
    "problem": str, "method": str, "seed": int, "seconds": float, "times": list, "errors": list, "cpu_seconds": float,
    "stats": dict,
}  # fmt: skip
"""What a line holds at least: key -> kind of the value."""


def load(folder: Path) -> tuple[list[Record], list[str]]:
    """All runs, each once, and a message for each line or file that cannot be read."""
    records, problems = load_lines(folder, KINDS)
    unique = {
        tuple(each.get(name) for name in ("problem", "method", "rate", "seed", "seconds")): each for each in records
    }
    return list(unique.values()), problems


def unfinished(jobs: Sequence[Entry], records: Iterable[Record]) -> list[Entry]:
    """The runs that are not there yet. A longer run makes a shorter one superfluous unless its rate is scheduled."""
    lengths: dict[tuple[object, ...], list[float]] = {}
    for each in records:
        lengths.setdefault(tuple(each.get(name) for name in ("problem", "method", "rate", "seed")), []).append(
            each["seconds"]
        )
    return [job for job in jobs if not covered(job, lengths.get((job.problem, job.method, job.rate, job.seed), []))]


def covered(job: Entry, lengths: Sequence[float]) -> bool:
    """Whether runs of these lengths contain the run."""
    if METHODS[job.method].scheduled:
        return job.seconds in lengths
    return any(length >= job.seconds for length in lengths)
