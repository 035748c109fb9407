"""What acceleration by gradients keeps: pairs, both ends of the pending jump, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._driver import Driver
from .._records import NUMBERS, JumpRecord
from .._tensors.blocks import Space
from .._tensors.checkpoint import STATE, Entries, Saved, Shapes, pack, padded, unpack, unpadded
from .gram import Gram
from .history import History
from .jump_ends import JumpEnds
from .residual import GradientResidual
from .secants import Secants
from .storage import Storage

LOOK = 4
"""Gradients that are stored before the first jump, and after each rest: enough to detect noise."""
BRIEF_LOOK = 3
"""Gradients that are stored after repeated noise: usually enough to see that it goes on."""
FIRST_REST, LONGEST_REST = 4, 30
"""Base steps of the first rest, and of the longest: each is twice as long as the last, until jumps are accepted."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 4096
"""Base steps of the first rest after the function has changed, and of the longest."""


@dataclass
class GradientState:
    """The numbers of a checkpoint, besides vectors, the Gram matrix and counters; in this order."""

    resting: int = 0
    """Base steps still to rest: in a checkpoint; otherwise ``Driver.resting``."""
    k: int = 0
    """Gradients read."""
    look: int = LOOK
    """Gradients to store before noise is judged and the weights may jump."""
    proven: int = 0
    """Jumps accepted since the last rest."""
    rest: int = FIRST_REST
    """Length of the next rest."""
    noisy: bool = False
    """Whether gradients were noise, and again after a rest, and have never been ``smooth``."""
    smooth: bool = False
    """Whether many jumps were accepted between two rests, so that noise would be something new."""
    pause: int = FIRST_PAUSE
    """Length of the next rest after the function has changed."""
    refusals: float = 0.0
    """Moving average over jumps: 1 for a refused one, 0 for an accepted one."""
    radius: float = inf
    """Longest jump."""
    pending: bool = False
    """Whether the weights are those of a jump that no gradient has decided on."""
    tries: int = 0
    """How often the pending jump was shortened."""
    descent: float = 0.0
    """-g'D at the point where the jump D begins."""
    norm: float = 0.0
    """|g| there."""
    reach: float = -1.0
    """D in units of the newest difference of points, once the gradient at its end is stored."""
    length: float = 0.0
    """|D|"""
    pairs: int = 0
    """Pairs stored since the history was cleared, and ..."""
    fresh: int = 0
    """... those whose products are not in the Gram matrix: in a checkpoint; otherwise ``History`` counts them."""


class GradientMemory(Driver):
    """What is kept from step to step, and how it goes into checkpoints and comes back."""

    kind = 3

    def __init__(self, base: Optimizer, options: Any):
        self.storage = options.storage or Storage()
        super().__init__(base, options, self.storage.shard)
        self.resting = options.warmup
        self.state = GradientState()
        self.secants: Secants | None = None
        """The problem that the gradient of this step completes; None if no jump is due."""
        self.record: JumpRecord | None = None
        """The record of the pending jump."""
        self.build(self.space)

    # ---------------------------------------------------------------------------------------------- in and out

    @property
    def steps(self) -> int:
        """Gradients read."""
        return self.state.k

    def build(self, space: Space) -> None:
        """Make room for pairs, for the pair that is being read, and for both ends of a pending jump.

        Points are as ``GradientResidual`` reads and writes them, scaled by group; the ends of a jump are
        weights as they are.
        """
        self.history = History(space, self.options.history_size, self.storage)
        self.gram = Gram(self.options.history_size)
        self.residual = GradientResidual(self.base, space)
        self.point, self.gradient = self.history.vector(), self.history.vector()
        self.ends = JumpEnds(space)

    def clear(self, zero: bool = True) -> None:
        """Start a new history, and look for noise before the next jump."""
        self.history.clear(zero)
        self.gram = Gram(self.options.history_size)
        self.state.look, self.state.proven = LOOK, 0

    def forget(self) -> None:
        """Forget every pair."""
        self.stats.counts["restarts"] += self.history.pairs > 0
        self.clear()

    def saved(self) -> Saved:
        """Rows, points and numbers."""
        history, state = self.history, self.state
        for rows in history.rows:
            rows.arrive()
        state.resting, state.pairs, state.fresh = self.resting, history.pairs, history.fresh
        vectors = {
            "point_diffs": [rows.point_diffs for rows in history.rows],
            "residual_diffs": [rows.residual_diffs for rows in history.rows],
            "last_residual": [rows.last_residual for rows in history.rows],
            "last_point": history.last_point,
            "plain": self.ends.plain,
            "candidate": self.ends.candidate,
        }
        record = [float(getattr(self.record, name)) for name in NUMBERS] if self.record else []
        numbers = {
            STATE: pack(state, self.kind),
            "gram": torch.tensor(self.gram.matrix, dtype=torch.float64),
            "group_rates": padded(self.residual.rates, len(self.base.param_groups)),
            "trial": padded(record, len(NUMBERS)),
            "counts": torch.tensor(self.stats.counters(), dtype=torch.float64),
        }
        return Saved(vectors, numbers)

    def bytes(self) -> int:
        """Memory of rows and points, with the pair that is being read."""
        return super().bytes() + sum(part.nbytes for vector in (self.point, self.gradient) for part in vector)

    def shapes(self) -> Shapes:
        """Rows and points."""
        rows = ("history_size", (self.options.history_size,))
        points = dict.fromkeys(("last_residual", "last_point", "plain", "candidate"), ("residual", ()))
        return {"point_diffs": rows, "residual_diffs": rows, **points}

    def load_numbers(self, found: dict[Tensor, Entries]) -> None:
        """Continue where the entries were saved."""
        entries = next(iter(found.values()))
        state = self.state = unpack(GradientState, entries[STATE])
        self.resting, self.history.pairs, self.history.fresh = state.resting, state.pairs, state.fresh
        self.history.rates = [1.0] * min(state.pairs, self.options.history_size + 1)
        self.gram.matrix = entries["gram"].tolist()
        self.residual.rates = unpadded(entries["group_rates"])
        self.stats.set_counters(entries["counts"].tolist())
        values = unpadded(entries["trial"])
        self.record = JumpRecord.from_numbers(values) if values else None
