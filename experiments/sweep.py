"""The scheduler: many runs, in this process, in several of this machine (joblib), or on a dask cluster (``cluster``).

A failed run is recorded and the others continue. Runs that are complete are not made again, and interrupted ones
continue from their checkpoint if they have one, so that the same call resumes a sweep.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky.process_executor import BrokenProcessPool

from .jobs import CHECKPOINT_EVERY, Job, Outcome, attempt, failure
from .results import CannotWrite, DamagedRun, check_writable, disk_full

ERROR = "error.txt"
"""File with the traceback, in the folder of a failed run."""
PATIENCE = 2
"""Number of times in a row that worker processes may be killed before a run ends."""


def sweep(
    jobs: Sequence[Job],
    results: Path,
    processes: int = 1,
    *,
    scheduler: str | None = None,
    checkpoint_every: float = CHECKPOINT_EVERY,
    on_done: Callable[[Outcome], Any] | None = None,
) -> list[Outcome]:
    """Make all missing runs, in so many processes or on the dask cluster of this scheduler.

    ``on_done`` is called with each outcome as soon as it is known, in this process. Raises ``CannotWrite``.
    """
    check_writable(results)
    outcomes = []
    for outcome in _outcomes(jobs, results, processes, scheduler, checkpoint_every):
        _record_error(outcome, results)
        outcomes.append(outcome)
        if on_done:
            on_done(outcome)
        if outcome.disk_full:
            raise CannotWrite(disk_full(results))
    return outcomes


def _outcomes(
    jobs: Sequence[Job], results: Path, processes: int, scheduler: str | None, checkpoint_every: float
) -> Iterator[Outcome]:
    known = [job.is_done(results) for job in jobs]
    # A complete run is not made again, but checks whether its settings are the same: known before any work.
    yield from [_done_before(job, results) for job, done in zip(jobs, known, strict=True) if done]
    left = [job for job, done in zip(jobs, known, strict=True) if not done]
    if scheduler is not None:
        from .cluster import on_cluster

        yield from on_cluster(left, results, scheduler)
    elif min(processes, len(left)) <= 1:
        yield from (attempt(job, results, checkpoint_every) for job in left)
    else:
        yield from _in_processes(left, results, processes, checkpoint_every)


def _done_before(job: Job, results: Path) -> Outcome:
    try:
        return replace(job.make(results), done_before=True)
    except DamagedRun as problem:
        return failure(job, results, problem)


def _record_error(outcome: Outcome, results: Path) -> None:
    """Leave the traceback of a failed run in its folder, and that of an earlier attempt not."""
    path = outcome.job.folder(results) / ERROR
    with suppress(OSError):  # where nothing can be written, the message on the screen has to do
        if outcome.details:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(outcome.details)
        elif not outcome.failed:
            path.unlink()
            path.parent.rmdir()  # of a race, whose run leaves nothing else there


def _in_processes(jobs: Sequence[Job], results: Path, processes: int, checkpoint_every: float) -> Iterator[Outcome]:
    """Outcomes in the order in which the runs end. A killed worker (e.g. out of memory) does not affect other runs."""
    waiting = list(jobs)
    deaths = 0
    while waiting and deaths < PATIENCE:
        try:
            for outcome in _in_workers(list(waiting), results, processes, checkpoint_every):
                waiting.remove(outcome.job)
                deaths = 0
                yield outcome
        except BrokenProcessPool:
            deaths += 1
    yield from (failure(job, results, "its worker process was killed, out of memory?") for job in waiting)


def _in_workers(jobs: Sequence[Job], results: Path, processes: int, checkpoint_every: float) -> Iterator[Outcome]:
    with parallel_config("loky", inner_max_num_threads=1, initializer=_start_worker, initargs=(os.getpid(),)):
        parallel = Parallel(n_jobs=processes, return_as="generator_unordered", batch_size=1, pre_dispatch=processes)
        # Ctrl-C reaches the workers too, which inherit that they ignore it: stopping them is up to this process.
        with _ignoring_interrupts():
            outcomes = parallel(delayed(attempt)(job, results, checkpoint_every) for job in jobs)
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
