"""Records on disk: a file of JSON lines for each problem and method, to which every run appends one line."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def file_of(folder: Path, problem: str, method: str) -> Path:
    """Where the runs of a method on a problem are kept."""
    return folder / problem / f"{method}.jsonl"


def append(folder: Path, record: Record) -> None:
    """Add a run. A line is written by one call, so that a process that is killed leaves it whole or not at all."""
    path = file_of(folder, record["problem"], record["method"])
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(plain(record)).encode() + b"\n"
    with locked(path) as handle:
        size = os.fstat(handle).st_size
        # A torn line, from a full disk say, must not spoil the next one.
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, b"\n" + line if torn else line)
        os.fsync(handle)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """A handle for appending that no other process has at the same time."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        with suppress(ImportError):  # Windows has no such lock
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def load(folder: Path, kinds: Mapping[str, type]) -> tuple[list[Record], list[str]]:
    """All runs of a study, and a message for each line or file that cannot be read.

    ``kinds`` says what a line holds at least: key -> kind of the value.
    """
    records: list[Record] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*/*.jsonl")):
        for number, line in enumerate(read_lines(path, problems), 1):
            try:
                records.append(parse(line, kinds))
            except ValueError as error:
                problems.append(f"{path}, line {number}: damaged ({error}); the same command makes its run again")
    return records, problems


def read_lines(path: Path, problems: list[str]) -> list[bytes]:
    """The lines of a file that are not empty; none of a file that cannot be read, which is added to the problems."""
    try:
        return [line for line in path.read_bytes().splitlines() if line]
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror})")
        return []


def parse(line: bytes, kinds: Mapping[str, type]) -> Record:
    """A run from its line; raises ``ValueError``."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("no JSON object")
    if wrong := [key for key, kind in kinds.items() if not isinstance(record.get(key), kind)]:
        raise ValueError(f"no proper {', '.join(wrong)}")
    return record


def plain(value: Any) -> Any:
    """The value with null for numbers that JSON cannot express."""
    match value:
        case dict():
            return {key: plain(entry) for key, entry in value.items()}
        case list() | tuple():
            return [plain(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
    return value
