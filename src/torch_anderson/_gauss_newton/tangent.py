"""The algorithm of ``directions="tangent"``: Gauss-Newton jumps along the rows of the residuals' Jacobian.

    r, J      residuals of the fitted samples, scaled such that the loss is |r|^2, and their Jacobian
    S b     = J'(J J' + damping)^-1 b
    jump    = mu jump + S (r - mu J jump)                            momentum: Goldshlager et al. 2024
    bend    = S r2,  r2 the second derivative of r along the jump    geodesic acceleration: Transtrum and Sethna 2012
    twist   = S (3 r2(jump, bend) - r3)                              the next order of the same curve
    w(a)    = w - a jump - a^2/2 bend - a^3/6 twist                  a by a search on all samples, fitted or not

Samples with large residuals stay for the next jump, others are drawn anew. The base makes the steps while they gain
more for their cost than jumps do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from .._calls import BaseStep
from .._records import JumpRecord
from .._tensors.evaluate import Unusable
from .batch import Batch, Values
from .control import fall
from .jump import Found, Model, Move, fit, measure, search
from .objective import Closure, Objective
from .plan import Plan
from .residuals import Residuals
from .rows import Rows
from .tangent_memory import TangentMemory
from .tangent_state import DOUBT, FIRST_WAIT, jump_cost
from .term import Samples

TOO_MUCH = 2.0
"""A stretch of base steps is undone if it multiplied the loss by more than this."""
RECHECK = 16
"""Jumps between two comparisons of traced residuals with the plain way."""
NO_OBJECTIVE = "step() was given no Objective; use step(objective), or build GaussNewton(..., directions='history')"


class TangentDriver(TangentMemory):
    """Levenberg-Marquardt jumps with momentum and geodesic acceleration, on samples that follow the residual."""

    # ------------------------------------------------------------------------------------------------ the algorithm

    def step(self, base_step: BaseStep) -> Any:
        """Jump, or make a base step where that gains more for its cost."""
        closure = self.ahead
        if closure is None:
            return self.step_without_samples(base_step)
        bound = closure.bound  # what the base's own evaluation draws is not for the jump
        if self.state.pending and bound:
            self.settle(closure.objective, bound)
        if not self.due or self.early(bound):
            return self.plain(base_step)[0]
        proposes = bool(bound) and not self.state.trusted
        loss = self.plain(base_step)[0] if self.state.compares and not proposes else None
        self.ahead = None
        found = self.accelerate(closure, bound)
        if loss is None:
            loss = self.plain(base_step)[0] if found is None else found
        return loss

    def step_without_samples(self, base_step: BaseStep) -> Any:
        """Make a base step, during which some frameworks give the samples for a jump after it."""
        loss, closure = self.plain(base_step)
        bound = {} if closure is None else closure.bound
        if self.state.pending and closure is not None and bound:
            self.settle(closure.objective, bound)
        if self.due:
            self.accelerate(closure, bound)
        return loss

    @property
    def due(self) -> bool:
        """Whether the next step is a jump."""
        return self.state.since >= self.state.wait

    def early(self, bound: Mapping[str, Samples]) -> bool:
        """Whether to wait with the first jump, as it may fit the noise of samples that are given for one step."""
        return bool(bound) and not self.state.jumps and self.state.since < FIRST_WAIT

    def plain(self, base_step: BaseStep) -> tuple[Any, Closure | None]:
        """Make one base step; returns its loss, and the samples that were given during the step."""
        self.notice_outside_writes()
        version = self.space.version()
        found = base_step()
        if self.acted(version):
            self.state.k += 1
            self.state.since += 1
        self.resting = 0 if self.state.pending else max(self.state.wait - self.state.since - 1, 0)
        self.version = None if self.resting else self.space.version()
        return found

    def accelerate(self, closure: Closure | None, bound: Mapping[str, Samples]) -> Tensor | None:
        """Jump, and return the loss before it; None, with the weights as they were, if the base is to make a step."""
        try:
            if not isinstance(closure, Closure):
                raise Unusable("no_outputs", NO_OBJECTIVE)
            if not self.space.params:
                raise Unusable("converged", "no parameter is trained")
            return self.jump(closure.objective, bound)
        except Unusable as problem:
            self.skip(problem)
            if problem.cause != "no_outputs":  # the next step may have them
                self.state.postpone()
            return None

    def jump(self, objective: Objective, bound: Mapping[str, Samples]) -> Tensor | None:
        """Measure, fit, try, decide; returns the loss before, or None for a jump that is a proposal."""
        state, residuals = self.state, self.prepared(objective, bound)
        plan = self.plan(residuals, bound, state.whole_blocks)
        model = self.measured(residuals, bound, plan)
        before = self.space.gather(self.momentum, residuals.params)
        damping = state.damping(model.scale, model.trace, model.all_fitted)
        move = fit(model, before, damping, state.length, self.memory)
        found = search(model, move, state.length, state.longer)
        accepted = found.best.loss < model.loss
        proposes = plan.noisy and not state.trusted
        if not accepted:
            self.stay(model)
        elif proposes:
            self.propose(model, move, found)
        else:
            self.go(model, move, found)
        self.adapt(model, found, accepted, plan)
        self.record(model, move, accepted, made=accepted and not proposes)
        block = self.space.blocks[0]
        return None if proposes else torch.tensor(model.loss, dtype=block.dtype, device=block.device)

    # ---------------------------------------------------------------------------------------------------- measure

    def measured(self, residuals: Residuals, bound: Mapping[str, Samples], plan: Plan) -> Model:
        """Draw samples, see what base steps have gained, and linearize the residuals."""
        objective, here = residuals.objective, self.current_weights(residuals)
        samples, known = objective.population(plan.total, bound, here)
        self.suit(residuals, samples)
        batch = self.batch(residuals, samples, bound, plan.fitted)
        if self.state.jumps and self.state.since:
            here, known = self.after_base_steps(residuals, batch, here, plan.noisy), dict.fromkeys(known)
        model = self.linearized(residuals, batch, here, known, plan.rows)
        residuals.jumps += 1
        if residuals.jumps % RECHECK == 0 and self.changed(model):
            residuals.prepare(here, samples)
            model = self.linearized(residuals, batch, here, dict.fromkeys(known), plan.rows)
        return model

    def linearized(
        self, residuals: Residuals, batch: Batch, here: Tensor, known: dict[str, Tensor | None], count: int
    ) -> Model:
        """The residuals and their Jacobian of so many rows, stored as the present traces need it."""
        rows = Rows(self.layout(residuals), count, here.device, self.memory)
        return measure(residuals, batch, self.space.ranks, here, known, rows)

    def batch(
        self,
        residuals: Residuals,
        samples: dict[str, Samples],
        bound: Mapping[str, Samples],
        fitted: dict[str, int] | None = None,
    ) -> Batch:
        """Samples with their losses."""
        weights = {name: term.weight for name, term in residuals.objective.terms.items()}
        misfits = residuals.misfits(residuals.read(), samples)
        return Batch(samples, fitted or dict.fromkeys(samples, 0), weights, misfits, tuple(bound))

    def changed(self, model: Model) -> bool:
        """Whether traced residuals are no longer those of the functions, on any rank."""
        found = model.residuals.changed(model.weights, model.batch.samples, model.values)
        return bool(self.space.ranks.largest(torch.tensor(float(found))))

    def after_base_steps(self, residuals: Residuals, batch: Batch, now: Tensor, noisy: bool) -> Tensor:
        """The weights after base steps, or those before if the loss has grown too much; books what was gained.

        On samples of a single step it must have grown beyond doubt. What other code has written is not undone, and is
        no gain of the base.
        """
        state, last = self.state, self.space.gather(self.weights, residuals.params)
        if state.disturbed:
            state.end_comparison()
            self.stop()
            return now
        before, after, error = self.compared(residuals, batch, last, now)
        most = before if state.compares and not noisy else before + (TOO_MUCH - 1) * abs(before)  # may be negative
        state.book_base(fall(before, after) if after < torch.inf else -1.0, noisy)
        harmful = not after - (DOUBT * error if noisy else 0.0) <= most
        if noisy:
            state.book_harm(harmful)
        if harmful:
            self.write(last, residuals)
            return last
        self.stop()
        return now

    def compared(self, residuals: Residuals, batch: Batch, *places: Tensor) -> tuple[float, float, float]:
        """The losses of a batch at two points, averaged over ranks, and the standard error of their difference."""
        one, other = (residuals.values(weights, batch.samples) for weights in places)
        losses = [batch.losses(values)[0] for values in (one, other)]
        before, after, variance = self.space.ranks.mean(torch.stack([*losses, batch.doubt(one, other)])).tolist()
        return before, after, sqrt(variance / self.space.ranks.size)

    def settle(self, objective: Objective, bound: Mapping[str, Samples]) -> None:
        """Decide on the last jump by samples that it has not fitted, since it may have fitted the noise of its samples.

        A proposal is added to the current weights if it gains enough; a jump that was made is undone if it gains
        nothing. Base steps since the jump remain.
        """
        residuals, state = self.prepared(objective, bound), self.state
        samples = objective.others(bound, self.plan(residuals, bound, 1).total)
        self.suit(residuals, samples)
        batch = self.batch(residuals, samples, bound)
        here = self.current_weights(residuals)
        last, other = (self.space.gather(x, residuals.params) for x in (self.weights, self.other))
        there = other if torch.equal(here, last) else here + (other - last)
        before, after, error = self.compared(residuals, batch, *((there, here) if state.trusted else (here, there)))
        worst = after + DOUBT * error
        gain = fall(before, worst) if worst < torch.inf else -1.0
        made = state.trusted
        kept = state.judge(gain, after < before)
        if kept != made:
            self.write(there, residuals)
        if not kept:
            self.stop()
            self.stats.counts.update(accepted=-1, rejected_loss=1)

    # ----------------------------------------------------------------------------------------------------- decide

    def go(self, model: Model, move: Move, found: Found) -> None:
        """Write the best weights."""
        self.keep(model.weights, self.other, model.residuals)
        self.space.scatter(move.jump, self.momentum, model.residuals.params)
        self.write(found.best.weights, model.residuals)
        self.retain(model, found.best.values, found.best.weights)

    def propose(self, model: Model, move: Move, found: Found) -> None:
        """Remember the best weights; the base goes on from the present ones."""
        self.keep(found.best.weights, self.other, model.residuals)
        self.keep(model.weights, self.weights, model.residuals)
        self.space.scatter(move.jump, self.momentum, model.residuals.params)

    def stay(self, model: Model) -> None:
        """Write the weights that the jump began at, which may be those before the last base steps."""
        self.write(model.weights, model.residuals)
        self.stop()
        self.retain(model, model.values, model.weights)

    def retain(self, model: Model, values: Values, weights: Tensor) -> None:
        """Let the objective remember samples, unless they were given for this step, and their outputs."""
        batch = model.batch
        values = {name: found for name, found in values.items() if name not in batch.given}
        model.residuals.objective.retain(batch.samples, values, batch.sizes(values), weights)

    def adapt(self, model: Model, found: Found, accepted: bool, plan: Plan) -> None:
        """Adapt length, damping and rows to what happened, and decide who makes the next steps."""
        state, end = self.state, found.best if accepted else model
        state.cost = self.cost(model, found)
        fitted, unseen = fall(model.fitted, end.fitted), fall(model.unseen, end.unseen)
        state.jumps += 1
        state.accept(found) if accepted else state.refuse()
        if not model.all_fitted:
            state.adapt_rows(fitted, unseen, plan.most)
        if plan.noisy:
            state.await_samples(accepted)
        else:
            state.book_jump(fitted if model.all_fitted else unseen)
            state.decide(self.options.budget)
        self.stats.counts["extra_evaluations"] += found.tried

    def cost(self, model: Model, found: Found) -> float:
        """Cost of a jump, in gradients."""
        rows, weights = model.rows.shape
        samples = sum(len(x[0]) for x in model.batch.samples.values())
        part = sum(model.batch.fitted.values()) / samples
        forwards = (model.probes * part + 1 + found.tried) * self.options.forward_cost
        return jump_cost(min(rows, weights), model.rows.layout, rows / samples, forwards)

    def record(self, model: Model, move: Move, accepted: bool, made: bool) -> None:
        """Count and report a jump."""
        self.state.k += made
        rows, cause = model.rows.shape[0], "" if accepted else "loss"
        norms = sqrt(max(model.fitted, 0.0)), sqrt(max(move.promised, 0.0))
        length = float(move.jump.norm())
        self.report(cause, partial(JumpRecord, self.state.k, *norms, rows, rows, length, cause=cause))
