"""Progress of runs: bars on a terminal, otherwise a line of JSON for each finished run."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .attempt import Outcome
from .results import DamagedRun, is_complete, read_record
from .runner import PROGRESS, Spec
from .screen import raw
from .tasks import TASKS

POLL_EVERY = 0.5
"""Seconds between two looks at the signs of life that runs leave in their folders."""
SIGN_KINDS = {"step": int | float, "steps": int, "loss": int | float | None}
"""Required entries of a sign of life: key -> type of the value."""


@contextmanager
def shown(console: Console, specs: Sequence[Spec], results: Path) -> Iterator[Any]:
    """A context around a sweep of these runs; gives the function to call with each outcome."""
    if not console.is_terminal:
        yield lambda outcome: raw(console, json.dumps(as_record(outcome)))
        return
    with Bars(console, specs, results) as bars:
        yield bars.done


def as_record(outcome: Outcome) -> dict[str, Any]:
    """The line of JSON about an ended run."""
    metric = TASKS[outcome.spec.task].metric
    return {
        "task": outcome.spec.task,
        "variant": outcome.spec.variant,
        "seed": outcome.spec.seed,
        "status": outcome.status,
        "metric": metric,
        "final": outcome.final.get(metric),
        "seconds": round(outcome.seconds, 3),
        "folder": str(outcome.folder),
        "done_before": outcome.done_before,
    }


class Bars:
    """A bar for each run under way, and one for all, fed by what the runs leave in their folders."""

    def __init__(self, console: Console, specs: Sequence[Spec], results: Path) -> None:
        self.folders = {spec.folder(results): spec for spec in specs if not is_complete(spec.folder(results))}
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
        record = as_record(outcome)
        number = "" if record["final"] is None else f", {record['metric']} {record['final']:.4g}"
        line = f"{title(outcome.spec)}: {outcome.status}{number}, {outcome.seconds:.1f} s"
        self.progress.console.print(line, markup=False, highlight=False)

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
                self.bars[folder] = self.progress.add_task(title(self.folders[folder]), loss="")
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


def title(spec: Spec) -> str:
    """A run in few words."""
    return f"{spec.task} {spec.variant} seed {spec.seed}"
