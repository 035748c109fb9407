"""The memory of the tangent driver: traced residuals, and vectors and numbers of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from .._calls import BaseStep
from .._ranks.placement import is_dtensor
from .._tensors.blocks import Space, Vector
from .._tensors.checkpoint import Shapes, Vectors
from .._tensors.evaluate import Unusable, agreeing
from .._tensors.members import takes_part
from .objective import Objective
from .plan import MOST_BYTES, MOST_ROWS, ROWS, Plan, planned
from .reporting import ReportingDriver
from .residuals import Residuals
from .rows import Layout, Memory
from .tangent_state import TangentState
from .term import Samples

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
TRACES = 4
"""Objectives whose traced residuals are kept, for training that uses several in turn."""


class TangentMemory(ReportingDriver):
    """The last jump, the weights before and after it in float64, traced residuals, and all that is adapted."""

    kind = 3
    state_type = TangentState
    state: TangentState
    traces: list[Residuals]
    """Residuals of the objectives that were used last, the newest first."""
    version: int | None
    """Version of the parameters after the last base step, if that is known."""

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
        found = next((each for each in self.traces if each.fits(objective, params)), None)
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
            plan = self.plan(found, bound, blocks=1)
            samples = objective.examples(bound, plan.total)
            found.check(samples, params)
            found.prepare(found.read(), samples, plan.fitted)
        if any(
            not takes_part(group) and any(p.requires_grad for p in group["params"]) for group in self.base.param_groups
        ):
            self.tell_once(LEFT_OUT)
        return found

    def suit(self, residuals: Residuals, samples: dict[str, Samples]) -> None:
        """Trace the residuals again if the samples of any rank have other shapes than before."""
        ranks, other = self.space.ranks, not residuals.hold(samples)
        if ranks.size > 1:
            other = bool(ranks.largest(torch.tensor(float(other))))
        if other:
            with agreeing(ranks), torch.enable_grad():
                residuals.prepare(residuals.read(), samples)

    def plan(self, residuals: Residuals, bound: Mapping[str, Samples], blocks: int) -> Plan:
        """Numbers of samples for a jump."""
        layout, numbers = self.layout(residuals), MOST_BYTES / 8
        most = min(max(MOST_ROWS * residuals.n, ROWS), numbers / layout.width)
        if layout.factored:
            most = min(most, sqrt(numbers))
        return planned(residuals, bound, blocks, most)

    def layout(self, residuals: Residuals) -> Layout:
        """How rows are stored; several ranks exchange dense ones."""
        return residuals.layout if self.space.ranks.size == 1 else residuals.layout.as_dense()

    # ------------------------------------------------------------------------------------------------------ weights

    def current_weights(self, residuals: Residuals) -> Tensor:
        """The weights in float64: those of the last jump, unless other code has written to the parameters."""
        if self.state.jumps and self.unchanged(residuals.params):
            return self.space.gather(self.weights, residuals.params)
        if not self.state.since:
            self.stop()
        return residuals.read()

    def unchanged(self, params: Sequence[Tensor]) -> bool:
        """Whether parameters are those of the last jump."""
        last = self.space.gather(self.weights, params).split([p.numel() for p in params])
        pairs = ((p.detach().reshape(-1), part.to(p.dtype)) for p, part in zip(params, last, strict=True))
        return all(torch.equal(now, then) for now, then in pairs)

    def notice_outside_writes(self) -> None:
        """Remember if other code has written to the parameters since the last jump; called before base steps."""
        if not self.state.since:
            self.state.disturbed = bool(self.state.jumps) and not self.unchanged(self.space.params)
        elif self.version is not None:
            self.state.disturbed |= self.space.version() != self.version

    def write(self, weights: Tensor, residuals: Residuals) -> None:
        """Set the parameters, and keep what their type would round."""
        self.keep(weights, self.weights, residuals)
        residuals.write(weights)

    def keep(self, weights: Tensor, vector: Vector, residuals: Residuals) -> None:
        """Store weights in a vector, with those of all other parameters, which may take part later."""
        if len(residuals.params) < len(self.space.params):
            self.space.read(vector)
        self.space.scatter(weights, vector, residuals.params)

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
        self.traces, self.version = [], None

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
