"""What the tangent driver keeps: traced residuals; vectors, numbers and counts, in and out of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._ranks.placement import is_dtensor
from .._tensors.blocks import Space
from .._tensors.checkpoint import STATE, Entries, Saved, Shapes, pack, unpack
from .._tensors.evaluate import Unusable, agreeing
from .._tensors.members import members
from .batch import ROWS, Plan, plan
from .objective import Objective
from .reporting import ReportingDriver
from .residuals import Residuals
from .rows import Layout, Memory
from .tangent_state import TangentState
from .term import Samples

SHARDED = (
    "Invalid directions: 'tangent' with sharded parameters, of which no rank has whole rows. Allowed: 'history', as in "
    "GaussNewton(..., directions='history')."
)


MOST_ROWS = 2.0
"""Most rows, in multiples of the number of weights ..."""
MOST_BYTES = 400e6
"""... and most memory for them."""


class TangentMemory(ReportingDriver):
    """The last jump, the weights before and after it in float64, traced residuals, and all that is adapted."""

    kind = 3

    def __init__(self, base: Optimizer, options: Any):
        super().__init__(base, options)
        self.state = TangentState(share=options.budget)
        self.residuals: Residuals | None = None
        self.build(self.space)

    def gauges(self) -> dict[str, float]:
        """What the driver has set itself."""
        state = self.state
        return {"length": state.length, "boost": state.boost, "blocks": state.blocks, "wait": state.wait}

    # --------------------------------------------------------------------------------------------------- residuals

    def prepared(self, objective: Objective, bound: Mapping[str, Samples]) -> Residuals:
        """The residuals of the objective, checked and traced when they are first used with these parameters."""
        # The parameters that a jump may change: those that take part, except groups with learning rate 0.
        params = members([group for group in self.base.param_groups if group.get("lr") != 0])
        found = self.residuals
        if found is None or not found.fits(objective, params):
            found = self.traced(objective, bound, params)
            if self.residuals and self.residuals.trained != found.trained:
                self.stop()
            self.residuals = found
        if found.refresh():
            objective.at = None  # values of retained samples no longer hold
        return found

    def traced(self, objective: Objective, bound: Mapping[str, Samples], params: list[Tensor]) -> Residuals:
        """The residuals as functions of these parameters, after a look at what they return."""
        found = Residuals(objective, params)
        if not found.n:
            raise Unusable("constant_outputs", "no parameter of the objective's model is trained")
        with agreeing(self.space.ranks), torch.enable_grad():
            counts = self.plan(found, bound, blocks=1)
            samples = objective.examples(bound, counts.total)
            found.check(samples, params)
            found.prepare(found.read(), samples, counts.fitted)
        if not self.state.jumps:
            self.state.blocks = self.plan(found, bound, blocks=1).start
        return found

    def plan(self, residuals: Residuals, bound: Mapping[str, Samples], blocks: int) -> Plan:
        """Numbers of samples for a jump."""
        layout, numbers = self.layout(residuals), MOST_BYTES / 8
        sizes = {name: term.size for name, term in residuals.terms.items()}
        most = min(max(MOST_ROWS * residuals.n, ROWS), numbers / layout.width)
        if layout.factored:
            most = min(most, sqrt(numbers))
        return plan(residuals.objective.terms, sizes, residuals.n, bound, blocks, most)

    def layout(self, residuals: Residuals) -> Layout:
        """How rows are stored; several ranks exchange dense ones."""
        return residuals.layout if self.space.ranks.size == 1 else residuals.layout.as_dense()

    def stop(self) -> None:
        """Forget the last jump."""
        for part in self.momentum:
            part.zero_()

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
        self.momentum, self.other = space.vector(torch.float64), space.vector(torch.float64)
        self.weights = space.vector(torch.float64)
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
