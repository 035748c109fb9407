"""Real processes for the tests: forked, joined over the loopback with gloo, and gone at the end whatever happens."""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every step would import it, in each child anew
import torch.distributed as dist

PATIENCE = float(os.environ.get("TEST_PATIENCE", "2"))
"""Set it to more on a machine that is busy with other things."""
COLLECTIVE_SECONDS = 15 * PATIENCE
"""How long a rank waits for the others before it gives up."""
TEST_SECONDS = 30 * PATIENCE
"""How long all ranks may take together."""
GRACE_SECONDS = 1
"""How long the others may take once a rank has failed: the loss of a peer is noticed at once."""


CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)
"""Exit codes of an interpreter that died. Seen once, with torch 2.13, while gloo waited for a message."""


class RankFailed(AssertionError):
    """A rank raised, died or hung; the message has the tracebacks."""


class RankCrashed(RankFailed):
    """The interpreter of a rank died, which nothing that is written in Python should be able to bring about."""


def run(ranks: int, function: Callable[..., Any], *args: Any, seconds: float = TEST_SECONDS) -> list[Any]:
    """What ``function(*args)`` returned on each of several ranks, which form the default process group.

    Results are what ``torch.save`` can write. Forked processes know all that is imported and defined here, so that
    functions may be closures, and a start takes a fraction of a second. After a crash of the interpreter itself it is
    tried once more, with a warning.
    """
    try:
        return _run_once(ranks, function, args, seconds)
    except RankCrashed as problem:
        warnings.warn(f"tried again, as an interpreter crashed: {problem}", stacklevel=2)
        return _run_once(ranks, function, args, seconds)


def _run_once(ranks: int, function: Callable[..., Any], args: Sequence[Any], seconds: float) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        children = [
            fork.Process(target=_one_rank, args=(Path(folder), rank, ranks, function, args)) for rank in range(ranks)
        ]
        for child in children:
            child.start()
        try:
            _wait(children, seconds)
        finally:
            hung = [rank for rank, child in enumerate(children) if child.is_alive()]
            for child in children:
                child.kill()
                child.join()
        return _collect(Path(folder), children, hung)


def failures(found: Sequence[Any]) -> list[str]:
    """The messages of ranks that ``attempt`` saw fail; raises if one did not."""
    assert all(isinstance(one, str) for one in found), f"no error on rank {[isinstance(one, str) for one in found]}"
    return list(found)


def attempt(function: Callable[[], Any], *expected: type[BaseException]) -> str | None:
    """The message of the error that a function raises, or None."""
    try:
        function()
    except expected as problem:
        return f"{type(problem).__name__}: {problem}"
    return None


def _one_rank(folder: Path, rank: int, ranks: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """The life of a child. Errors of distributed checkpoints are BaseExceptions, so are those of pytest."""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        result = function(*args)
        torch.save(result, folder / f"{rank}.pt")
        dist.barrier()  # nobody leaves while others still talk
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)


def _wait(children: Sequence[BaseProcess], seconds: float) -> None:
    """Until all are done, or time is up, which is soon if one has failed."""
    deadline = time.monotonic() + seconds
    while any(child.is_alive() for child in children) and time.monotonic() < deadline:
        if any(child.exitcode for child in children):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        next((child for child in children if child.is_alive()), children[0]).join(timeout=0.02)


def _collect(folder: Path, children: Sequence[BaseProcess], hung: Sequence[int]) -> list[Any]:
    problems = []
    for rank, child in enumerate(children):
        trace = folder / f"{rank}.txt"
        if trace.exists():
            problems.append(f"rank {rank}:\n{trace.read_text()}")
        elif rank in hung:
            problems.append(f"rank {rank} did not come to an end")
        elif child.exitcode:
            problems.append(f"rank {rank} ended with exit code {child.exitcode}")
    if problems:
        crashed = any(child.exitcode in CRASHES for child in children)
        raise (RankCrashed if crashed else RankFailed)("\n".join(problems))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(len(children))]
