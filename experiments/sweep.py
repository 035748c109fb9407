"""Many runs: in this process, in several of this machine (joblib), or on a dask cluster (cluster.py).

A failed run is recorded and the others continue. Runs that are complete are not made again, and interrupted
ones continue from their checkpoint, so that the same call resumes a sweep.
"""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky.process_executor import BrokenProcessPool

from .attempt import Outcome, attempt, disk_full, done_before, failure
from .results import is_complete
from .runner import Spec

ERROR = "error.txt"
"""File with the traceback, in the folder of a failed run."""
PATIENCE = 2
"""Number of times in a row that worker processes may be killed before a run ends."""


class CannotWrite(Exception):
    """The results folder takes no files: not ours, or the disk is full."""


def sweep(
    specs: Sequence[Spec],
    results: Path,
    jobs: int = 1,
    *,
    scheduler: str | None = None,
    checkpoint_every: float = 60.0,
    on_done: Callable[[Outcome], Any] | None = None,
) -> list[Outcome]:
    """Make all missing runs, ``jobs`` at a time or on the dask cluster of this scheduler.

    ``on_done`` is called with each outcome as soon as it is known, in this process. Raises ``CannotWrite``.
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


def unfinished(specs: Iterable[Spec], results: Path) -> list[Spec]:
    """The runs that are still to be made, or to be ended."""
    return [spec for spec in specs if not is_complete(spec.folder(results))]


def in_processes(specs: Sequence[Spec], results: Path, jobs: int, checkpoint_every: float = 60.0) -> Iterator[Outcome]:
    """Outcomes in the order in which the runs end. A killed worker (e.g. out of memory) does not affect other runs."""
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
    return in_workers([delayed(attempt)(spec, results, checkpoint_every) for spec in specs], jobs)


def in_workers(calls: Sequence[Any], jobs: int) -> Iterator[Any]:
    """What joblib's delayed calls return, in the order in which they end; raises ``BrokenProcessPool``."""
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
    """End this worker if its parent was killed: a new sweep may work on the same run."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def record_error(outcome: Outcome) -> None:
    """Leave the traceback of a failed run in its folder, and that of an earlier attempt not."""
    with suppress(OSError):  # where nothing can be written, the message on the screen has to do
        if outcome.details:
            outcome.folder.mkdir(parents=True, exist_ok=True)
            (outcome.folder / ERROR).write_text(outcome.details)
        elif not outcome.failed:
            (outcome.folder / ERROR).unlink(missing_ok=True)


def check_writable(results: Path) -> None:
    """Write and remove a file, to detect a full disk or missing permissions before hours of work."""
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
