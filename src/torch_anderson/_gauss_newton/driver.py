"""The algorithm: Gauss-Newton jumps along the rows of the residuals' Jacobian, between or instead of base steps.

A step:

1. Decide who makes it (``step``): a jump, unless base steps gain more for their cost. Before some jumps the base makes
   a step to compare with.
2. Draw samples (``measured``): those with large residuals stay from the last jump, others are drawn anew. Residuals are
   traced when they are first used, and again if something that a trace depends on has changed.
3. Judge the base steps since the last jump (``after_base_steps``), and undo them if the loss has grown too much.
4. Measure r and J at the weights w (``jump.measure``), in float64.
5. Fit the curve w(a) = w - a d - a^2/2 b - a^3/6 c to the residuals of some of the samples (``jump.fit``).
6. Search the length a with the least loss over all samples (``jump.Search``).
7. If the loss falls there, set the weights, and keep d for the momentum of the next jump; otherwise keep the weights.
8. Retain samples, and adapt length, damping, rows and the wait until the next jump (``adapt``, ``control``).

Notation and equations are in ``jump``: r is ``rhs``, J is ``rows``, d is ``jump``, b is ``second_order`` and c is
``third_order``. Between steps the driver keeps d in ``momentum``, w in ``weights``, and all numbers in ``state``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._calls import BaseStep
from .._driver import Driver
from .._ranks.placement import is_dtensor
from .._ranks.ranks import world_size
from .._records import JumpRecord
from .._tensors.blocks import Space, Vector
from .._tensors.checkpoint import STATE, Entries, Saved, Shapes, pack, unpack
from .._tensors.members import account, all_parameters, takes_part
from .control import Plan, State, fall, jump_cost, plan_samples
from .jacobian import Memory
from .jump import Linearization, Search, fit, measure
from .losses import Batch
from .objective import Closure, Objective, Unusable, leaves
from .residuals import Residuals, agreeing, structure_of

UNDONE_FROM = 2.0
"""A stretch of base steps is undone if it multiplied the loss by more than this."""
MOST_TRACED = 4
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


class GaussNewtonDriver(Driver):
    """Levenberg-Marquardt jumps with momentum and geodesic acceleration, on samples that follow the residual."""

    kind = 4

    momentum: Vector
    """d, the last jump; 0 if it is not to go on."""
    weights: Vector
    """w after the last jump, in float64; valid as long as the parameters are its rounded values."""
    memory: Memory
    traces: list[Residuals]
    """Residuals of the objectives that were used last, the newest first."""
    version: int | None
    """Version of the parameters after the last base step, if that is known."""

    def __init__(self, base: Optimizer, options: Any):
        super().__init__(base, options)
        self.state = State()
        """All that a checkpoint keeps besides vectors and counters."""
        self.stats.gauges = self.state.gauges  # not the driver's, which would then be freed late
        self.examined: tuple[Any, ...] = ()
        """The objective that was found to belong to the parameters."""
        self.build(self.space)

    # ------------------------------------------------------------------------------------------------ the algorithm

    def step(self, base_step: BaseStep) -> Any:
        """Jump, or make a base step where that gains more for its cost; returns the loss before."""
        closure: Closure | None = base_step.given
        if closure is None:  # some frameworks give it during the base step
            loss, closure = self.make_base_step(base_step)
            if self.due:
                if closure is not None:
                    self.examine(closure.objective)
                self.accelerate(closure, single=bool(closure and closure.bound))
            return loss
        self.examine(closure.objective)
        if not self.due:
            return self.make_base_step(base_step)[0]
        single, loss = bool(closure.bound), None  # before the base draws the others
        if self.state.compares:
            loss = self.make_base_step(base_step)[0]
        before = self.accelerate(closure, single)
        if loss is None:
            loss = self.make_base_step(base_step)[0] if before is None else before
        return loss

    @property
    def due(self) -> bool:
        """Whether the next step is a jump."""
        return self.state.since >= self.state.wait

    def make_base_step(self, base_step: BaseStep) -> tuple[Any, Closure | None]:
        """Make one base step; returns its loss, and the objective that was given for the step by now."""
        self.notice_outside_writes()
        version = self.space.version()
        returned = base_step()
        if self.acted(version):
            self.state.steps += 1
            self.state.since += 1
        self.resting = max(self.state.wait - self.state.since - 1, 0)
        self.version = None if self.resting else self.space.version()
        return returned

    def accelerate(self, closure: Closure | None, single: bool = False) -> Tensor | None:
        """Jump, and return the loss before it; None, with the weights as they were, if the base is to make a step.

        ``single`` says that the samples are for this step alone.
        """
        try:
            if closure is None:
                raise Unusable("no_objective", NO_OBJECTIVE)
            if single:
                raise Unusable("given_samples", GIVEN)
            if not self.space.params:
                raise Unusable("converged", "no parameter is trained")
            return self.jump(closure.objective)
        except Unusable as problem:
            self.stats.counts[f"skipped_{problem.cause}"] += 1
            if problem.cause != "converged":
                self.tell_once(f"GaussNewton makes plain steps: {problem}.")
            if problem.cause not in ("no_objective", "given_samples"):  # the next step may have them
                self.state.postpone()
            return None

    def jump(self, objective: Objective) -> Tensor:
        """Measure, fit, search, decide; returns the loss before."""
        state, residuals = self.state, self.residuals_of(objective)
        plan = plan_samples(residuals, state.whole_blocks)
        model, written = self.measured(residuals, plan)
        # Where a loss is steep but hardly curved, as at outliers, |r|^2 is far larger than the loss.
        scale = min(model.square, abs(model.fitted_loss))
        damping = state.damping(scale, model.trace, model.all_fitted)
        before = self.space.gather(self.momentum, residuals.params)
        curve = fit(model, before, damping, state.length, self.memory)
        search = Search(model, curve)
        search.run(state.length, state.longer)
        accepted = search.falls
        if accepted:
            self.space.scatter(curve.jump, self.momentum, residuals.params)
            self.write(search.best.weights, residuals)
        else:  # the jump may have begun before the last base steps
            self.write(model.weights, residuals)
            self.stop()
        outputs = search.best.outputs if accepted else model.outputs
        objective.retain(model.batch.samples, model.batch.residual_sizes(outputs))
        self.adapt(model, search, plan, written)
        self.record(model, search)
        block = self.space.blocks[0]
        return torch.tensor(model.loss, dtype=block.dtype, device=block.device)

    def measured(self, residuals: Residuals, plan: Plan) -> tuple[Linearization, float]:
        """Draw samples, see what base steps have gained, and linearize the residuals.

        Also returns how log(loss) fell, or rose, by what other code wrote to the weights after the last jump.
        """
        here, samples = self.current_weights(residuals), residuals.objective.population(plan.total)
        residuals.retrace_if_needed(samples)
        batch, state, written = residuals.batch(samples, plan.fitted), self.state, 0.0
        if state.jumps and state.since:
            here, written = self.after_base_steps(residuals, batch, here)
        model = measure(residuals, batch, here, self.memory)
        if residuals.retrace_if_wrong(here, samples, model.outputs):
            model = measure(residuals, batch, here, self.memory)
        if state.jumps and not state.since and not torch.equal(here, self.space.gather(self.weights, residuals.params)):
            written = fall(state.end_loss, model.loss)
        return model, written

    def after_base_steps(self, residuals: Residuals, batch: Batch, now: Tensor) -> tuple[Tensor, float]:
        """The weights after base steps, or those before if the loss has grown too much; records what was gained.

        What other code has written is not undone. Between base steps it counts as a part of what they gained; also
        returns the fall of log(loss) by what was written before them.
        """
        state, last = self.state, self.space.gather(self.weights, residuals.params)
        losses = [batch.loss(residuals.outputs(weights, batch.samples))[0] for weights in (last, now)]
        before, after = self.space.ranks.mean(torch.stack(losses)).tolist()
        state.record_base_gain(fall(before, after) if after < torch.inf else -1.0)
        if state.disturbed:
            self.stop()
            return now, fall(state.end_loss, before) if before < torch.inf else 0.0
        most = before if state.compares else before + (UNDONE_FROM - 1) * abs(before)  # may be negative
        if not after <= most:
            self.write(last, residuals)
            return last, 0.0
        self.stop()
        return now, 0.0

    def adapt(self, model: Linearization, search: Search, plan: Plan, written: float) -> None:
        """Adapt length, damping and rows to what happened, and decide who makes the next steps.

        A jump gains no more than other code leaves of it: ``written``, where the loss rose, belongs to the last one.
        """
        state, best = self.state, search.best
        # Ranks may have other numbers of samples, but have to decide alike.
        shared = [jump_cost(model, len(search.trials)), plan.most_blocks]
        cost, most_blocks = self.space.ranks.largest(torch.tensor(shared, dtype=torch.float64, device="cpu")).tolist()
        state.jumps += 1
        if search.falls:
            fitted, unseen = fall(model.fitted_loss, best.fitted_loss), fall(model.unseen_loss, best.unseen_loss)
            state.accept(best.length, longer=search.expected > best.length)
        else:
            fitted = unseen = 0.0
            state.refuse()
        if not model.all_fitted:
            state.adapt_rows(fitted, unseen, most_blocks)
        state.end_loss = best.loss if search.falls else model.loss
        state.record_jump_gain((fitted if model.all_fitted else unseen) + min(written, 0.0), cost)

    def record(self, model: Linearization, search: Search) -> None:
        """Count a jump, and pass it to hooks and log."""
        accepted, curve, rows = search.falls, search.curve, model.rows.shape[0]
        cause, counts = "" if accepted else "loss", self.stats.counts
        self.state.steps += accepted
        counts["attempted"] += 1
        counts["accepted" if accepted else "rejected_loss"] += 1
        counts["extra_evaluations"] += len(search.trials)
        norms = sqrt(max(model.fitted_loss, 0.0)), sqrt(max(curve.promised, 0.0))
        length = float(curve.jump.norm())
        self.report(JumpRecord(self.state.steps, *norms, rows, rows, length, cause=cause))

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

    def residuals_of(self, objective: Objective) -> Residuals:
        """The residuals of the objective, checked and traced when they are first used with these parameters."""
        # A jump leaves groups with learning rate 0 alone.
        still = {id(p) for group in self.base.param_groups if group.get("lr") == 0 for p in group["params"]}
        params = [p for p in self.space.params if id(p) not in still]
        structure = structure_of(objective, params)
        residuals = next((each for each in self.traces if each.structure == structure), None)
        if residuals is None:
            residuals = self.traced(objective, params)
        if self.traces and self.traces[0].trained != residuals.trained:
            self.stop()
        self.traces = [residuals, *(each for each in self.traces if each is not residuals)][:MOST_TRACED]
        residuals.read_constants()
        return residuals

    def traced(self, objective: Objective, params: list[Tensor]) -> Residuals:
        """The residuals as functions of these parameters, after a look at what they return."""
        ranks, groups = self.space.ranks, self.base.param_groups
        ranks.require_agreement(described(objective))
        residuals = Residuals(objective, params, ranks)
        if not residuals.n:
            raise Unusable("constant_outputs", "no parameter of the objective's model is trained")
        with agreeing(ranks), torch.enable_grad():
            plan = plan_samples(residuals, blocks=1)
            samples = objective.examples(plan.total)
            residuals.check(samples, params)
            residuals.prepare(residuals.read(), samples, plan.fitted)
        if any(p.requires_grad for group in groups if not takes_part(group) for p in group["params"]):
            self.tell_once(LEFT_OUT)
        return residuals

    # ------------------------------------------------------------------------------------------------------ weights

    def current_weights(self, residuals: Residuals) -> Tensor:
        """The weights in float64: those of the last jump, unless other code has written to the parameters."""
        last = self.space.gather(self.weights, residuals.params)
        if self.state.jumps and rounded_to(last, residuals.params):
            return last
        if not self.state.since:
            self.stop()
        return residuals.read()

    def notice_outside_writes(self) -> None:
        """Remember if other code has written to the parameters since the last jump; called before base steps."""
        if not self.state.since:
            params = self.space.params
            unchanged = not self.state.jumps or rounded_to(self.space.gather(self.weights, params), params)
            self.state.disturbed = not unchanged
            if not unchanged:  # the base begins there
                self.space.read(self.weights)
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
        return self.state.steps or self.state.jumps

    def agree(self, given: Closure | None) -> None:
        """Compare notes with other ranks, which have to minimise the same terms."""
        if world_size(self.options.process_group) > 1:
            terms = {"objective": "none"} if given is None else described(given.objective)
            self.space.ranks.require_agreement(account(self.options, self.base.param_groups) | terms)
        self.agreed = True

    def count_rest(self) -> None:
        """Count a base step without a look at the parameters."""
        super().count_rest()
        self.state.steps += 1
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
        vars(self.state).update(vars(unpack(State, entries[STATE])))
        self.stats.set_counters(entries["counts"].tolist())

    def forget(self) -> None:
        """Forget the last jump, and what was adapted."""
        vars(self.state).update(vars(State(steps=self.state.steps)))
        self.stats.counts["restarts"] += 1
        self.resting = 0
        self.stop()

    def cancel(self) -> None:
        """Nothing is under way between two steps."""


def rounded_to(weights: Tensor, params: Sequence[Tensor]) -> bool:
    """Whether weights, rounded to the types of the parameters, are equal to them."""
    parts = zip(params, weights.split([p.numel() for p in params]), strict=True)
    return all(torch.equal(p.detach().reshape(-1), part.to(p.dtype)) for p, part in parts)


def described(objective: Objective) -> dict[str, str]:
    """What ranks that minimise an objective together have to agree on, by name."""
    weights = {f"term {name!r}": f"weight {term.weight}" for name, term in objective.terms.items()}
    return {"the order of terms": ", ".join(objective.terms), **weights}
