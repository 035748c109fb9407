"""Many short runs: those that are not there yet are made in several processes and kept as soon as they end.

The studies of whole batches and of equations share this; ``lines`` keeps the records.
"""

import io
import json
import platform
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from joblib import cpu_count, delayed
from joblib.externals.loky.process_executor import BrokenProcessPool
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .arguments import BadInput
from .lines import Record, append
from .results import write_bytes
from .runner import processor, versions
from .screen import complain, duration, raw, tell
from .sweep import in_workers

ARRAYS = "arrays"
"""Entry of a record with arrays by name, which are stored in a separate file."""


class Job(Protocol):
    """A run to make: a dataclass whose fields distinguish it from others of its kind."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def make(self) -> Record:
        """Make the run."""

    def estimate(self) -> float:
        """Seconds that the run takes, about."""


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, or has failed."""

    job: Job
    record: Record | None
    error: str = ""


def how_many(jobs: int | None) -> int:
    """The number of processes; one for each core if none is given."""
    processes = cpu_count() if jobs is None else jobs
    if processes < 1:
        raise BadInput(f"Invalid jobs: {processes}. Allowed: 1 and more.")
    return processes


def announce(console: Console, total: int, left: Sequence[Job], results: Path, processes: int) -> None:
    """Say how much there is to do and how long it takes, about."""
    tell(console, f"{total} runs ({total - len(left)} done before) in {results}")
    if left:
        seconds = sum(job.estimate() for job in left)
        spread = f"{duration(seconds / processes)} with {processes} jobs, " if processes > 1 else ""
        tell(console, f"Estimated time: {spread}{duration(seconds)} on one core")


def key(record: Mapping[str, Any], job: Job) -> tuple[Any, ...]:
    """What distinguishes a run from others of its kind."""
    return tuple(record.get(field.name) for field in fields(job))


def sweep(jobs: Sequence[Job], folder: Path, processes: int, on_done: Callable[[Outcome], Any]) -> None:
    """Make these runs. A run that fails is reported, and the others go on."""
    for outcome in outcomes(jobs, processes):
        on_done(kept(outcome, folder))


def kept(outcome: Outcome, folder: Path) -> Outcome:
    """Write the record of a run; the outcome is a failure where that is not possible."""
    if outcome.record is None:
        return outcome
    record = dict(outcome.record)
    arrays = record.pop(ARRAYS, None)
    try:
        if arrays:
            write_arrays(arrays_file(folder, outcome.job), arrays)
        append(folder, record | origin())
    except OSError as error:
        return replace(outcome, record=None, error=f"cannot be kept: {error}")
    return outcome


def arrays_file(folder: Path, job: Job) -> Path:
    """Where the arrays of a run are kept."""
    problem, *rest = (str(value) for value in asdict(job).values() if value is not None)
    return folder / problem / f"{'-'.join(rest)}.npz"


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """A file of arrays, there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_bytes(path, content.getvalue())


def outcomes(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
    """As the runs end."""
    if min(processes, len(jobs)) <= 1:
        yield from map(attempt, jobs)
        return
    waiting = list(jobs)
    with suppress(BrokenProcessPool):
        for outcome in in_workers([delayed(attempt)(job) for job in jobs], processes):
            waiting.remove(outcome.job)
            yield outcome
    yield from (Outcome(job, None, "a worker process was killed (out of memory?); run again") for job in waiting)


def attempt(job: Job) -> Outcome:
    """Make one run; what it raises becomes a failed outcome."""
    try:
        return Outcome(job, job.make())
    except Exception as error:
        return Outcome(job, None, "".join(traceback.format_exception_only(error)).strip())


def origin() -> Record:
    """When, with what and on what a run was made."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions() | {"scipy": version("scipy")},
        "hardware": {"machine": platform.machine(), "cpu": processor(), "threads": 1},
    }


def make(console: Console, jobs: Mapping[Path, Sequence[Job]], processes: int) -> bool:
    """Make the runs of each folder with a bar; returns whether all of them ended well."""
    failed: list[Outcome] = []
    with shown(console, sum(map(len, jobs.values()))) as show:

        def done(outcome: Outcome) -> None:
            show(outcome)
            if outcome.record is None:
                failed.append(outcome)
                complain(f"{title(outcome.job)}: {outcome.error}")

        try:
            for folder, some in jobs.items():
                sweep(some, folder, processes, done)
        except KeyboardInterrupt:
            complain("Stopped. The same command continues with the runs that are left.")
            raise
    return not failed


@contextmanager
def shown(console: Console, total: int) -> Iterator[Callable[[Outcome], None]]:
    """A context with a bar on a terminal; elsewhere a line of JSON is printed for every ended run."""
    if not console.is_terminal:
        yield lambda outcome: raw(console, json.dumps(asdict(outcome.job) | {"failed": outcome.record is None}))
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield lambda outcome: progress.update(bar, advance=1, description=title(outcome.job))


def title(job: Job) -> str:
    """A run in words."""
    return ", ".join(f"{name} {value}" for name, value in asdict(job).items() if value is not None)
