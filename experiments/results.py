"""The store: what runs leave on disk, and reading it back.

The results of a study are a folder. A run of a task, recorded step by step, has the folder
``<task>/<variant>/seed-<seed>/``, where the variant is the method's name and the settings that differ from the profile,
as in ``anderson[history_size=5]``. In it:

- ``config.json``: task, method, seed, all settings, versions, hardware, date
- ``metrics.jsonl``: one line per step; ``pandas.read_json(path, lines=True)`` reads it
- ``summary.json``: how it ended; written last, so a run with a summary is complete
- ``pictures.npz``: arrays to draw, for tasks that have pictures

A run of a race is one line of ``<problem>/<method>.jsonl``, with its arrays, if any, in a ``.npz`` file beside it.
Everything is written by atomic operations: whenever a process is killed, a file or line is there whole or not at all.
"""

import errno
import io
import json
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .screen import UserError

Record = dict[str, Any]
CONFIG, METRICS, SUMMARY, PICTURES = "config.json", "metrics.jsonl", "summary.json", "pictures.npz"
CHECKPOINT, PROGRESS = "checkpoint.pt", "progress.json"
"""Files of a run under way."""
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


def load_lines(path: Path, kinds: Mapping[str, Any]) -> tuple[list[Record], list[str]]:
    """The runs in a file of lines, and a message for each line, or the file, that cannot be read."""
    records: list[Record] = []
    problems: list[str] = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{path}: cannot be read ({error.strerror})"]
    for number, line in enumerate(lines, 1):
        try:
            if line:
                records.append(checked(json.loads(line), kinds))
        except ValueError as error:
            problems.append(f"{path}, line {number}: damaged ({error}); the same command makes its run again")
    return records, problems


def read_record(path: Path, kinds: Mapping[str, Any] | None = None) -> Record:
    """The object in a JSON file, which has all of these keys with values of these kinds; raises ``DamagedRun``."""
    with reading(path):
        return checked(json.loads(path.read_text()), kinds or {})


def checked(content: Any, kinds: Mapping[str, Any]) -> Record:
    """The content of a file or line of JSON; raises ``ValueError`` if it is no object with such values."""
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    if missing := [key for key in kinds if key not in content]:
        raise ValueError(f"no {', '.join(missing)} in it; not written by torch-anderson?")
    if wrong := [key for key, kind in kinds.items() if not isinstance(content[key], kind)]:
        raise ValueError(f"a value of a wrong kind for {', '.join(wrong)}")
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


# Writing


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    write_bytes(path, (json.dumps(finite(content), indent=1) + "\n").encode())


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a file of arrays so that it is there whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_bytes(path, buffer.getvalue())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whenever the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a run to a file of lines. One call writes the line, so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(finite(record)).encode() + b"\n"
    with alone_in(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, patience=60.0) as handle:
        size = os.fstat(handle).st_size
        # A torn line, from a full disk say, must not spoil the next one.
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, b"\n" + line if torn else line)
        os.fsync(handle)


@contextmanager
def alone_in(path: Path, flags: int = os.O_RDONLY, patience: float = 5.0) -> Iterator[int]:
    """A handle of a folder or file that no other process has. The lock goes with the process, however it ends."""
    handle = os.open(path, flags, 0o644)
    deadline = time.monotonic() + patience
    try:
        while not _locked(handle):
            if time.monotonic() > deadline:
                raise RuntimeError(f"another process is at this run: {path}")
            time.sleep(0.05)
        yield handle
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def packed(folder: Path) -> dict[str, bytes]:
    """The files below a folder: path in it -> content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def unpack(files: Mapping[str, bytes], results: Path) -> None:
    """Add the files of a run that was made in an empty folder elsewhere.

    A folder of a run is replaced, with the summary, which marks it as complete, last; lines of races are appended.
    """
    for name in sorted(files, key=lambda name: name.endswith(SUMMARY)):
        path = results / name
        if path.name == CONFIG:
            shutil.rmtree(path.parent, ignore_errors=True)
        if path.suffix == ".jsonl" and path.name != METRICS:
            append_line(path, json.loads(files[name]))
        else:
            write_bytes(path, files[name])


class CannotWrite(UserError):
    """The results folder takes no files: not ours, or the disk is full."""


def is_full(error: BaseException) -> bool:
    """Whether this is what a full disk raises."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full(results: Path) -> str:
    """The message for a full disk."""
    return f"no space left on the disk of {results.resolve()}: free some space and run the same command again"


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
        if is_full(error):
            raise CannotWrite(disk_full(results)) from error
        raise CannotWrite(f"cannot write to {results} ({error.strerror}): choose another folder") from error


def finite(value: Any) -> Any:
    """A copy with null for each number that JSON cannot represent.

    >>> finite({"loss": float("nan"), "top1": (0.5,)})
    {'loss': None, 'top1': [0.5]}
    """
    match value:
        case dict():
            return {key: finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [finite(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
    return value


# Where numbers come from


def origin() -> Record:
    """When, with what and on what a run was made."""
    return {
        "versions": versions(),
        "hardware": {"machine": platform.machine(), "cpu": processor(), "threads": 1},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def versions() -> dict[str, str]:
    """Versions of everything that results may depend on; with the commit if the library runs from its repository."""
    names = ("torch-anderson", "torch", "numpy", "scipy", "schedulefree", "pytorch_optimizer")
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    commit = {} if git.returncode else {"commit": git.stdout.strip()}
    return {name: version(name) for name in names} | {"python": platform.python_version()} | commit


@cache
def processor() -> str:
    """The name of the processor, if the system provides it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
