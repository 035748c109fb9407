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
from .._tensors.members import shaped_like
from .batch import Batch, plan
from .control import fall
from .jump import Model, Move, fit, measure, path
from .normal import Memory
from .objective import Closure, Objective
from .outputs import Unusable, agreeing
from .population import Samples
from .residuals import Residuals
from .search import Found, search
from .tangent_state import ROWS_COST, TangentState

MOST_ROWS = 2.0
"""Rows, in multiples of the number of weights, beyond which there are no more."""
TOO_MUCH = 2.0
"""A stretch of base steps is undone if it multiplied the loss by more than this."""
RECHECK = 16
"""Jumps between two comparisons of traced residuals with the plain way."""
NO_OBJECTIVE = "step() was given no Objective; use step(objective), or build GaussNewton(..., directions='history')"


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
        if closure is None:
            loss, closure = self.plain(base_step)
            if self.due:
                self.accelerate(closure, {} if closure is None else closure.bound)
            return loss
        if not self.due:
            return self.plain(base_step)[0]
        bound, loss = closure.bound, None  # what the base's own evaluation draws is not for the jump
        if self.state.jumps + 1 >= self.state.next_trial:
            loss, _ = self.plain(base_step)
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
        """Jump, and return the loss before it; None, with the weights as they were, if there is nothing to learn."""
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
        model = self.measured(residuals, bound)
        blocks = max(1, round(state.blocks))
        damping = state.damping(float(model.losses[0]), blocks)
        move = fit(model, self.gathered(self.momentum), damping, state.length, self.memory)
        found = search(path(model, move), state.length, state.longer)
        accepted = self.decide(model, move, found)
        self.record(model, move, accepted)
        return torch.tensor(model.loss, dtype=self.space.blocks[0].dtype)

    def decide(self, model: Model, move: Move, found: Found) -> bool:
        """Go where the loss is lowest, or stay; adapt everything to what happened."""
        state, accepted = self.state, found.best.loss < model.loss
        weights = move.end(model.weights, found.best.length) if accepted else model.weights
        falls = self.falls(model, found) if accepted else (0.0, 0.0, 0.0)
        if accepted:
            state.accept(found)
        else:
            state.refuse()
        self.write(weights)
        self.scatter(move.jump if accepted else torch.zeros_like(weights), self.momentum)
        values = found.best.values if accepted else model.values
        model.residuals.objective.retain(model.batch.samples, values, weights)
        state.jumps += 1
        if model.losses[1] > 0:
            state.adapt_rows(falls[0], falls[1], self.most)
        state.book_jump(self.options.budget, self.cost(model, found), falls[2])
        return accepted

    # ------------------------------------------------------------------------------------------- parts of a jump

    def prepared(self, objective: Objective, bound: Mapping[str, Samples]) -> Residuals:
        """The residuals of the objective, checked and traced when they are first used with these parameters."""
        found = self.residuals
        if found is None or found.objective is not objective:
            found = Residuals(objective, self.space.params)
        if not found.prepared:
            with agreeing(self.space.ranks):
                if not objective.checked:
                    objective.bind(**bound).loss()
                if not found.n:
                    raise Unusable("constant_outputs", "no parameter of the objective's model is trained")
                first = plan(found, bound, 1, MOST_ROWS * found.n)
                samples, _ = objective.population(first.total, bound, found.read())
                found.prepare(found.read(), {name: tuple(x[: first.fitted[name]] for x in samples[name]) for name in samples})
        self.residuals = found
        found.refresh()
        return found

    def measured(self, residuals: Residuals, bound: Mapping[str, Samples]) -> Model:
        """Draw samples, see what base steps have gained, and linearize the residuals."""
        objective, here = residuals.objective, self.place(residuals)
        counts = plan(residuals, bound, max(1, round(self.state.blocks)), MOST_ROWS * residuals.n)
        self.most = counts.most
        samples, known = objective.population(counts.total, bound, here)
        batch = Batch(samples, counts.fitted, {name: term.weight for name, term in objective.terms.items()})
        if self.state.since:
            here = self.better(residuals, batch, here)
            known = dict.fromkeys(known)
        count = sum(residuals.terms[name].size * fitted for name, fitted in counts.fitted.items())
        rows = self.memory.matrix("rows", count, residuals.n, self.space.blocks[0].device)
        model = measure(residuals, batch, self.space.ranks, here, known, rows)
        if self.state.jumps % RECHECK == RECHECK - 1 and residuals.changed(here, samples, model.values):
            residuals.prepare(here, batch.first())
            model = measure(residuals, batch, self.space.ranks, here, dict.fromkeys(known), rows)
        return model

    def place(self, residuals: Residuals) -> Tensor:
        """The weights in float64: those of the last jump, unless somebody else has written to the parameters."""
        now, last = residuals.read(), self.gathered(self.weights)
        if self.state.jumps and torch.equal(now, residuals.rounded(last)):
            return last
        if not self.state.since:
            self.scatter(torch.zeros_like(now), self.momentum)
        return now

    def better(self, residuals: Residuals, batch: Batch, now: Tensor) -> Tensor:
        """The weights after base steps, or those before if the loss has grown too much; books what was gained."""
        state, ranks = self.state, self.space.ranks
        if not state.jumps:
            return now
        last = self.gathered(self.weights)
        vectors = [batch.vector(residuals.values(weights, batch.samples)) for weights in (last, now)]
        before, after = ranks.mean(torch.stack([v @ v for v in vectors])).tolist()
        state.book_base(fall(before, after) if after < torch.inf else -1.0)
        compared = state.jumps + 1 >= state.next_trial
        if compared:
            state.next_trial = 4 * (state.jumps + 1)
        if not after <= before * (1.0 if compared else TOO_MUCH):
            return last
        self.scatter(torch.zeros_like(now), self.momentum)
        return now

    def falls(self, model: Model, found: Found) -> tuple[float, float, float]:
        """Falls of log(loss) on fitted samples, on unseen ones, and on those that tell what the jump was worth."""
        after = self.space.ranks.mean(model.batch.losses(found.best.values)).tolist()
        fitted, unseen = (fall(*pair) for pair in zip(model.losses.tolist(), after, strict=True))
        return fitted, unseen, unseen if model.losses[1] > 0 else fitted

    def cost(self, model: Model, found: Found) -> float:
        """Cost of a jump, in gradients on all its samples."""
        fitted = sum(model.batch.fitted.values()) / sum(len(x[0]) for x in model.batch.samples.values())
        self.stats.counts["extra_evaluations"] += found.tried
        return fitted * (ROWS_COST + self.options.forward_cost) + (1 + found.tried) * self.options.forward_cost

    # ------------------------------------------------------------------------------------------------------ weights

    def gathered(self, vector: list[Tensor]) -> Tensor:
        """A vector of the space in the order of the residuals' weights."""
        assert self.residuals is not None
        views = self.views(vector)
        return torch.cat([views[p].reshape(-1) for p in self.residuals.params])

    def scatter(self, flat: Tensor, vector: list[Tensor]) -> None:
        """Undo ``gathered``."""
        assert self.residuals is not None
        views = self.views(vector)
        for p, part in zip(self.residuals.params, flat.split(self.residuals.sizes), strict=True):
            views[p].copy_(part.view(p.shape))

    def views(self, vector: list[Tensor]) -> dict[Tensor, Tensor]:
        """Parts of a vector in the shapes of the parameters."""
        return {
            p: shaped_like(part, p)
            for block, numbers in zip(self.space.blocks, vector, strict=True)
            for p, part in zip(block.params, numbers.split(block.sizes), strict=True)
        }

    def write(self, weights: Tensor) -> None:
        """Set the parameters, and keep what their type would round."""
        assert self.residuals is not None
        self.scatter(weights, self.weights)
        self.residuals.write(weights)

    # ---------------------------------------------------------------------------------------------- reporting

    def record(self, model: Model, move: Move, accepted: bool) -> None:
        """Count and report a jump."""
        if accepted:
            self.state.k += 1
        self.stats.counts["attempted"] += 1
        self.stats.counts["accepted" if accepted else "rejected_loss"] += 1
        rows, cause = len(model.rows), "" if accepted else "loss"
        norms = sqrt(float(model.losses[0])), sqrt(max(move.promised, 0.0))
        self.stats.describe = partial(
            JumpRecord, self.state.k, *norms, rows, rows, float(move.jump.norm()), cause=cause
        )
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
            raise ValueError(
                "Invalid directions: 'tangent' with sharded parameters, whose rows no rank has. "
                "Allowed: 'history' for sharded models."
            )
        self.momentum = [vector.double() for vector in space.vector()]
        self.weights = [vector.double() for vector in space.vector()]
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
        for part in self.momentum:
            part.zero_()
        self.stats.counts["restarts"] += 1

    def cancel(self) -> None:
        """Nothing is under way between two steps."""
