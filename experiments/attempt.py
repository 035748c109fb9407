"""One run of a sweep: an attempt at it, and how it ended."""

import errno
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from threadpoolctl import threadpool_limits

from .results import DamagedRun, load_run
from .runner import Spec, run

FAILED = "failed"


class NoCluster(Exception):
    """The scheduler does not answer."""


@dataclass(frozen=True)
class Outcome:
    """How one run of a sweep ended."""

    spec: Spec
    folder: Path
    status: str
    """finished, diverged or failed."""
    final: dict[str, float] = field(default_factory=dict)
    """Metrics at the end."""
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


def attempt(spec: Spec, results: Path, checkpoint_every: float) -> Outcome:
    """Make one run, with one thread; what it raises becomes a failed outcome."""
    try:
        # One thread for NumPy too, where a run uses it: torch's is the runner's affair.
        with threadpool_limits(1), alone_in(spec.folder(results)):
            return outcome_of(spec, run(spec, results, checkpoint_every))
    except Exception as error:
        return failure(spec, results, error)


def outcome_of(spec: Spec, folder: Path) -> Outcome:
    """The outcome of a complete run."""
    summary = load_run(folder).summary
    return Outcome(spec, folder, summary["status"], dict(summary["final"]), summary["seconds"])


def failure(spec: Spec, results: Path, error: Exception | str) -> Outcome:
    """The outcome of a run that has no result."""
    folder = spec.folder(results)
    if isinstance(error, DamagedRun):
        error = f"{error}. Delete the folder {folder}, and the same command makes this run again."
    if isinstance(error, str):
        return Outcome(spec, folder, FAILED, error=error)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    details = "".join(traceback.format_exception(error))
    message = disk_full(results) if full else "".join(traceback.format_exception_only(error)).strip()
    return Outcome(spec, folder, FAILED, error=message, details=details, disk_full=full)


def done_before(spec: Spec, results: Path) -> Outcome:
    """The outcome of a run that is complete already, or of one that is damaged; raises ``OtherSettings``."""
    try:
        return replace(outcome_of(spec, run(spec, results)), done_before=True)
    except DamagedRun as problem:
        return failure(spec, results, problem)


@contextmanager
def alone_in(folder: Path, patience: float = 5.0) -> Iterator[None]:
    """A context in which no other process is at the same run. The lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"another process is at this run: {folder}") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)


def disk_full(results: Path) -> str:
    """The message for a full disk."""
    return f"no space left on the disk of {results.resolve()}: free some space and run the same command again"
