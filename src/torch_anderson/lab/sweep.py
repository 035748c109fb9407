"""Many runs: in this process, in several of this machine (joblib), or on a dask cluster (cluster.py).

A run that fails is recorded and the others go on. Runs that are complete are not made again, and those that were
stopped go on from their checkpoint, so the same call resumes whatever ended the last one.
"""

import errno
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky.process_executor import BrokenProcessPool
from threadpoolctl import threadpool_limits

from .results import DamagedRun, is_complete, load_run
from .runner import Spec, run

FAILED = "failed"
ERROR = "error.txt"
"""In the folder of a run that failed: the traceback."""
PATIENCE = 2
"""So many times in a row worker processes may be killed before any run ends."""


class CannotWrite(Exception):
    """The results folder takes no files: not ours, or the disk is full."""


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
    """Of training."""
    error: str = ""
    """Why it failed, in one line."""
    details: str = ""
    """The traceback."""
    disk_full: bool = False
    """Whether it failed for want of space, as all others would."""
    done_before: bool = False
    """Whether it was complete before this sweep."""

    @property
    def failed(self) -> bool:
        """Whether there is no result."""
        return self.status == FAILED


def sweep(
    specs: Sequence[Spec],
    results: Path,
    jobs: int = 1,
    *,
    scheduler: str | None = None,
    checkpoint_every: float = 60.0,
    on_done: Callable[[Outcome], Any] | None = None,
) -> list[Outcome]:
    """Make all runs that are not there yet, ``jobs`` at a time or on the dask cluster of this scheduler.

    ``on_done`` is called with each outcome as soon as it is there, in this process. Raises ``CannotWrite``.
    """
    check_writable(results)
    outcomes = []
    for outcome in _outcomes(specs, results, jobs, scheduler, checkpoint_every):
        record_error(outcome)
        outcomes.append(outcome)
        if on_done:
            on_done(outcome)
        if outcome.disk_full:
            raise CannotWrite(disk_full(results))
    return outcomes


def _outcomes(
    specs: Sequence[Spec], results: Path, jobs: int, scheduler: str | None, checkpoint_every: float
) -> Iterator[Outcome]:
    left = unfinished(specs, results)
    # The runner makes nothing of a complete run, but sees whether its settings are the same: known before any work.
    yield from [done_before(spec, results) for spec in specs if spec not in left]
    if scheduler is not None:
        from .cluster import on_cluster

        yield from on_cluster(left, results, scheduler)
    elif min(jobs, len(left)) <= 1:
        yield from (attempt(spec, results, checkpoint_every) for spec in left)
    else:
        yield from in_processes(left, results, jobs, checkpoint_every)


def done_before(spec: Spec, results: Path) -> Outcome:
    """The outcome of a run that is complete already, or of one that is damaged; raises ``OtherSettings``."""
    try:
        return replace(outcome_of(spec, run(spec, results)), done_before=True)
    except DamagedRun as problem:
        return failure(spec, results, problem)


def unfinished(specs: Iterable[Spec], results: Path) -> list[Spec]:
    """The runs that are still to be made, or to be ended."""
    return [spec for spec in specs if not is_complete(spec.folder(results))]


def in_processes(specs: Sequence[Spec], results: Path, jobs: int, checkpoint_every: float = 60.0) -> Iterator[Outcome]:
    """Outcomes in the order in which the runs end. A killed worker (out of memory, say) costs no other run."""
    waiting = list(specs)
    deaths = 0
    while waiting and deaths < PATIENCE:
        try:
            for outcome in _parallel(list(waiting), results, jobs, checkpoint_every):
                waiting.remove(outcome.spec)
                deaths = 0
                yield outcome
        except BrokenProcessPool:
            deaths += 1
    yield from (failure(spec, results, "its worker process was killed, out of memory?") for spec in waiting)


def _parallel(specs: Sequence[Spec], results: Path, jobs: int, checkpoint_every: float) -> Iterator[Outcome]:
    calls = [delayed(attempt)(spec, results, checkpoint_every) for spec in specs]
    with parallel_config("loky", inner_max_num_threads=1, initializer=_start_worker, initargs=(os.getpid(),)):
        parallel = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch=jobs)
        # Ctrl-C reaches the workers too, which inherit that they ignore it: stopping them is up to this process.
        with _ignoring_interrupts():
            outcomes = parallel(calls)
    with closing(outcomes):
        yield from outcomes


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this worker when its parent was killed: nobody waits for it, and a new sweep may be at the same run."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


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


def record_error(outcome: Outcome) -> None:
    """Leave the traceback of a failed run in its folder, and that of an earlier attempt not."""
    with suppress(OSError):  # where nothing can be written, the message on the screen has to do
        if outcome.details:
            outcome.folder.mkdir(parents=True, exist_ok=True)
            (outcome.folder / ERROR).write_text(outcome.details)
        elif not outcome.failed:
            (outcome.folder / ERROR).unlink(missing_ok=True)


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


def check_writable(results: Path) -> None:
    """Write and remove a file, so that a full disk or a folder of somebody else is known before hours of work."""
    probe = results / f".probe-{os.getpid()}"
    try:
        results.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(2**20))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CannotWrite(disk_full(results)) from error
        raise CannotWrite(f"cannot write to {results} ({error.strerror}): choose another folder") from error


def disk_full(results: Path) -> str:
    """What to say, and what to do about it."""
    return f"no space left on the disk of {results.resolve()}: free some, then the same command goes on"
