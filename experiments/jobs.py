"""Runs to make: what they are, an attempt at one, and how it ended.

Those of tasks, with checkpoints, are in ``runner``; a race leaves one line.
"""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from threadpoolctl import threadpool_limits

from .results import (
    FINISHED,
    DamagedRun,
    Record,
    append_line,
    disk_full,
    is_full,
    load_lines,
    origin,
    write_arrays,
)

FAILED = "failed"
ARRAYS = "arrays"
"""Entry of a measured record with arrays by name, which are stored in a separate file."""
CHECKPOINT_EVERY = 60.0
"""Seconds between two checkpoints of a run that makes them."""


class Job(ABC):
    """A run to make."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What distinguishes the run from others in the same folder of results, with its seed."""

    @property
    def title(self) -> str:
        """The run in few words."""
        first, second, *rest = ((name, value) for name, value in self.identity.items() if value is not None)
        return " ".join([str(first[1]), str(second[1]), *(f"{name} {value}" for name, value in rest)])

    @abstractmethod
    def folder(self, results: Path) -> Path:
        """The folder for files of this run alone, such as signs of life and the traceback of a failure."""

    @abstractmethod
    def is_done(self, results: Path) -> bool:
        """Whether the run has ended, well or not, so that its results are there."""

    @abstractmethod
    def make(self, results: Path, checkpoint_every: float = CHECKPOINT_EVERY) -> "Outcome":
        """Make the run, or what is missing of it, and leave it in the folder of results."""

    @abstractmethod
    def estimate(self, budget: float) -> float:
        """Estimated processor seconds of the run, measured in about ``budget`` seconds."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    job: Job
    status: str
    """finished, diverged or failed."""
    numbers: Record = field(default_factory=dict)
    """What is told of it at the end."""
    seconds: float = 0.0
    """Time spent in training."""
    error: str = ""
    """Why it failed, in one line."""
    details: str = ""
    """The traceback."""
    disk_full: bool = False
    """Whether it failed because the disk is full, so that all other runs would fail too."""
    done_before: bool = False
    """Whether it was complete before this sweep."""

    @property
    def failed(self) -> bool:
        """Whether the run has no result."""
        return self.status == FAILED


@dataclass(frozen=True)
class Race(Job, ABC):
    """A run that leaves one line. Subclasses are dataclasses whose fields identify it."""

    study: ClassVar[str] = ""
    """Folder below the results, for commands that make several kinds of runs."""
    holds: ClassVar[dict[str, Any]] = {}
    """What a line has besides the entries that all have: key -> kind of the value."""

    problem: str
    method: str

    @abstractmethod
    def measure(self) -> Record:
        """Make the run and return its numbers, at least ``cpu_seconds`` and ``stats``."""

    def covered(self, done: Collection[tuple[Any, ...]]) -> bool:
        """Whether these runs, by the values of their identity, contain this one."""
        return tuple(self.identity.values()) in done

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes the run from others."""
        return asdict(self)

    def folder(self, results: Path) -> Path:
        """The folder for files of this run alone."""
        _, *rest = (str(value) for value in self.identity.values() if value is not None)
        return results / self.study / self.problem / "-".join(rest)

    def line_file(self, results: Path) -> Path:
        """Where the line is kept."""
        return results / self.study / self.problem / f"{self.method}.jsonl"

    def arrays_file(self, results: Path) -> Path:
        """Where the arrays are kept, for runs that have any."""
        folder = self.folder(results)
        return folder.with_name(f"{folder.name}.npz")

    def is_done(self, results: Path) -> bool:
        """Whether its results are there."""
        path = self.line_file(results)
        try:
            status = path.stat()
        except OSError:
            return False
        return self.covered(_identities(type(self), path, (status.st_mtime_ns, status.st_size)))

    def make(self, results: Path, checkpoint_every: float = CHECKPOINT_EVERY) -> Outcome:
        """Make the run, or what is missing of it."""
        if self.is_done(results):
            return Outcome(self, FINISHED)
        record = self.measure()
        if arrays := record.pop(ARRAYS, None):
            write_arrays(self.arrays_file(results), arrays)
        append_line(self.line_file(results), self.identity | record | origin())
        return Outcome(self, FINISHED, seconds=record["cpu_seconds"])

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """What a line has: key -> kind of the value."""
        return {"problem": str, "method": str, "seed": int, "cpu_seconds": float, "stats": dict} | cls.holds

    @classmethod
    def key(cls, record: Record) -> tuple[Any, ...]:
        """The identity of the run with this record."""
        return tuple(record.get(each.name) for each in fields(cls))

    @classmethod
    def load(cls, results: Path) -> tuple[list[Record], list[str]]:
        """All runs of this kind, each once, and a message for each line or file that cannot be read."""
        files = sorted((results / cls.study).glob("*/*.jsonl"))
        loaded = [load_lines(path, cls.kinds()) for path in files]
        records = {cls.key(each): each for records, _ in loaded for each in records}
        return list(records.values()), [message for _, problems in loaded for message in problems]


@lru_cache(maxsize=10_000)
def _identities(kind: type[Race], path: Path, stamp: tuple[int, int]) -> frozenset[tuple[Any, ...]]:
    """The identities of the runs in a file that had this stamp."""
    return frozenset(map(kind.key, load_lines(path, kind.kinds())[0]))


def counters(optimizer: Any) -> dict[str, float]:
    """The counts of ``Anderson`` or ``GaussNewton``; empty for other optimizers."""
    counts = optimizer.stats.as_dict() if hasattr(optimizer, "stats") else {}
    return {name: float(value) for name, value in counts.items() if value}


J = TypeVar("J", bound=Job)


def unfinished(jobs: Iterable[J], results: Path) -> list[J]:
    """The runs that are still to be made, or to be ended."""
    return [job for job in jobs if not job.is_done(results)]


def attempt(job: Job, results: Path, checkpoint_every: float) -> Outcome:
    """Make one run, with one thread; what it raises becomes a failed outcome."""
    try:
        # One thread for NumPy too, where a run uses it: torch's is the run's affair.
        with threadpool_limits(1):
            return job.make(results, checkpoint_every)
    except Exception as error:
        return failure(job, results, error)


def failure(job: Job, results: Path, error: Exception | str) -> Outcome:
    """The outcome of a run that has no result."""
    if isinstance(error, DamagedRun):
        error = f"{error}. Delete the folder {job.folder(results)}, and the same command makes this run again."
    if isinstance(error, str):
        return Outcome(job, FAILED, error=error)
    full = is_full(error)
    details = "".join(traceback.format_exception(error))
    message = disk_full(results) if full else "".join(traceback.format_exception_only(error)).strip()
    return Outcome(job, FAILED, error=message, details=details, disk_full=full)
