"""Provenance of the numbers of a report: commands, versions, machines, dates, and what is missing."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .comparison import Comparison, Group
from .results import CONFIG, SUMMARY, DamagedRun, read_record
from .text import described, distinct


def header(tasks: Sequence[Comparison]) -> dict[str, Any]:
    """What was run, on which machine and when, in words."""
    runs = [trace.run for task in tasks for group in task.groups for trace in group.traces]
    dates = sorted(str(run.config["date"]) for run in runs)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": version("torch-anderson"),
        "runs": len(runs),
        "first": dates[0],
        "last": dates[-1],
        "core_hours": f"{sum(float(run.summary['cpu_seconds']) for run in runs) / 3600:.2f}",
        "profiles": distinct(str(run.config["profile"]) for run in runs),
        "versions": distinct(described(run.config["versions"]) for run in runs),
        "hardware": distinct(described(run.config["hardware"]) for run in runs),
        "commands": [command for task in tasks for command in commands(task)],
    }


def commands(task: Comparison) -> Iterator[str]:
    """Commands that repeat these runs: one for all methods with the same seeds and settings."""
    methods: dict[tuple[str, str], list[str]] = {}
    for group in task.groups:
        first = group.traces[0].run.config
        changes = " ".join(f"{name}={value}" for name, value in first["overrides"].items())
        options = f"--profile {first['profile']}" + (f" --set {changes}" if changes else "")
        methods.setdefault((seed_ranges(group.seeds), options), []).append(group.method)
    for (seeds, options), names in methods.items():
        yield f"python -m experiments run {task.task} --method {' '.join(names)} --seeds {seeds} {options}"


def seed_ranges(seeds: Iterable[int]) -> str:
    """Seeds as the command line takes them.

    >>> seed_ranges([0, 1, 2, 7])
    '0:3,7'
    """
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and parts[-1][1] == seed:
            parts[-1][1] += 1
        else:
            parts.append([seed, seed + 1])
    return ",".join(str(first) if end == first + 1 else f"{first}:{end}" for first, end in parts)


def incomplete(results: Path, tasks: Sequence[Comparison]) -> list[str]:
    """The seeds that a method lacks and another one has, and the runs that have begun but not ended."""
    lacking = [message for task in tasks for group in task.groups if (message := missing(task, group))]
    return lacking + [message for path in sorted(results.glob(f"**/{CONFIG}")) if (message := unfinished(path.parent))]


def missing(task: Comparison, group: Group) -> str:
    """The seeds that a method lacks; empty if none, and for variants, whose seeds may differ."""
    lacking = set(task.seeds) - set(group.seeds)
    if group.bracket or not lacking:
        return ""
    return (
        f"{task.title}, {group.label}: {len(group.seeds)} of {len(task.seeds)} seeds, not there: {seed_ranges(lacking)}"
    )


def unfinished(folder: Path) -> str:
    """A run that is under way or was stopped; empty for others."""
    if (folder / SUMMARY).exists():
        return ""
    try:
        config = read_record(folder / CONFIG)
    except DamagedRun as problem:
        return str(problem)
    return f"{config.get('task')}, {config.get('variant')}, seed {config.get('seed')}: begun, not ended ({folder})"
