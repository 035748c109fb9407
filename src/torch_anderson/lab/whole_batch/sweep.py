"""Many runs: those that are not there yet are made in several processes and kept as soon as they end."""

import platform
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from joblib import Parallel, delayed, parallel_config

from ..data import MissingData
from ..runner import processor, versions
from .problems import PROBLEMS
from .race import Record
from .store import append, load


class Job(Protocol):
    """A run to make; a frozen dataclass whose fields name it."""

    @property
    def problem(self) -> str:
        """The problem's name."""

    @property
    def method(self) -> str:
        """The method's name."""

    def make(self) -> Record:
        """Make the run; the record has the job's fields too."""

    def estimate(self) -> float:
        """Seconds that the run takes, about."""


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, or has failed."""

    job: Any
    record: Record | None
    error: str = ""


def unfinished(jobs: Sequence[Any], folder: Path) -> tuple[list[Any], list[str]]:
    """The runs that are not there yet, and a message for each damaged line among those that are."""
    records, problems = load(folder)
    done = {key(each, jobs[0]) for each in records} if jobs else set()
    return [job for job in jobs if key(asdict(job), job) not in done], problems


def key(record: Mapping[str, Any], job: Any) -> tuple[Any, ...]:
    """What distinguishes a run from others of its kind."""
    return tuple(record.get(field.name) for field in fields(job))


def sweep(jobs: Sequence[Any], folder: Path, processes: int, on_done: Callable[[Outcome], Any]) -> None:
    """Make these runs. A run that fails is reported, and the others go on."""
    for outcome in outcomes(jobs, processes):
        if outcome.record is not None:
            append(folder, outcome.record | origin())
        on_done(outcome)


def outcomes(jobs: Sequence[Any], processes: int) -> Iterator[Outcome]:
    """As the runs end."""
    if processes == 1:
        yield from map(attempt, jobs)
        return
    with parallel_config("loky", inner_max_num_threads=1):
        parallel = Parallel(n_jobs=processes, return_as="generator_unordered", batch_size=1, pre_dispatch=processes)
        yield from parallel(delayed(attempt)(job) for job in jobs)


def attempt(job: Any) -> Outcome:
    """Make one run; what it raises becomes a failed outcome."""
    try:
        return Outcome(job, job.make())
    except Exception as error:
        return Outcome(job, None, "".join(traceback.format_exception_only(error)).strip())


def origin() -> Record:
    """When, with what and on what a run was made."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
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
