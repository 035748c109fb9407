"""The algorithm of ``directions="tangent"``: Gauss-Newton jumps along the rows of the residuals' Jacobian.

    r, J      residuals of the fitted samples, scaled such that the loss is |r|^2, and their Jacobian
    S b     = J'(J J' + damping)^-1 b
    jump    = mu jump + S (r - mu J jump)                            momentum: Goldshlager et al. 2024
    bend    = S r'',  r'' = 2/h^2 (r(w - h jump) - r + h J jump)     geodesic acceleration: Transtrum and Sethna 2012
    w(a)    = w - a jump - a^2/2 bend                                a by a search on all samples, fitted or not

Samples with large residuals stay for the next jump, others are drawn anew. The base makes the steps while they gain
more for their cost than jumps do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._driver import BaseStep, Driver, logger
from .._ranks.placement import is_dtensor
from .._records import JumpRecord
from .._tensors.blocks import Space
from .._tensors.checkpoint import STATE, Entries, Saved, Shapes, pack, unpack
from .batch import ROWS, Batch, Plan, plan
from .control import fall
from .flat import double_vector, gathered, scatter
from .jump import Model, Move, fit, measure, path
from .normal import Memory
from .objective import Closure, Objective
from .outputs import Unusable, agreeing
from .population import Samples
from .residuals import Residuals
from .search import Found, search
from .tangent_state import ROWS_COST, TangentState

MOST_ROWS = 2.0
"""Rows, in multiples of the number of weights, beyond which there are no more ..."""
MOST_BYTES = 400e6
"""... nor beyond this memory for them."""
TOO_MUCH = 2.0
"""A stretch of base steps is undone if it multiplied the loss by more than this."""
RECHECK = 16
"""Jumps between two comparisons of traced residuals with the plain way."""
NO_OBJECTIVE = "step() was given no Objective; use step(objective), or build GaussNewton(..., directions='history')"
SHARDED = (
    "Invalid directions: 'tangent' with sharded parameters, of which no rank has whole rows. Allowed: 'history', as in "
    "GaussNewton(..., directions='history')."
)


class TangentDriver(Driver):
    """Levenberg-Marquardt jumps with momentum and geodesic acceleration, on samples that follow the residual."""

    kind = 3

    def __init__(self, base: Optimizer, options: Any):
        super().__init__(base, options)
        self.stats.gauges = self.gauges
        self.state = TangentState(share=options.budget)
        self.residuals: Residuals | None = None
        self.build(self.space)

    # ------------------------------------------------------------------------------------------------ the algorithm

    def step(self, base_step: BaseStep) -> Any:
        """Jump, or make a base step where that gains more for its cost."""
        closure = self.ahead
        if closure is None:  # some frameworks give samples during the base step
            loss, closure = self.plain(base_step)
            if self.due:
                self.accelerate(closure, {} if closure is None else closure.bound)
            return loss
        if not self.due:
            return self.plain(base_step)[0]
        bound = closure.bound  # what the base's own evaluation draws is not for the jump
        loss = self.plain(base_step)[0] if self.state.compares else None
        self.ahead = None
        found = self.accelerate(closure, bound)
        if loss is None:
            loss = self.plain(base_step)[0] if found is None else found
        return loss

    @property
    def due(self) -> bool:
        """Whether the next step is a jump."""
        return self.state.since >= self.state.wait

    def plain(self, base_step: BaseStep) -> tuple[Any, Closure | None]:
        """Make one base step; returns its loss, and the samples that were given during the step."""
        self.look()
        found = base_step()
        if any(p.grad is not None for p in self.space.params):
            self.state.k += 1
            self.state.since += 1
        return found

    def accelerate(self, closure: Closure | None, bound: Mapping[str, Samples]) -> Tensor | None:
        """Jump, and return the loss before it; None, with the weights as they were, if that cannot be tried."""
        self.look()
        try:
            if not isinstance(closure, Closure):
                raise Unusable("no_outputs", NO_OBJECTIVE)
            if not self.space.params:
                raise Unusable("converged", "no parameter is trained")
            return self.jump(closure.objective, bound)
        except Unusable as problem:
            self.skip(problem)
            self.state.postpone()
            return None

    def jump(self, objective: Objective, bound: Mapping[str, Samples]) -> Tensor:
        """Measure, fit, try, decide."""
        state, residuals = self.state, self.prepared(objective, bound)
        counts = self.plan(residuals, bound, state.whole_blocks)
        model = self.measured(residuals, bound, counts)
        before = gathered(self.space, self.momentum, residuals.params)
        move = fit(model, before, state.damping(model.square), state.length, self.memory)
        found = search(path(model, move), state.length, state.longer)
        accepted = found.best.loss < model.loss
        self.go(model, move, found) if accepted else self.stay(model)
        self.adapt(model, found, accepted, counts)
        self.record(model, move, accepted)
        return torch.tensor(model.loss, dtype=self.space.blocks[0].dtype)

    # -------------------------------------------------------------------------------------------- measure: samples

    def prepared(self, objective: Objective, bound: Mapping[str, Samples]) -> Residuals:
        """The residuals of the objective, checked and traced when they are first used with these parameters."""
        found = self.residuals
        if found is None or found.objective is not objective:
            found = Residuals(objective, self.space.params)
            if not found.n:
                raise Unusable("constant_outputs", "no parameter of the objective's model is trained")
            with agreeing(self.space.ranks), torch.enable_grad():
                counts = self.plan(found, bound, blocks=1)
                samples = objective.examples(bound, counts.total)
                found.check(samples, self.space.params)
                found.prepare(found.read(), samples, counts.fitted)
            self.residuals = found
        found.refresh()
        return found

    def plan(self, residuals: Residuals, bound: Mapping[str, Samples], blocks: int) -> Plan:
        """Numbers of samples for a jump."""
        most = min(max(MOST_ROWS * residuals.n, ROWS), MOST_BYTES / 8 / residuals.n)
        return plan(residuals, bound, blocks, most)

    def measured(self, residuals: Residuals, bound: Mapping[str, Samples], counts: Plan) -> Model:
        """Draw samples, see what base steps have gained, and linearize the residuals."""
        objective, here = residuals.objective, self.place(residuals)
        samples, known = objective.population(counts.total, bound, here)
        weights = {name: term.weight for name, term in objective.terms.items()}
        batch = Batch(samples, counts.fitted, weights, residuals.misfits(here, samples))
        if self.state.since and self.state.jumps:
            here, known = self.better(residuals, batch, here), dict.fromkeys(known)
        count = sum(residuals.terms[name].size * fitted for name, fitted in counts.fitted.items())
        rows = self.memory.matrix("rows", count, residuals.n, here.device)
        model = measure(residuals, batch, self.space.ranks, here, known, rows)
        if self.state.jumps % RECHECK == RECHECK - 1 and residuals.changed(here, samples, model.values):
            residuals.prepare(here, samples)
            model = measure(residuals, batch, self.space.ranks, here, dict.fromkeys(known), rows)
        return model

    def place(self, residuals: Residuals) -> Tensor:
        """The weights in float64: those of the last jump, unless somebody else has written to the parameters."""
        now, last = residuals.read(), gathered(self.space, self.weights, residuals.params)
        if self.state.jumps and torch.equal(now, residuals.rounded(last)):
            return last
        if not self.state.since:
            self.stop()
        return now

    def better(self, residuals: Residuals, batch: Batch, now: Tensor) -> Tensor:
        """The weights after base steps, or those before if the loss has grown too much; books what was gained."""
        state, last = self.state, gathered(self.space, self.weights, residuals.params)
        found = [batch.losses(residuals.values(weights, batch.samples))[0] for weights in (last, now)]
        before, after = self.space.ranks.mean(torch.stack(found)).tolist()
        most = before if state.compares else TOO_MUCH * before
        state.book_base(fall(before, after) if after < torch.inf else -1.0)
        if not after <= most:
            return last
        self.stop()
        return now

    # ----------------------------------------------------------------------------------------------------- decide

    def go(self, model: Model, move: Move, found: Found) -> None:
        """Write the best weights."""
        weights = move.end(model.weights, found.best.length)
        self.write(model, weights)
        scatter(self.space, move.jump, self.momentum, model.residuals.params)
        values = found.best.values
        model.residuals.objective.retain(model.batch.samples, values, model.batch.sizes(values), weights)

    def stay(self, model: Model) -> None:
        """Write the weights that the jump began at, which may be those before the last base steps."""
        self.write(model, model.weights)
        self.stop()
        sizes = model.batch.sizes(model.values)
        model.residuals.objective.retain(model.batch.samples, model.values, sizes, model.weights)

    def write(self, model: Model, weights: Tensor) -> None:
        """Set the parameters, and keep what their type would round."""
        scatter(self.space, weights, self.weights, model.residuals.params)
        model.residuals.write(weights)

    def stop(self) -> None:
        """Forget the last jump."""
        for part in self.momentum:
            part.zero_()

    def adapt(self, model: Model, found: Found, accepted: bool, counts: Plan) -> None:
        """Adapt length, damping and rows to what happened, and decide who makes the next steps."""
        state, values = self.state, found.best.values if accepted else model.values
        _, seen, others = self.space.ranks.mean(model.batch.losses(values)).tolist()
        fitted, unseen = fall(model.fitted, seen), fall(model.unseen, others)
        state.jumps += 1
        state.accept(found) if accepted else state.refuse()
        if model.unseen:
            state.adapt_rows(fitted, unseen, counts.most)
        part = sum(counts.fitted.values()) / sum(len(x[0]) for x in model.batch.samples.values())
        forward = self.options.forward_cost
        cost = part * (ROWS_COST + forward) + (1 + found.tried) * forward
        state.book_jump(self.options.budget, cost, unseen if model.unseen else fitted)
        self.stats.counts["extra_evaluations"] += found.tried

    # ---------------------------------------------------------------------------------------------- reporting

    def record(self, model: Model, move: Move, accepted: bool) -> None:
        """Count and report a jump."""
        self.state.k += accepted
        self.stats.counts["attempted"] += 1
        self.stats.counts["accepted" if accepted else "rejected_loss"] += 1
        rows, cause = len(model.rows), "" if accepted else "loss"
        norms = sqrt(max(model.fitted, 0.0)), sqrt(max(move.promised, 0.0))
        length = float(move.jump.norm())
        self.stats.describe = partial(JumpRecord, self.state.k, *norms, rows, rows, length, cause=cause)
        if self.hooks or logger.isEnabledFor(logging.DEBUG):
            self.publish()

    def skip(self, problem: Unusable) -> None:
        """Count and report a jump that was not tried."""
        self.stats.counts[f"skipped_{problem.cause}"] += 1
        if problem.cause != "converged":
            self.tell_once(f"GaussNewton makes plain steps: {problem}.")

    def gauges(self) -> dict[str, float]:
        """What the driver has set itself."""
        state = self.state
        return {"length": state.length, "boost": state.boost, "blocks": state.blocks, "wait": state.wait}

    # ---------------------------------------------------------------------------------------------- in and out

    def build(self, space: Space) -> None:
        """Make room for the last jump, and for the weights after it."""
        if any(map(is_dtensor, space.params)):
            raise ValueError(SHARDED)
        self.momentum, self.weights = double_vector(space), double_vector(space)
        self.memory = Memory()
        self.residuals = None

    def saved(self) -> Saved:
        """The last jump, the weights after it, and all numbers."""
        counts = torch.tensor(self.stats.counters(), dtype=torch.float64)
        vectors = {"momentum": self.momentum, "weights": self.weights}
        return Saved(vectors, {STATE: pack(self.state, self.kind), "counts": counts})

    def shapes(self) -> Shapes:
        """The last jump, and the weights after it."""
        return {"momentum": ("directions", ()), "weights": ("directions", ())}

    def load_numbers(self, found: dict[Tensor, Entries]) -> None:
        """Continue where the entries were saved."""
        entries = next(iter(found.values()))
        self.state = unpack(TangentState, entries[STATE])
        self.stats.set_counters(entries["counts"].tolist())

    def forget(self) -> None:
        """Forget the last jump, and what was adapted."""
        self.state = TangentState(share=self.options.budget, k=self.state.k)
        self.stop()
        self.stats.counts["restarts"] += 1

    def cancel(self) -> None:
        """Nothing is under way between two steps."""
