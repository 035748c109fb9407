"""What acceleration by base steps keeps: the history, the pair that is being measured, a pending jump, the window."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._driver import Driver
from .._tensors.blocks import Space
from .._tensors.checkpoint import STATE, Entries, Saved, Shapes, pack, padded, unpack, unpadded
from .average import Window
from .gram import Gram
from .history import History
from .jump_ends import JumpEnds
from .residual import StepResidual
from .slopes import Slopes
from .storage import Storage
from .trial import Trial


@dataclass
class StepState:
    """The numbers of a checkpoint, besides vectors, the Gram matrix, learning rates and counters; in this order."""

    k: int
    rest: int
    """Length of the last rest, in base steps."""
    wait: int
    """Base steps still to make without a jump."""
    comparable: bool
    pairs: int
    fresh: int
    exact: bool
    window_count: int
    window_stale: int


class StepMemory(Driver):
    """What is kept from step to step, and how it goes into checkpoints and comes back."""

    kind = 1

    def __init__(self, base: Optimizer, options: Any):
        self.storage = options.storage or Storage()
        super().__init__(base, options, self.storage.shard)
        self.k = 0
        """Base steps that changed parameters."""
        self.rest, self.wait = 0, 0
        """Steps of the last rest, and those still to make without a jump, after jumps that gradients refused."""
        self.trial = Trial()
        self._version: int | None = None
        self.build(self.space)

    @property
    def steps(self) -> int:
        """Base steps that changed parameters."""
        return self.k

    def build(self, space: Space) -> None:
        """Make room for pairs, the pair that is being measured, and the window."""
        self.history = History(space, self.options.history_size, self.storage)
        self.gram = Gram(self.options.history_size)
        self.residual = StepResidual(self.base, space, self.history.vector(), self.history.vector())
        self.window = Window(self.options.average, space) if self.options.average else None
        self.ends = JumpEnds(space) if self.options.safeguard in ("gradient", "residual") else None
        self.slopes = Slopes(self.base, space, self.history) if self.options.safeguard == "gradient" else None

    def forget(self) -> None:
        """Forget every pair."""
        self.history.clear()
        self.gram = Gram(self.options.history_size)
        self.stats.counts["restarts"] += 1

    def saved(self) -> Saved:
        """Rows, points and numbers; with the base's state, if a jump may have to be taken back."""
        history, pair, window = self.history, self.residual, self.window
        for rows in history.rows:
            rows.arrive()
        vectors = {
            "point_diffs": [rows.point_diffs for rows in history.rows],
            "residual_diffs": [rows.residual_diffs for rows in history.rows],
            "last_residual": [rows.last_residual for rows in history.rows],
            "last_point": history.last_point,
        }
        if window:
            vectors["window"] = window.points
        if self.ends:
            vectors |= {"plain": self.ends.plain, "candidate": self.ends.candidate}
        if self.slopes:
            vectors["gradient"] = self.slopes.before
        state = StepState(
            k=self.k,
            rest=self.rest,
            wait=self.wait,
            comparable=pair.comparable,
            pairs=history.pairs,
            fresh=history.fresh,
            exact=self.gram.exact,
            window_count=window.count if window else 0,
            window_stale=window.stale if window else 0,
        )
        numbers = {
            STATE: pack(state, self.kind),
            "gram": torch.tensor(self.gram.matrix, dtype=torch.float64),
            "rates": padded(history.rates, self.options.history_size + 1),
            "group_rates": padded(pair.group_rates, len(self.base.param_groups)),
            "counts": torch.tensor(self.stats.counters(), dtype=torch.float64),
        }
        if self.ends:
            numbers["trial"] = self.trial.numbers()
        if not self.ends or (self.slopes and self.slopes.usable):
            return Saved(vectors, numbers)
        return Saved(vectors, numbers, partial(self.trial.entries, self.base))

    def bytes(self) -> int:
        """Memory of rows and points, with the pair that is being measured."""
        pair = self.residual.point, self.residual.start
        vectors = (*pair, self.slopes.now) if self.slopes else pair
        return super().bytes() + sum(part.nbytes for vector in vectors for part in vector)

    def shapes(self) -> Shapes:
        """Rows, points, and what depends on options."""
        m, average = self.options.history_size, self.options.average
        return {
            "point_diffs": ("history_size", (m,)),
            "residual_diffs": ("history_size", (m,)),
            "last_residual": ("residual", ()),
            "last_point": ("residual", ()),
            "window": ("average", (average.window,) if average else None),
            "plain": ("safeguard", () if self.ends else None),
            "candidate": ("safeguard", () if self.ends else None),
            "gradient": ("safeguard", () if self.slopes else None),
        }

    def load_numbers(self, found: dict[Tensor, Entries]) -> None:
        """Continue where the entries were saved."""
        entries = next(iter(found.values()))
        state = unpack(StepState, entries[STATE])
        self.k, self.rest, self.wait = state.k, state.rest, state.wait
        pair, history = self.residual, self.history
        pair.comparable = state.comparable
        pair.group_rates = unpadded(entries["group_rates"])
        history.pairs, history.fresh, history.rates = state.pairs, state.fresh, unpadded(entries["rates"])
        self.gram.matrix, self.gram.exact = entries["gram"].tolist(), state.exact
        self.stats.set_counters(entries["counts"].tolist())
        if self.window:
            self.window.count, self.window.stale = state.window_count, state.window_stale
        if self.ends and "trial" in entries:
            self.trial.load(entries["trial"])
            for param, kept in found.items():
                self.trial.load_entries(param, kept)
        self._version = None
