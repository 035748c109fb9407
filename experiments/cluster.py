"""Runs on a dask cluster, whose machines need not share our disk: the files of a run are returned as bytes.

Workers need a clone with the extra ``experiments``: start them there, with ``PYTHONPATH=.``. A worker makes one run at
a time, since torch has one random state in a process: ``--nthreads 1 --nworkers N``.
"""

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed import Client, as_completed, get_worker

from .attempt import NoCluster, Outcome, attempt, failure
from .results import SUMMARY, DamagedRun, read_json, write_bytes, write_json
from .runner import PROGRESS, Spec

TOPIC = "torch-anderson-progress"
HEARTBEAT = 1.0
"""Seconds between two signs of life that a worker sends."""
NEVER = float("inf")
_one_run = threading.Lock()

Files = dict[str, bytes]


def on_cluster(specs: Sequence[Spec], results: Path, scheduler: str) -> Iterator[Outcome]:
    """Outcomes in the order in which the runs end; their files are in place by then."""
    if not specs:
        return
    with _client(scheduler) as client:
        client.subscribe_topic(TOPIC, lambda event: _show(event[1], specs, results))
        futures = {
            client.submit(attempt_remotely, number, spec, pure=False, priority=-number): spec
            for number, spec in enumerate(specs)
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


def attempt_remotely(number: int, spec: Spec) -> tuple[Outcome, Files]:
    """On a worker: make the run in a temporary folder, and send back what is in it."""
    with TemporaryDirectory(prefix="torch-anderson-") as name, _one_run:
        results = Path(name)
        with _signs_of_life(number, spec.folder(results)):
            # Nobody would find the checkpoint on another worker.
            outcome = attempt(spec, results, checkpoint_every=NEVER)
        return outcome, packed(outcome.folder)


@contextmanager
def _signs_of_life(number: int, folder: Path) -> Iterator[None]:
    worker, stop = get_worker(), threading.Event()

    def send() -> None:
        while not stop.wait(HEARTBEAT):
            with suppress(DamagedRun):
                worker.log_event(TOPIC, {"number": number, "progress": read_json(folder / PROGRESS)})

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _show(event: dict[str, Any], specs: Sequence[Spec], results: Path) -> None:
    folder = specs[event["number"]].folder(results)
    if not (folder / SUMMARY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / PROGRESS, event["progress"])


def _receive(future: Any, spec: Spec, results: Path) -> Outcome:
    if future.status != "finished":
        return failure(spec, results, future.exception() if future.status == "error" else "the cluster gave it up")
    outcome, files = future.result()
    folder = spec.folder(results)
    try:
        unpack(files, folder)
    except OSError as error:
        return failure(spec, results, error)
    return replace(outcome, folder=folder)


def packed(folder: Path) -> Files:
    """The files of a folder: path in it -> content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def unpack(files: Files, folder: Path) -> None:
    """Replace the files of a run; the summary is written last, since it marks the run as complete."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in sorted(files, key=lambda name: name == SUMMARY):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, files[name])
