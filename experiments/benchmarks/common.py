"""What the benchmarks share: the command line, interleaved timing, and parts of the library that are switched off."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import tyro

K = TypeVar("K")
Change = tuple[Any, str, Any]
"""A module or class, the name of one of its attributes, and another value."""


def command(main: Callable[..., None]) -> None:
    """Call ``main`` with the arguments of the command line; its parameters are the options.

    The description is the docstring of the module that is run.
    """
    tyro.cli(main, description=sys.modules["__main__"].__doc__)


def chosen(names: Iterable[str], table: Mapping[str, Any]) -> list[str]:
    """The names, or all of the table if there are none; ends the program if one is unknown."""
    unknown = [name for name in names if name not in table]
    if unknown:
        sys.exit(f"Unknown: {', '.join(unknown)}. Allowed: {', '.join(table)}.")
    return list(names) or list(table)


def take_turns(measures: Mapping[K, Callable[[], float]], rounds: int, warmup: int) -> dict[K, list[float]]:
    """Name -> results, round by round; interleaved, so that other load affects all measures equally."""
    for _ in range(warmup):
        for measure in measures.values():
            measure()
    results: dict[K, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            results[name].append(measure())
    return results


def timed(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes."""
    start = clock()
    call()
    return clock() - start


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of time over the base's time.

    >>> ratio([2.0, 6.0, 9.0], [1.0, 2.0, 3.0])
    3.0
    """
    return median(a / b for a, b in zip(times, base, strict=True))


def difference(times: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of the time minus that of the base."""
    return median(a - b for a, b in zip(times, base, strict=True))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A context in which torch uses so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def changed(changes: Iterable[Change]) -> Iterator[None]:
    """A context in which attributes of the library have other values, which switch a part of it off."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield


def jumps(optimizer: Any) -> int:
    """The number of accepted jumps."""
    return int(optimizer.stats.counts["accepted"])


def accepted(optimizer: Any) -> str:
    """The share of accelerations that jumped."""
    counts = optimizer.stats.counts
    total = counts["accepted"] + sum(n for name, n in counts.items() if name.startswith(("rejected_", "skipped_")))
    return f"{counts['accepted'] / total:.0%}" if total else "-"
