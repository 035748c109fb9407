"""Files of a run, and reading them back.

A results folder holds ``<task>/<variant>/seed-<seed>/`` for each run, where the variant is the method's name and
the settings that differ from the profile, as in ``anderson[history_size=5]``. In it:

- ``config.json``: task, method, seed, all settings, versions, hardware, date
- ``metrics.jsonl``: one line per step; ``pandas.read_json(path, lines=True)`` reads it
- ``summary.json``: how it ended; written last, so a run with a summary is complete
- ``pictures.npz``: arrays to draw, for tasks that have pictures
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd
from numpy.typing import NDArray

CONFIG, METRICS, SUMMARY, PICTURES = "config.json", "metrics.jsonl", "summary.json", "pictures.npz"
CONFIG_KINDS = {
    "task": str, "method": str, "variant": str, "seed": int, "profile": str, "settings": dict, "overrides": dict,
    "versions": dict, "hardware": dict, "date": str,
}  # fmt: skip
SUMMARY_KINDS = {
    "status": str, "steps": int | float, "seconds": int | float, "cpu_seconds": int | float,
    "learning_rate": int | float, "final": dict, "best": dict, "references": dict, "stats": dict,
}  # fmt: skip
"""Required entries of a file: key -> type of the value."""
FINISHED, DIVERGED = "finished", "diverged"


class DamagedRun(Exception):
    """A damaged run; the message names the damaged file."""


@dataclass(frozen=True)
class Run:
    """A completed run, read back from its folder."""

    folder: Path
    config: Mapping[str, Any]
    """Keys: task, method, variant, seed, profile, settings (all of the task's), overrides, versions, hardware, date."""
    summary: Mapping[str, Any]
    """Keys: status (finished or diverged), steps (gradient evaluations; forward passes count in parts), seconds (wall
    clock, training alone), cpu_seconds, final and best (metrics), training_loss (of the first batch, at the end; not in
    older runs), learning_rate, references (name -> metrics), stats (of the acceleration)."""

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.config["task"])

    @property
    def variant(self) -> str:
        """The method, and what was set differently: ``anderson[history_size=5]``."""
        return str(self.config["variant"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.config["seed"])

    @property
    def diverged(self) -> bool:
        """Whether the loss stopped being a finite number."""
        return self.summary["status"] == DIVERGED

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per step: step, seconds, cpu_seconds, loss on the batch, and the metrics if it was evaluated."""
        with reading(self.folder / METRICS) as path:
            # One call for the whole file: several times as fast as one for each line.
            rows = json.loads("[" + ",".join(path.read_text().splitlines()) + "]")
            if not rows or not all(isinstance(row, dict) and "step" in row for row in rows):
                raise ValueError("not one object with a step in each line")
            return pd.DataFrame(rows)

    @property
    def evaluations(self) -> pd.DataFrame:
        """The rows with an evaluation."""
        evaluated = [name for name in self.steps.columns if name not in ("step", "seconds", "cpu_seconds", "loss")]
        return self.steps.dropna(subset=evaluated, how="all")

    @cached_property
    def pictures(self) -> dict[str, NDArray[Any]]:
        """Arrays to draw; empty for most tasks."""
        if not (self.folder / PICTURES).exists():
            return {}
        with reading(self.folder / PICTURES) as path, np.load(path) as arrays:
            return dict(arrays)


def run_folder(results: Path, task: str, variant: str, seed: int) -> Path:
    """The folder of a run."""
    return results / task / variant / f"seed-{seed:03d}"


def is_complete(folder: Path) -> bool:
    """Whether the run in this folder has ended, well or not."""
    return (folder / SUMMARY).exists()


def load_run(folder: Path) -> Run:
    """A completed run; raises ``DamagedRun``."""
    return Run(folder, read_record(folder / CONFIG, CONFIG_KINDS), read_record(folder / SUMMARY, SUMMARY_KINDS))


def read_record(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The object in a JSON file that has all of these keys, with values of these kinds; raises ``DamagedRun``."""
    content = read_json(path)
    if missing := [key for key in kinds if key not in content]:
        raise DamagedRun(f"{path}: no {', '.join(missing)} in it; not written by torch-anderson?")
    if wrong := [key for key, kind in kinds.items() if not isinstance(content[key], kind)]:
        raise DamagedRun(f"{path}: damaged (a value of a wrong kind for {', '.join(wrong)})")
    return content


def load_runs(results: Path) -> tuple[list[Run], list[str]]:
    """All completed runs below a folder, in order, and a message for each that cannot be read.

    Runs under way, which have no summary yet, are left out.
    """
    runs, problems = [], []
    for summary in sorted(results.glob(f"**/{SUMMARY}")):
        try:
            run = load_run(summary.parent)
            _ = run.steps
        except DamagedRun as problem:
            problems.append(str(problem))
        else:
            runs.append(run)
    return runs, problems


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ``DamagedRun``."""
    with reading(path):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("holds no JSON object")
        return content


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Turn what goes wrong while a file is read into a message that names the file."""
    try:
        yield path
    except FileNotFoundError:
        raise DamagedRun(f"{path}: missing") from None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DamagedRun(f"{path}: damaged ({error})") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whenever the process is killed."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
