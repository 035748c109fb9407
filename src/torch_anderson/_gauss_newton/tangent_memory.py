"""What the tangent driver keeps: vectors, numbers and counts, in and out of checkpoints, and its reports."""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._ranks.placement import is_dtensor
from .._records import JumpRecord
from .._tensors.blocks import Space, Vector
from .._tensors.checkpoint import STATE, Entries, Saved, Shapes, pack, unpack
from .flat import double_vector, gathered, scatter
from .jump import Model, Move
from .reporting import ReportingDriver
from .residuals import Residuals
from .rows import Memory
from .tangent_state import TangentState

SHARDED = (
    "Invalid directions: 'tangent' with sharded parameters, of which no rank has whole rows. Allowed: 'history', as in "
    "GaussNewton(..., directions='history')."
)


class TangentMemory(ReportingDriver):
    """The last jump, the weights before and after it in float64, and all that is adapted."""

    kind = 3

    def __init__(self, base: Optimizer, options: Any):
        super().__init__(base, options)
        self.state = TangentState(share=options.budget)
        self.residuals: Residuals | None = None
        self.build(self.space)

    # ------------------------------------------------------------------------------------------------------ weights

    def write(self, weights: Tensor, residuals: Residuals) -> None:
        """Set the parameters, and keep what their type would round."""
        self.keep_all(weights, self.weights, residuals)
        residuals.write(weights)

    def keep_all(self, weights: Tensor, vector: Vector, residuals: Residuals) -> None:
        """Undo ``flat`` for weights, and add those of all other parameters, which may take part later."""
        self.space.read(vector)
        self.keep(weights, vector, residuals)

    def keep(self, flat: Tensor, vector: Vector, residuals: Residuals) -> None:
        """Undo ``flat``."""
        scatter(self.space, flat, vector, residuals.params)

    def flat(self, vector: Vector, residuals: Residuals) -> Tensor:
        """A vector in the order of the residuals' weights."""
        return gathered(self.space, vector, residuals.params)

    def stop(self) -> None:
        """Forget the last jump."""
        for part in self.momentum:
            part.zero_()

    # ---------------------------------------------------------------------------------------------- reporting

    def record(self, model: Model, move: Move, accepted: bool, made: bool) -> None:
        """Count and report a jump."""
        self.state.k += made
        rows, cause = len(model.rows), "" if accepted else "loss"
        norms = sqrt(max(model.fitted, 0.0)), sqrt(max(move.promised, 0.0))
        length = float(move.jump.norm())
        self.report(cause, partial(JumpRecord, self.state.k, *norms, rows, rows, length, cause=cause))

    def gauges(self) -> dict[str, float]:
        """What the driver has set itself."""
        state = self.state
        return {"length": state.length, "boost": state.boost, "blocks": state.blocks, "wait": state.wait}

    # ---------------------------------------------------------------------------------------------- in and out

    @property
    def steps(self) -> int:
        """Steps that changed parameters; before the first, jumps that were refused, as they leave a state too."""
        return self.state.k or self.state.jumps

    def count_rest(self) -> None:
        """Count a base step without a look at the parameters."""
        super().count_rest()
        self.state.k += 1
        self.state.since += 1

    def build(self, space: Space) -> None:
        """Make room for the last jump, and for the weights before and after it."""
        if any(map(is_dtensor, space.params)):
            raise ValueError(SHARDED)
        self.momentum, self.other, self.weights = (double_vector(space) for _ in range(3))
        self.memory = Memory()
        self.residuals = None

    def saved(self) -> Saved:
        """The last jump, the weights before and after it, and all numbers."""
        counts = torch.tensor(self.stats.counters(), dtype=torch.float64)
        vectors = {"momentum": self.momentum, "other": self.other, "weights": self.weights}
        return Saved(vectors, {STATE: pack(self.state, self.kind), "counts": counts})

    def shapes(self) -> Shapes:
        """The last jump, and the weights before and after it."""
        return dict.fromkeys(("momentum", "other", "weights"), ("directions", ()))

    def load_numbers(self, found: dict[Tensor, Entries]) -> None:
        """Continue where the entries were saved."""
        entries = next(iter(found.values()))
        self.state = unpack(TangentState, entries[STATE])
        self.stats.set_counters(entries["counts"].tolist())

    def forget(self) -> None:
        """Forget the last jump, and what was adapted."""
        self.state, self.resting = TangentState(share=self.options.budget, k=self.state.k), 0
        self.stop()
        self.stats.counts["restarts"] += 1
