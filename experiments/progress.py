"""Progress of runs: estimates before, bars on a terminal, otherwise a line of JSON for each ended run."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .data import MissingData
from .jobs import Job, Outcome, unfinished
from .results import PROGRESS, DamagedRun, Record, read_record
from .screen import complain, duration, raw, tell

ESTIMATING = 8.0
"""Approximate limit of the time of all estimates together, in seconds."""
POLL_EVERY = 0.5
"""Seconds between two looks at the signs of life that runs leave in their folders."""
SIGN_KINDS = {"step": int | float, "steps": int, "loss": int | float | None}
"""Required entries of a sign of life: key -> type of the value."""


def announce(console: Console, jobs: Sequence[Job], results: Path, processes: int | None) -> None:
    """Print the number of runs and the estimated time; without ``processes``, only the time on one core."""
    left = unfinished(jobs, results)
    tell(console, f"{len(jobs)} runs ({len(jobs) - len(left)} done before) in {results}")
    if left and (seconds := estimate(left, results)):
        spread = f"{duration(seconds / min(processes, len(left)))} with {processes} jobs, " if processes else ""
        tell(console, f"Estimated time: {spread}{duration(seconds)} on one core")


def estimate(jobs: Sequence[Job], results: Path) -> float:
    """Seconds that these runs take one after the other, from one seed of each kind. Reports missing data, once."""
    kinds = {kind(job): job for job in jobs}
    seconds = dict.fromkeys(kinds, 0.0)
    missing = {}
    for name, job in kinds.items():
        try:
            seconds[name] = estimate_one(job, min(0.4, ESTIMATING / len(kinds)))
        except MissingData as problem:
            missing[str(problem)] = name
    complain(*missing)
    return sum(seconds[kind(job)] * share_left(job.folder(results)) for job in jobs)


def kind(job: Job) -> tuple[Any, ...]:
    """What distinguishes a run from others, except for the seed."""
    return tuple(value for name, value in job.identity.items() if name != "seed")


def estimate_one(job: Job, budget: float) -> float:
    """Seconds of one run; 0 for one that cannot start, which reports the reason when it is run."""
    try:
        return job.estimate(budget)
    except MissingData:
        raise
    except Exception:
        return 0.0


def share_left(folder: Path) -> float:
    """The approximate share that is left of an interrupted run; 1 for any other run."""
    sign = sign_of_life(folder)
    return 1 - sign["step"] / sign["steps"] if sign else 1.0


@contextmanager
def shown(console: Console, jobs: Sequence[Job], results: Path) -> Iterator[Callable[[Outcome], None]]:
    """A context around a sweep of these runs; gives the function to call with each outcome."""
    if not console.is_terminal:
        yield lambda outcome: raw(console, json.dumps(as_record(outcome, results)))
        return
    with Bars(console, jobs, results) as bars:
        yield bars.done


def as_record(outcome: Outcome, results: Path) -> Record:
    """The line of JSON about an ended run."""
    record = {**outcome.job.identity, "status": outcome.status, **outcome.numbers, "done_before": outcome.done_before}
    record.setdefault("seconds", round(outcome.seconds, 3))  # those of an equation are the time that it was given
    folder = outcome.job.folder(results)
    return record | ({"folder": str(folder)} if folder.is_dir() else {})


class Bars:
    """A bar for each run under way, and one for all, fed by what the runs leave in their folders."""

    def __init__(self, console: Console, jobs: Sequence[Job], results: Path) -> None:
        self.folders = {job.folder(results): job for job in unfinished(jobs, results)}
        # What stopped runs have left is no sign of life. Our clock would not tell: that of the files may lag behind it.
        self.before = {folder: stamp(folder) for folder in self.folders}
        self.ended = 0
        self.bars: dict[Path, TaskID] = {}
        # Twice a second is smooth enough, and the drawing takes its time from runs in this process.
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
            transient=True,
        )
        self.all = self.progress.add_task("all runs", total=len(self.folders), loss="")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.progress.start()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.progress.stop()

    def done(self, outcome: Outcome) -> None:
        """Tell of an ended run."""
        if outcome.done_before:
            return
        self.ended += 1
        numbers = outcome.numbers
        number = f", {numbers['metric']} {numbers['final']:.4g}" if numbers.get("final") is not None else ""
        line = f"{outcome.job.title}: {outcome.status}{number}, {outcome.seconds:.1f} s"
        tell(self.progress.console, line)

    def _watch(self) -> None:
        while not self.stop.wait(POLL_EVERY):
            self.look()

    def look(self) -> None:
        """Bring the bars up to date."""
        alive = {folder: sign for folder in self.folders if (sign := sign_of_life(folder, self.before[folder]))}
        for folder in self.bars.keys() - alive.keys():
            self.progress.remove_task(self.bars.pop(folder))
        for folder, sign in alive.items():
            if folder not in self.bars:
                self.bars[folder] = self.progress.add_task(self.folders[folder].title, loss="")
            loss = "diverged" if sign["loss"] is None else f"loss {sign['loss']:.3g}"
            self.progress.update(self.bars[folder], completed=sign["step"], total=sign["steps"], loss=loss)
        # The parts of runs count too: the time that is left would jump otherwise.
        parts = sum(sign["step"] / sign["steps"] for sign in alive.values())
        self.progress.update(self.all, completed=min(self.ended + parts, len(self.folders)))


def stamp(folder: Path) -> int | None:
    """When the run in this folder last gave a sign of life, by the clock of the file; None if it never did."""
    try:
        return (folder / PROGRESS).stat().st_mtime_ns
    except OSError:  # not begun, or ended
        return None


def sign_of_life(folder: Path, before: int | None = None) -> dict[str, Any] | None:
    """The latest sign of life of the run in this folder, unless it has the stamp ``before`` or is damaged."""
    if stamp(folder) == before:
        return None
    try:
        sign = read_record(folder / PROGRESS, SIGN_KINDS)
    except DamagedRun:  # it ended meanwhile
        return None
    return sign if sign["steps"] > 0 else None
