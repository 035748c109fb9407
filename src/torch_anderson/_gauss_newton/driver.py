"""The algorithm: outputs of the model near the present weights determine where to jump.

Every ten base steps or more, forward passes measure how the outputs change along a few directions. The combination of
them that makes the loss smallest by a damped linear model is tried, and kept if the loss falls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from math import isfinite, sqrt
from typing import Any

import torch

from .._calls import BaseStep
from .._records import JumpRecord
from .._tensors.blocks import Space
from .._tensors.checkpoint import Shapes, Vectors
from .._tensors.evaluate import WROTE, Outputs, OutputsFn, Probe, Unusable, agreeing, probing
from .control import adapt_width, book, judge, judge_proposal, postpone
from .directions import KEPT, STORE_PERIOD, HistoryDirections
from .reporting import ReportingDriver
from .solve import LinearModel, Move, linearize, solve_damped
from .state import CHANGING, FIXED, JUDGES, UNKNOWN, GaussNewtonState

SAME = 1e-6
"""Samples are the same if their loss differs by less than this part."""
REPEATABLE = 1e-3
"""Two evaluations at the same weights may differ by this part of the outputs."""
TRIES = 3
"""Jumps that are tried, with more and more damping."""
CONSTANT = (
    "outputs returned numbers that do not depend on the weights, but the loss does. Evaluate the model that the "
    "optimizer trains, at its present weights, e.g. step(outputs=lambda: (model(x), y))."
)
NO_OUTPUTS = "step() was given no outputs; give an Objective, step(outputs=...) or set_batch(outputs=...)"


class GaussNewtonDriver(ReportingDriver):
    """Gauss-Newton steps along directions of recent training, with forward passes only."""

    kind = 2
    state_type = GaussNewtonState
    state: GaussNewtonState

    # ------------------------------------------------------------------------------------------------ the algorithm

    def step(self, base_step: BaseStep) -> Any:
        """Make one base step, then jump if one is due and the model's outputs show a lower loss."""
        stores = (self.state.k + 1) % STORE_PERIOD == 0
        due = self.due
        if due or stores or not self.state.k:
            self.space.note_gradients()  # refuses sparse ones
        if due:
            self.space.read(self.start)
        version = self.space.version()
        loss, outputs = base_step()
        if not (self.directions.end_step(self.start, self.base.param_groups) if due else self.acted(version)):
            return loss
        self.state.k += 1
        self.state.since_jump += 1
        if stores and self.space.blocks:
            self.directions.store()
        if due:
            self.accelerate(outputs)
        elif outputs is not None and self.state.proposed:
            self.guarded(self.settle, outputs)
        elif outputs is not None and self.due and self.state.samples == UNKNOWN:
            self.guarded(self.witness, outputs)
        return loss

    @property
    def due(self) -> bool:
        """Whether a jump may follow the next base step."""
        return self.state.stores >= self.directions.fewest and self.state.since_jump + 1 >= self.state.wait

    def accelerate(self, outputs: OutputsFn | None) -> None:
        """Jump if anything can be learned from the outputs; whatever goes wrong, the plain step stays."""
        if outputs is None:
            self.skip(Unusable("no_outputs", NO_OUTPUTS))
            return
        self.guarded(self.jump, outputs)
        self.state.since_jump = 0

    def guarded(self, evaluate: Callable[[OutputsFn], None], outputs: OutputsFn) -> None:
        """Evaluate outputs; if they cannot be used, wait longer for the next jump."""
        try:
            evaluate(outputs)
        except Unusable as problem:
            if problem.cause == "constant_outputs" and self.outputs_should_depend():
                raise TypeError(CONSTANT) from None
            self.skip(problem)
            postpone(self.state)

    def probing(self, outputs: OutputsFn) -> AbstractContextManager[Probe]:
        """Evaluate outputs around ``start``, the present weights."""
        params = [p for group in self.base.param_groups for p in group["params"]]
        return probing(outputs, self.options.loss, self.space, self.start, params, self.stats.counts)

    def witness(self, outputs: OutputsFn) -> None:
        """Note the loss of this step's samples; the next step's tell at the same weights whether samples change."""
        self.space.read(self.start)
        with self.probing(outputs) as probe:
            self.state.witness = probe.loss()

    def compare_samples(self, probe: Probe) -> None:
        """Determine whether samples are those of the last step, by their loss before the base step."""
        before = probe.loss([-step for step in self.directions.step])
        same = abs(before - self.state.witness) <= SAME * abs(before)
        self.state.samples = FIXED if same else CHANGING

    def settle(self, outputs: OutputsFn) -> None:
        """Make the jump that was proposed if the loss of samples that it has not fitted falls by enough."""
        self.space.read(self.start)
        proposal = self.directions.proposal(self.base.param_groups)
        with self.probing(outputs) as probe:
            kept = judge_proposal(self.state, self.options.budget, probe.loss(), probe.loss(proposal))
            if kept:
                probe.end = probe.point
        if kept:
            self.directions.keep(proposal, probe.end)
        elif not self.state.proposed:
            self.stats.counts.update(accepted=-1, rejected_loss=1)

    def jump(self, outputs: OutputsFn) -> None:
        """Measure, fit, try, decide."""
        state, directions = self.state, self.directions
        with self.probing(outputs) as probe:
            first = probe()
            if state.suspicious:
                self.check_repeatable(probe, first)
            span, size = directions.span(self.start)
            model = linearize(first, probe.slopes(first, span, size), self.space.ranks, directions.ages)
            if state.samples == UNKNOWN:
                self.compare_samples(probe)
            for _ in range(TRIES):
                move = solve_damped(model, state.damping)
                displacement = span.vector(dict(zip(directions.used, move.coefficients.tolist(), strict=True)))
                loss = probe.loss(displacement)
                cause = judge(state, model, move, loss)
                if not cause:
                    break
            state.proposed = JUDGES if not cause and state.samples == CHANGING else 0
            made = not cause and not state.proposed
            cost = probe.count * self.options.forward_cost
            book(state, self.options.budget, cost, model.loss, loss if made else model.loss)
            adapt_width(state, model)
            if made:
                probe.end = probe.point
        if made:
            directions.keep(displacement, probe.end)
        elif state.proposed:
            directions.propose(displacement)
        state.suspicious = bool(cause)
        self.report(cause, partial(describe, state.k, model, move, cause))

    def check_repeatable(self, probe: Probe, first: Outputs) -> None:
        """Raise ``Unusable`` if a second evaluation at the start differs, or if the function writes to the weights."""
        again = probe()
        with agreeing(self.space.ranks):
            self.space.refresh()
            present = [torch.empty_like(part) for part in self.start]
            self.space.read(present)
            if not all(map(torch.equal, present, self.start)):
                raise Unusable("outputs_wrote", WROTE)  # through .data, which leaves no other trace
            apart = float(torch.linalg.vector_norm(again.values - first.values))
            if apart > REPEATABLE * float(torch.linalg.vector_norm(first.values)):
                raise Unusable("random_outputs", "outputs returned other numbers when called again at the same weights")

    def outputs_should_depend(self) -> bool:
        """Whether constant outputs are a mistake in the program: the loss depends on the weights, and all take part.

        Later in a run, or with some parameters frozen or at rate 0, outputs may really have become constant.
        """
        everybody = len(self.space.params) == sum(p.numel() > 0 for g in self.base.param_groups for p in g["params"])
        everybody = everybody and not any(self.directions.idle)
        return everybody and self.directions.has_gradient and not self.stats.counts["attempted"]

    # ---------------------------------------------------------------------------------------------- in and out

    @property
    def steps(self) -> int:
        """Base steps that changed parameters."""
        return self.state.k

    def build(self, space: Space) -> None:
        """Make room for directions, and for the point that they start from."""
        self.directions = HistoryDirections(space, self.state)
        self.start = space.vector()
        """The weights before a base step that a jump may follow, then those after it, from which the jump starts."""

    def vectors(self) -> Vectors:
        """Directions, and the point that the next one is measured from."""
        return self.directions.saved()

    def shapes(self) -> Shapes:
        """Rows, and the point that the next one is measured from."""
        return {"directions": ("directions", (KEPT,)), "stored": ("directions", ())}


def describe(step: int, model: LinearModel, move: Move, cause: str) -> JumpRecord:
    """The record of a jump; losses are squares of residual norms."""
    now, then = (sqrt(x) if isfinite(x) and x > 0 else 0.0 for x in (model.loss, move.promised))
    directions = len(move.coefficients)
    norm = float(torch.linalg.vector_norm(move.coefficients))
    return JumpRecord(step, now, then, directions, directions, norm, cause=cause)
