"""The algorithm: Gauss-Newton jumps along the rows of the residuals' Jacobian.

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

import logging
from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._calls import BaseStep
from .._driver import Driver, logger
from .._ranks.placement import is_dtensor
from .._ranks.ranks import world_size
from .._records import JumpRecord
from .._tensors.blocks import Space, Vector
from .._tensors.checkpoint import STATE, Entries, Saved, Shapes, pack, unpack
from .._tensors.members import account, all_parameters, takes_part
from .batch import Batch
from .jump import Found, Model, Move, fit, measure, search
from .objective import Closure, Objective, leaves
from .plan import MOST_BYTES, MOST_ROWS, ROWS, Plan, planned
from .residuals import Residuals
from .rows import Layout, Memory, Rows
from .state import FORWARD_COST, GaussNewtonState, fall, jump_cost
from .term import Samples
from .unusable import Unusable, agreeing

TOO_MUCH = 2.0
"""A stretch of base steps is undone if it multiplied the loss by more than this."""
RECHECK = 16
"""Jumps between two comparisons of traced residuals with the plain way."""
TRACES = 4
"""Objectives whose traced residuals are kept, for training that uses several in turn."""
NO_OBJECTIVE = "step() was given no Objective; use step(objective), or set_batch(objective) where a framework calls it"
GIVEN = (
    "the samples were given for this step alone, and a jump would fit their noise; give an Objective that has or draws "
    "all samples"
)
OTHER_MODEL = (
    "Invalid objective: its loss depends on none of the optimizer's parameters. Allowed: an Objective of the model "
    "that the optimizer trains, e.g. GaussNewton(Adam(objective.model.parameters()))."
)
NO_ROWS = (
    "Invalid parameters: {what}, whose rows of the Jacobian are not available. Allowed with an Objective: whole, real "
    "parameters on one device. Use Anderson(base) instead of GaussNewton(base)."
)
LEFT_OUT = (
    "Groups with 'anderson': False are trained by the base alone, which makes few steps while GaussNewton jumps. Train "
    "them with an optimizer of their own if they need more."
)
FROZEN = (
    "GaussNewton makes no jumps while all learning rates are 0, as parameters with rate 0 count as frozen. End a "
    "schedule above 0."
)
NUMBERS = (
    "Jumps are slower, as a number that a residual reads changes from jump to jump. Make it a tensor that is written "
    "to, such as a buffer of the model."
)


class GaussNewtonDriver(Driver):
    """Levenberg-Marquardt jumps with momentum and geodesic acceleration, on samples that follow the residual."""

    kind = 4
    traces: list[Residuals]
    """Residuals of the objectives that were used last, the newest first."""
    version: int | None
    """Version of the parameters after the last base step, if that is known."""

    def __init__(self, base: Optimizer, options: Any):
        super().__init__(base, options)
        self.state = GaussNewtonState()
        """All that a checkpoint keeps besides vectors and counters."""
        self.stats.gauges = self.state.gauges  # not the driver's, which would then be freed late
        self.examined: tuple[Any, ...] = ()
        """The objective that was found to belong to the parameters."""
        self.build(self.space)

    # ------------------------------------------------------------------------------------------------ the algorithm

    def step(self, base_step: BaseStep) -> Any:
        """Jump, or make a base step where that gains more for its cost."""
        closure, loss = base_step.given, None
        if closure is None:  # some frameworks give it during the base step
            loss, closure = self.plain(base_step)
            if self.due:
                self.accelerate(closure, single=bool(closure and closure.bound))
            return loss
        self.examine(closure.objective)
        if not self.due:
            return self.plain(base_step)[0]
        single = bool(closure.bound)  # before the base draws the others
        if self.state.compares:
            loss = self.plain(base_step)[0]
        before = self.accelerate(closure, single)
        if loss is None:
            loss = self.plain(base_step)[0] if before is None else before
        return loss

    @property
    def due(self) -> bool:
        """Whether the next step is a jump."""
        return self.state.since >= self.state.wait

    def plain(self, base_step: BaseStep) -> tuple[Any, Closure | None]:
        """Make one base step; returns its loss, and the objective that was given during the step."""
        self.notice_outside_writes()
        version = self.space.version()
        found = base_step()
        if self.acted(version):
            self.state.k += 1
            self.state.since += 1
        self.resting = max(self.state.wait - self.state.since - 1, 0)
        self.version = None if self.resting else self.space.version()
        return found

    def accelerate(self, closure: Closure | None, single: bool = False) -> Tensor | None:
        """Jump, and return the loss before it; None, with the weights as they were, if the base is to make a step.

        ``single`` says that the samples are for this step alone.
        """
        try:
            if closure is None:
                raise Unusable("no_objective", NO_OBJECTIVE)
            self.examine(closure.objective)
            if single:
                raise Unusable("given_samples", GIVEN)
            if not self.space.params:
                raise Unusable("converged", "no parameter is trained")
            return self.jump(closure.objective)
        except Unusable as problem:
            self.skip(problem)
            if problem.cause not in ("no_objective", "given_samples"):  # the next step may have them
                self.state.postpone()
            return None

    def jump(self, objective: Objective) -> Tensor:
        """Measure, fit, try, decide; returns the loss before."""
        state, residuals = self.state, self.prepared(objective)
        plan = self.plan(residuals, state.whole_blocks)
        model = self.measured(residuals, plan)
        before = self.space.gather(self.momentum, residuals.params)
        damping = state.damping(model.scale, model.trace, model.all_fitted)
        move = fit(model, before, damping, state.length, self.memory)
        found = search(model, move, state.length, state.longer)
        accepted = found.best.loss < model.loss
        if accepted:
            self.space.scatter(move.jump, self.momentum, residuals.params)
            self.write(found.best.weights, residuals)
        else:  # the jump may have begun before the last base steps
            self.write(model.weights, residuals)
            self.stop()
        values = found.best.values if accepted else model.values
        objective.retain(model.batch.samples, model.batch.sizes(values))
        self.adapt(model, found, accepted, plan)
        self.record(model, move, accepted)
        block = self.space.blocks[0]
        return torch.tensor(model.loss, dtype=block.dtype, device=block.device)

    # ---------------------------------------------------------------------------------------------------- measure

    def measured(self, residuals: Residuals, plan: Plan) -> Model:
        """Draw samples, see what base steps have gained, and linearize the residuals."""
        here, samples = self.current_weights(residuals), residuals.objective.population(plan.total)
        self.retrace_if_needed(residuals, samples)
        weights = {name: term.weight for name, term in residuals.objective.terms.items()}
        batch = Batch(samples, plan.fitted, weights, residuals.misfits(residuals.read(), samples))
        if self.state.jumps and self.state.since:
            here = self.after_base_steps(residuals, batch, here)
        model = self.linearized(residuals, batch, here, plan.rows)
        residuals.jumps += 1
        if residuals.jumps % RECHECK == 0 and (self.changed(model) or not residuals.traces):
            residuals.prepare(here, samples)
            model = self.linearized(residuals, batch, here, plan.rows)
        return model

    def linearized(self, residuals: Residuals, batch: Batch, here: Tensor, count: int) -> Model:
        """The residuals and their Jacobian of so many rows, stored as the present traces need it."""
        rows = Rows(self.layout(residuals), count, here.device, self.memory)
        return measure(residuals, batch, self.space.ranks, here, rows)

    def changed(self, model: Model) -> bool:
        """Whether traced residuals are no longer those of the functions, on any rank."""
        found = model.residuals.changed(model.weights, model.batch.samples, model.values)
        return bool(self.space.ranks.largest(torch.tensor(float(found))))

    def after_base_steps(self, residuals: Residuals, batch: Batch, now: Tensor) -> Tensor:
        """The weights after base steps, or those before if the loss has grown too much; books what was gained.

        What other code has written is not undone, and is no gain of the base.
        """
        state, last = self.state, self.space.gather(self.weights, residuals.params)
        if state.disturbed:
            state.end_comparison()
            self.stop()
            return now
        losses = [batch.losses(residuals.values(weights, batch.samples))[0] for weights in (last, now)]
        before, after = self.space.ranks.mean(torch.stack(losses)).tolist()
        most = before if state.compares else before + (TOO_MUCH - 1) * abs(before)  # may be negative
        state.book_base(fall(before, after) if after < torch.inf else -1.0)
        if not after <= most:
            self.write(last, residuals)
            return last
        self.stop()
        return now

    # ----------------------------------------------------------------------------------------------------- decide

    def adapt(self, model: Model, found: Found, accepted: bool, plan: Plan) -> None:
        """Adapt length, damping and rows to what happened, and decide who makes the next steps."""
        state, end = self.state, found.best if accepted else model
        # Ranks may have other numbers of samples, but have to decide alike.
        shared = torch.tensor([self.cost(model, found), plan.most], dtype=torch.float64, device="cpu")
        state.cost, most = self.space.ranks.largest(shared).tolist()
        fitted, unseen = fall(model.fitted, end.fitted), fall(model.unseen, end.unseen)
        state.jumps += 1
        state.accept(found) if accepted else state.refuse()
        if not model.all_fitted:
            state.adapt_rows(fitted, unseen, most)
        state.book_jump(fitted if model.all_fitted else unseen)
        state.decide()
        self.stats.counts["extra_evaluations"] += found.tried

    def cost(self, model: Model, found: Found) -> float:
        """Cost of a jump, in gradients."""
        rows, weights = model.rows.shape
        samples = sum(len(x[0]) for x in model.batch.samples.values())
        part = sum(model.batch.fitted.values()) / samples
        forwards = (model.probes * part + 1 + found.tried) * FORWARD_COST
        return jump_cost(min(rows, weights), model.rows.layout, rows / samples, forwards)

    def record(self, model: Model, move: Move, accepted: bool) -> None:
        """Count a jump, and pass it to hooks and log."""
        self.state.k += accepted
        rows, cause, counts = model.rows.shape[0], "" if accepted else "loss", self.stats.counts
        counts["attempted"] += 1
        counts["accepted" if accepted else "rejected_loss"] += 1
        norms = sqrt(max(model.fitted, 0.0)), sqrt(max(move.promised, 0.0))
        length = float(move.jump.norm())
        self.stats.describe = partial(JumpRecord, self.state.k, *norms, rows, rows, length, cause=cause)
        if self.hooks or logger.isEnabledFor(logging.DEBUG):
            self.publish()

    def skip(self, problem: Unusable) -> None:
        """Count and report a jump that could not be tried."""
        self.stats.counts[f"skipped_{problem.cause}"] += 1
        if problem.cause != "converged":
            self.tell_once(f"GaussNewton makes plain steps: {problem}.")

    # --------------------------------------------------------------------------------------------------- residuals

    def examine(self, objective: Objective) -> None:
        """Raise ValueError if the objective cannot be minimised by jumps of these parameters; once for each."""
        if self.examined == (subject := (self.space, objective, objective.module)):
            return
        params: list[Any] = self.space.params
        if any(map(is_dtensor, params)):
            raise ValueError(NO_ROWS.format(what="sharded ones"))
        if any(p.is_complex() for p in params):
            raise ValueError(NO_ROWS.format(what="complex ones"))
        if len({p.device for p in params}) > 1:
            raise ValueError(NO_ROWS.format(what="on several devices"))
        ours = {id(p) for p in all_parameters(self.base.param_groups)}
        if ours and not any(id(p) in ours for p in objective.module.parameters()):
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                if not any(id(leaf) in ours for leaf in leaves(objective.bind().loss())):
                    raise ValueError(OTHER_MODEL)
        self.examined = subject

    def prepared(self, objective: Objective) -> Residuals:
        """The residuals of the objective, checked and traced when they are first used with these parameters."""
        # A jump leaves groups with learning rate 0 alone.
        still = {id(p) for group in self.base.param_groups if group.get("lr") == 0 for p in group["params"]}
        params = [p for p in self.space.params if id(p) not in still]
        found = next((each for each in self.traces if each.fits(objective, params)), None)
        if found is None:
            found = self.traced(objective, params)
        if self.traces and self.traces[0].trained != found.trained:
            self.stop()
        self.traces = [found, *(each for each in self.traces if each is not found)][:TRACES]
        found.refresh()
        return found

    def traced(self, objective: Objective, params: list[Tensor]) -> Residuals:
        """The residuals as functions of these parameters, after a look at what they return."""
        ranks = self.space.ranks
        ranks.require_agreement(described(objective))
        found = Residuals(objective, params)
        if not found.n:
            raise Unusable("constant_outputs", "no parameter of the objective's model is trained")
        with agreeing(ranks), torch.enable_grad():
            plan = self.plan(found, blocks=1)
            samples = objective.examples(plan.total)
            found.check(samples, params)
            found.prepare(found.read(), samples, plan.fitted)
        if any(
            not takes_part(group) and any(p.requires_grad for p in group["params"]) for group in self.base.param_groups
        ):
            self.tell_once(LEFT_OUT)
        return found

    def retrace_if_needed(self, residuals: Residuals, samples: dict[str, Samples]) -> None:
        """Trace the residuals again if on any rank samples have other shapes than before, or functions other numbers.

        Where numbers change again soon, a trace does not pay: residuals are evaluated without one for a while.
        """
        ranks = self.space.ranks
        stale = torch.tensor([not residuals.hold(samples), not residuals.same_numbers()], dtype=torch.float64)
        reshaped, changed = ranks.largest(stale).tolist()
        if changed and residuals.jumps < RECHECK:
            self.tell_once(NUMBERS)
        if reshaped or changed:
            traces = not changed or residuals.jumps >= RECHECK
            with agreeing(ranks), torch.enable_grad():
                residuals.prepare(residuals.read(), samples, traces=traces)

    def plan(self, residuals: Residuals, blocks: int) -> Plan:
        """Numbers of samples for a jump."""
        layout, numbers = self.layout(residuals), MOST_BYTES / 8
        most = min(max(MOST_ROWS * residuals.n, ROWS), numbers / layout.width)
        if layout.factored:
            most = min(most, sqrt(numbers))
        return planned(residuals, blocks, most)

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
        """Set the parameters, and keep what their type would round; with all others, which may take part later."""
        if len(residuals.params) < len(self.space.params):
            self.space.read(self.weights)
        self.space.scatter(weights, self.weights, residuals.params)
        residuals.write(weights)

    def stop(self) -> None:
        """Forget the last jump."""
        for part in self.momentum:
            part.zero_()

    # ---------------------------------------------------------------------------------------------- in and out

    @property
    def steps(self) -> int:
        """Steps that changed parameters; before the first, jumps that were refused, as they leave a state too."""
        return self.state.k or self.state.jumps

    def agree(self, given: Closure | None) -> None:
        """Compare notes with other ranks, which have to minimise the same terms."""
        if world_size(self.options.process_group) > 1:
            terms = {"objective": "none"} if given is None else described(given.objective)
            self.space.ranks.require_agreement(account(self.options, self.base.param_groups) | terms)
        self.agreed = True

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
        """Make room for the last jump, and for the weights after it."""
        self.momentum, self.weights = space.vector(torch.float64), space.vector(torch.float64)
        self.memory = Memory()
        self.traces, self.version = [], None

    def saved(self) -> Saved:
        """The last jump, the weights after it, and all numbers."""
        counts = torch.tensor(self.stats.counters(), dtype=torch.float64)
        vectors: dict[str, Vector] = {"momentum": self.momentum, "weights": self.weights}
        return Saved(vectors, {STATE: pack(self.state, self.kind), "counts": counts})

    def shapes(self) -> Shapes:
        """The last jump, and the weights after it."""
        return dict.fromkeys(("momentum", "weights"), ("version", ()))

    def load_numbers(self, found: dict[Tensor, Entries]) -> None:
        """Continue where the entries were saved."""
        entries = next(iter(found.values()))
        vars(self.state).update(vars(unpack(GaussNewtonState, entries[STATE])))
        self.stats.set_counters(entries["counts"].tolist())

    def forget(self) -> None:
        """Forget the last jump, and what was adapted."""
        vars(self.state).update(vars(GaussNewtonState(k=self.state.k)))
        self.stats.counts["restarts"] += 1
        self.resting = 0
        self.stop()

    def cancel(self) -> None:
        """Nothing is under way between two steps."""


def described(objective: Objective) -> dict[str, str]:
    """What ranks that minimise an objective together have to agree on, by name."""
    found = {f"term {name!r}": f"weight {term.weight}" for name, term in objective.terms.items()}
    return {"the order of terms": ", ".join(objective.terms), **found}
