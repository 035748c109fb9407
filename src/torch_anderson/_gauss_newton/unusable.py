"""Residuals that cannot be used, which ranks find out together."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._ranks.ranks import Ranks


class Unusable(Exception):
    """Residuals that cannot be used, for reasons that depend on data; ``cause`` is the name that is counted."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@contextmanager
def agreeing(ranks: Ranks) -> Iterator[None]:
    """Raise on all ranks, or on none: what one rank cannot use, no rank uses."""
    if ranks.size == 1:
        yield
        return
    found: Exception | None = None
    try:
        yield
    except Exception as problem:
        found = problem
    # Residuals that are not finite are less severe: they only show that these weights are no better; others may be.
    severity = 0.0 if found is None else 1.0 if getattr(found, "cause", "") == "nonfinite_outputs" else 2.0
    worst = float(ranks.largest(torch.tensor(severity)))
    if found is not None and worst == severity:
        raise found
    if worst:
        cause = "nonfinite_outputs" if worst == 1.0 else "other_rank"
        raise Unusable(cause, "residuals could not be used on another rank")


def one_line(problem: BaseException, most: int = 200) -> str:
    """The first line of an error's message: torch may add pages about its dispatcher.

    >>> one_line(ValueError("too long" + chr(10) + "a table"))
    'too long'
    """
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return lines[0] if len(lines[0]) <= most else f"{lines[0][:most]} ..."
