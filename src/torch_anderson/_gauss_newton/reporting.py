"""What both drivers share: numbers in and out of checkpoints, and reports of jumps that were tried or could not be."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._driver import Driver, logger
from .._records import JumpRecord
from .._tensors.checkpoint import STATE, Entries, Saved, Vectors, pack, unpack
from .._tensors.evaluate import Unusable


class ReportingDriver(Driver):
    """A driver that counts its jumps, passes them to hooks and log, and says why it makes plain steps."""

    state_type: type[Any]
    """The class of ``state``."""
    state: Any
    """All that a checkpoint keeps besides vectors and counters; parts of the driver share it."""

    def __init__(self, base: Optimizer, options: Any):
        super().__init__(base, options)
        self.state = self.state_type(share=options.budget)
        self.stats.gauges = self.state.gauges  # not the driver's, which would then be freed late
        self.build(self.space)

    @abstractmethod
    def vectors(self) -> Vectors:
        """All that is kept in the length of the parameters."""

    def saved(self) -> Saved:
        """Vectors, and all numbers."""
        counts = torch.tensor(self.stats.counters(), dtype=torch.float64)
        return Saved(self.vectors(), {STATE: pack(self.state, self.kind), "counts": counts})

    def load_numbers(self, found: dict[Tensor, Entries]) -> None:
        """Continue where the entries were saved."""
        entries = next(iter(found.values()))
        vars(self.state).update(vars(unpack(self.state_type, entries[STATE])))
        self.stats.set_counters(entries["counts"].tolist())

    def forget(self) -> None:
        """Forget all that was adapted."""
        vars(self.state).update(vars(self.state_type(share=self.options.budget, k=self.state.k)))
        self.stats.counts["restarts"] += 1

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
