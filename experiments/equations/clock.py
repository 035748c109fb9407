"""Processor time of a run: when it ends, and when the error is taken."""

import math
import time
from typing import Any

import numpy as np
import torch

from .case import Case

REPORTED = (20.0, 60.0, 120.0, 600.0)
"""Seconds at which tables show errors."""
MEASUREMENTS = 20


class Spent(Exception):
    """The allowed time is used up, or the error is not a finite number."""


def marks(seconds: float) -> list[float]:
    """Times at which the error is taken: about 20, spaced evenly in the logarithm, and those of the tables.

    >>> [round(mark, 1) for mark in marks(60.0)][-2:]
    [46.6, 60.0]
    """
    spaced = np.geomspace(seconds / 120, seconds, MEASUREMENTS).tolist()
    return sorted({*spaced[:-1], seconds, *(each for each in REPORTED if each < seconds)})


class Clock:
    """Counts the processor time of a method and takes the error of its weights now and then, which is not counted."""

    def __init__(self, case: Case, seconds: float, *, pictures: bool = False) -> None:
        self.case, self.seconds = case, seconds
        self.waiting = marks(seconds)
        self.steps = 0
        self.times: list[float] = []
        """When errors were taken."""
        self.errors: list[float] = []
        self.losses: list[float] = []
        """The last known loss at these times; NaN where the method does not tell."""
        self.pictures: dict[str, Any] | None = {} if pictures else None
        """Errors at all test points at the times of the tables and at the end, if wanted."""
        self.optimizer: Any = None
        """The method's optimizer, for its counters; set by the method."""
        self._not_counted = 0.0
        self._started = time.process_time()

    @property
    def elapsed(self) -> float:
        """Processor seconds of the method so far."""
        return time.process_time() - self._started - self._not_counted

    @property
    def share(self) -> float:
        """The share of the time that is used up."""
        return min(self.elapsed / self.seconds, 1.0)

    def tick(self, loss: Any = math.nan) -> None:
        """Called after every step; raises ``Spent``."""
        self.steps += 1
        now = self.elapsed
        if now < self.waiting[0]:
            return
        passed = [mark for mark in self.waiting if mark <= now]
        self.waiting = self.waiting[len(passed) :]
        begin = time.process_time()
        self.measure(now, loss)
        if self.pictures is not None:
            kept = [mark for mark in passed if mark in REPORTED or mark == self.seconds]
            self.pictures |= {f"{mark:g}": self.case.difference().float().numpy() for mark in kept}
        self._not_counted += time.process_time() - begin
        if not self.waiting or not math.isfinite(self.errors[-1]):
            raise Spent

    def measure(self, now: float, loss: Any) -> None:
        """Take the error."""
        self.times.append(round(now, 4))
        self.errors.append(self.case.error())
        self.losses.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
