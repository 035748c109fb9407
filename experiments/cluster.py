"""Runs on a dask cluster, whose machines need not share our disk: the files of a run are returned as bytes.

Workers need a clone with the extra ``experiments``: start them there, with ``PYTHONPATH=.``. A worker makes one run at
a time, since torch has one random state in a process: ``--nthreads 1 --nworkers N``.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed import Client, as_completed, get_worker

from .jobs import Job, Outcome, attempt, failure
from .results import PROGRESS, DamagedRun, packed, read_record, unpack, write_json
from .screen import UserError

TOPIC = "torch-anderson-progress"
HEARTBEAT = 1.0
"""Seconds between two signs of life that a worker sends."""
NEVER = float("inf")
_one_run = threading.Lock()


class NoCluster(UserError):
    """The scheduler does not answer."""


def on_cluster(jobs: Sequence[Job], results: Path, scheduler: str) -> Iterator[Outcome]:
    """Outcomes in the order in which the runs end; their files are in place by then."""
    if not jobs:
        return
    with _client(scheduler) as client:
        client.subscribe_topic(TOPIC, lambda event: _show(event[1], jobs, results))
        futures = {
            client.submit(attempt_remotely, number, job, pure=False, priority=-number): job
            for number, job in enumerate(jobs)
        }
        try:
            for future in as_completed(futures, loop=client.loop):
                yield _receive(future, futures[future], results)
                future.release()
        finally:
            client.cancel(list(futures))


@contextmanager
def _client(scheduler: str) -> Iterator[Client]:
    try:
        client = Client(scheduler, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise NoCluster(
            f"no dask scheduler answers at {scheduler} ({error}): start one with `dask scheduler`"
        ) from error
    with client:
        yield client


def attempt_remotely(number: int, job: Job) -> tuple[Outcome, dict[str, bytes]]:
    """On a worker: make the run in a temporary folder, and send back what is in it."""
    with TemporaryDirectory(prefix="torch-anderson-") as name, _one_run:
        results = Path(name)
        with _signs_of_life(number, job.folder(results)):
            # Nobody would find the checkpoint on another worker.
            outcome = attempt(job, results, checkpoint_every=NEVER)
        return outcome, packed(results)


@contextmanager
def _signs_of_life(number: int, folder: Path) -> Iterator[None]:
    worker, stop = get_worker(), threading.Event()

    def send() -> None:
        while not stop.wait(HEARTBEAT):
            with suppress(DamagedRun):
                worker.log_event(TOPIC, {"number": number, "progress": read_record(folder / PROGRESS)})

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _show(event: dict[str, Any], jobs: Sequence[Job], results: Path) -> None:
    job = jobs[event["number"]]
    if not job.is_done(results):
        write_json(job.folder(results) / PROGRESS, event["progress"])


def _receive(future: Any, job: Job, results: Path) -> Outcome:
    if future.status != "finished":
        return failure(job, results, future.exception() if future.status == "error" else "the cluster gave it up")
    outcome, files = future.result()
    try:
        unpack(files, results)
    except OSError as error:
        return failure(job, results, error)
    return outcome
