"""Many runs: those that are not there yet are made in several processes and kept as soon as they end."""

import platform
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from joblib import delayed
from joblib.externals.loky.process_executor import BrokenProcessPool

from ..data import MissingData
from ..runner import processor, versions
from ..sweep import in_workers
from .batches import Batched, Ending
from .problems import PROBLEMS
from .race import Entry, Record
from .store import append, load

Job = Entry | Batched | Ending
"""A run to make; its fields distinguish it from others of its kind."""


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, or has failed."""

    job: Job
    record: Record | None
    error: str = ""


def unfinished(jobs: Sequence[Job], folder: Path) -> tuple[list[Job], list[str]]:
    """The runs that are not there yet, and a message for each damaged line among those that are."""
    records, problems = load(folder)
    done = {key(each, jobs[0]) for each in records} if jobs else set()
    return [job for job in jobs if key(asdict(job), job) not in done], problems


def key(record: Mapping[str, Any], job: Job) -> tuple[Any, ...]:
    """What distinguishes a run from others of its kind."""
    return tuple(record.get(field.name) for field in fields(job))


def sweep(jobs: Sequence[Job], folder: Path, processes: int, on_done: Callable[[Outcome], Any]) -> None:
    """Make these runs. A run that fails is reported, and the others go on."""
    for outcome in outcomes(jobs, processes):
        on_done(kept(outcome, folder))


def kept(outcome: Outcome, folder: Path) -> Outcome:
    """Write the record of a run; the outcome is a failure where that is not possible."""
    try:
        if outcome.record is not None:
            append(folder, outcome.record | origin())
    except OSError as error:
        return replace(outcome, record=None, error=f"cannot be kept: {error}")
    return outcome


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


def without_data(problems: Iterable[str]) -> dict[str, str]:
    """The problems whose data are not on this machine, each with a message that says how to get them."""
    missing = {}
    for name in problems:
        try:
            PROBLEMS[name].build(0)
        except MissingData as problem:
            missing[name] = f"{name} is left out: {problem}"
    return missing
