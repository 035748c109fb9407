"""What both drivers report: jumps that were tried, and those that could not be."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .._driver import Driver, logger
from .._records import JumpRecord
from .._tensors.evaluate import Unusable


class ReportingDriver(Driver):
    """A driver that counts its jumps, passes them to hooks and log, and says why it makes plain steps."""

    def __init__(self, base: Optimizer, options: Any):
        super().__init__(base, options)
        self.stats.gauges = self.gauges

    @abstractmethod
    def gauges(self) -> dict[str, float]:
        """The settings that the driver adapts, by name."""

    def report(self, cause: str, describe: Callable[[], JumpRecord]) -> None:
        """Count and report a jump that was tried; ``cause`` says why it was not made, and is empty if it was."""
        self.stats.counts["attempted"] += 1
        self.stats.counts[f"rejected_{cause}" if cause else "accepted"] += 1
        self.stats.describe = describe
        if self.hooks or logger.isEnabledFor(logging.DEBUG):
            self.publish()

    def skip(self, problem: Unusable) -> None:
        """Count and report a jump that could not be tried."""
        self.stats.counts[f"skipped_{problem.cause}"] += 1
        if problem.cause != "converged":
            self.tell_once(f"GaussNewton makes plain steps: {problem}.")

    def cancel(self) -> None:
        """Nothing is under way between two steps."""
