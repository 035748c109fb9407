"""The memory of the tangent driver: traced residuals, numbers of samples, and vectors and numbers of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import torch
from torch import Tensor

from .._calls import BaseStep
from .._ranks.placement import is_dtensor
from .._tensors.blocks import Space
from .._tensors.checkpoint import Shapes, Vectors
from .._tensors.evaluate import Unusable, agreeing
from .._tensors.members import takes_part
from .objective import Objective
from .reporting import ReportingDriver
from .residuals import Residuals
from .rows import Layout, Memory
from .tangent_state import TangentState
from .term import Samples, Term

SHARDED = (
    "Invalid directions: 'tangent' with sharded parameters, of which no rank has whole rows. Allowed: 'history', as in "
    "GaussNewton(..., directions='history')."
)
NOT_ONE_VECTOR = (
    "Invalid directions: 'tangent' with parameters that are complex or on several devices. Allowed: 'history', as in "
    "GaussNewton(..., directions='history')."
)
LEFT_OUT = (
    "Groups with 'anderson': False are trained by the base alone, which makes few steps while GaussNewton jumps. Build "
    "GaussNewton(..., directions='history') if they need more."
)
FROZEN = (
    "GaussNewton makes no jumps while all learning rates are 0, as parameters with rate 0 count as frozen. End a "
    "schedule above 0."
)
MOST_ROWS = 2.0
"""Most rows, in multiples of the number of weights ..."""
MOST_BYTES = 400e6
"""... and most memory for them."""
ROWS = 500
"""Rows that the first jump fits, if there are as many; if samples can be drawn, at least as many as weights up to this,
whatever number a gradient uses: with too few, jumps fit the noise of their samples."""
DRAWN, GIVEN, FIXED = 1 / 3, 1 / 3, 1.0
"""Shares of samples that are fitted: drawn ones, those given for one step, and fixed ones, which are all there are."""
AT_ONCE = 1e7
"""Fixed samples are all fitted from the first jump on if their Jacobian has no more entries than this: what early
jumps on a part of them break, later ones do not mend, as no other samples come."""
TRACES = 4
"""Objectives whose traced residuals are kept, for training that uses several in turn."""
UNSEEN = 2
"""Fewest blocks of samples that are drawn besides those that are fitted."""


@dataclass
class Plan:
    """Numbers of samples by the names of terms."""

    fitted: dict[str, int]
    total: dict[str, int]
    rows: int
    """Residuals of the fitted samples."""
    start: float
    """Blocks of the first jump ..."""
    most: float
    """... and the largest useful number of them."""
    noisy: bool
    """Whether every step has other samples than the last, none of which can be drawn again."""


def plan(residuals: Residuals, given: Mapping[str, Samples], blocks: int, most_rows: float) -> Plan:
    """Choose numbers of samples for rows that are ``blocks`` times those of the first jump."""
    terms, sizes = residuals.objective.terms, {name: term.size for name, term in residuals.terms.items()}
    there = {name: _available(term, given.get(name)) for name, term in terms.items()}
    share = {name: GIVEN if name in given else FIXED if term.fixed else DRAWN for name, term in terms.items()}
    rows = sum(share[name] * there[name] * max(sizes[name], 1) for name in terms)
    growing = any(not term.fixed and name not in given for name, term in terms.items())
    fewest = max(rows, residuals.n) if growing else rows
    first = min(fewest, ROWS, most_rows) / rows
    fitted, total = {}, {}
    for name, term in terms.items():
        block = max(1, round(first * share[name] * there[name]))
        drawn = not term.fixed and name not in given
        fitted[name] = blocks * block if drawn else min(blocks * block, max(1, int(share[name] * there[name])))
        total[name] = max(there[name], (blocks + max(UNSEEN, blocks // 2)) * block) if drawn else there[name]
    most = max(1.0, most_rows / rows / first) if growing else ceil(1 / first)
    at_once = all(term.fixed for term in terms.values()) and not given and rows * residuals.n <= AT_ONCE
    count = sum(sizes[name] * fitted[name] for name in terms)
    return Plan(fitted, total, count, most if at_once else 1.0, most, bool(given))


def _available(term: Term, given: Samples | None) -> int:
    if given is not None:
        return len(given[0])
    return term.count or len(term.samples[0])  # type: ignore[index, arg-type]


class TangentMemory(ReportingDriver):
    """The last jump, the weights before and after it in float64, traced residuals, and all that is adapted."""

    kind = 3
    state_type = TangentState
    state: TangentState
    traces: list[Residuals]
    """Residuals of the objectives that were used last, the newest first."""
    disturbed: bool
    """Whether other code had written to the parameters before the first base step after the last jump."""

    # --------------------------------------------------------------------------------------------------- residuals

    @property
    def residuals(self) -> Residuals | None:
        """The residuals that were used last."""
        return self.traces[0] if self.traces else None

    def prepared(self, objective: Objective, bound: Mapping[str, Samples]) -> Residuals:
        """The residuals of the objective, checked and traced when they are first used with these parameters."""
        # A jump leaves groups with learning rate 0 alone.
        still = {id(p) for group in self.base.param_groups if group.get("lr") == 0 for p in group["params"]}
        params = [p for p in self.space.params if id(p) not in still]
        found = next((each for each in self.traces if each.fits(objective, params, bound)), None)
        if found is None:
            found = self.traced(objective, bound, params)
        if self.residuals and self.residuals.trained != found.trained:
            self.stop()
        self.traces = [found, *(each for each in self.traces if each is not found)][:TRACES]
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
        if any(
            not takes_part(group) and any(p.requires_grad for p in group["params"]) for group in self.base.param_groups
        ):
            self.tell_once(LEFT_OUT)
        if not self.state.jumps:
            self.state.blocks = self.plan(found, bound, blocks=1).start
        return found

    def plan(self, residuals: Residuals, bound: Mapping[str, Samples], blocks: int) -> Plan:
        """Numbers of samples for a jump."""
        layout, numbers = self.layout(residuals), MOST_BYTES / 8
        most = min(max(MOST_ROWS * residuals.n, ROWS), numbers / layout.width)
        if layout.factored:
            most = min(most, sqrt(numbers))
        return plan(residuals, bound, blocks, most)

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

    def idle(self, base_step: BaseStep) -> Any:
        """Make a base step at rate 0, and say that jumps have ended."""
        if self.state.jumps:
            self.tell_once(FROZEN)
        return super().idle(base_step)

    def build(self, space: Space) -> None:
        """Make room for the last jump, and for the weights before and after it."""
        if any(map(is_dtensor, space.params)):
            raise ValueError(SHARDED)
        if any(p.is_complex() for p in space.params) or len({p.device for p in space.params}) > 1:
            raise ValueError(NOT_ONE_VECTOR)
        self.momentum, self.other = space.vector(torch.float64), space.vector(torch.float64)
        self.weights = space.vector(torch.float64)
        self.memory = Memory()
        self.traces, self.disturbed = [], False

    def vectors(self) -> Vectors:
        """The last jump, and the weights before and after it."""
        return {"momentum": self.momentum, "other": self.other, "weights": self.weights}

    def shapes(self) -> Shapes:
        """The last jump, and the weights before and after it."""
        return dict.fromkeys(("momentum", "other", "weights"), ("directions", ()))

    def forget(self) -> None:
        """Forget the last jump, and what was adapted."""
        super().forget()
        self.resting = 0
        self.stop()
