"""One accelerated step, stage by stage: parameters -> history -> least squares -> extrapolation -> safeguard."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import hypot, inf, sqrt
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from . import base_state, checkpoint, joint
from .averaging import largest
from .evaluation import LossFn, evaluate
from .history import full_precision
from .options import Options
from .parameters import Block, Layout, accelerated, build_blocks, look, refuse_sparse
from .safeguard import (
    MAX_GAIN,
    TRUSTED_GAIN,
    Decision,
    Jump,
    adjusted_gain,
    geometric_test,
    is_noise,
    loss_test,
    residual_test,
)
from .stats import Acceleration, Pending, Stats

logger = logging.getLogger("torch_anderson")


class Accelerator:
    """All that ``Anderson`` knows beyond its base optimizer. ``step`` is the algorithm."""

    def __init__(self, base: Optimizer, options: Options):
        self.base = base
        self.options = options
        self.stats = Stats()
        self.hooks: OrderedDict[int, Callable[[Acceleration], None]] = OrderedDict()
        self.enabled = True
        self.next_loss_fn: LossFn | None = None
        self.blocks: list[Block] = []
        self.k = 0
        self.pair_steps = 0  # base steps in the cycle under way
        self.pairs_since_jump = 0
        self.pending: Pending | None = None
        self.snapshot = base_state.Snapshot()
        self._layout: Layout | None = None
        self._seen: list[Any] = []
        self.waiting: list[Tensor] | None = None  # parameters whose base state does not exist yet
        self._versions: int | None = None
        self._told: set[str] = set()
        self._proportional = not isinstance(base, base_state.NOT_PROPORTIONAL)
        self._cyclic = options.residual == "cycle"
        self._averages = options.average_window > 0 and not self._cyclic
        self._cycle_mean = options.average_window > 1 and self._cyclic

    # ------------------------------------------------------------------------------------------ the algorithm

    @_disable_dynamo  # torch.compiler.disable, but without importing the compiler before it is needed
    def step(self, closure: Callable[[], Any] | None, loss_fn: LossFn | None) -> Any:
        """One base step, then what Anderson acceleration makes of it."""
        if not self.enabled:
            return self.base.step(closure)
        self._look_around()
        if not self._has_learning_rate():
            return self._idle_step(closure)
        k = self.k + 1
        measured = self._begins_pair(k) and self._keep_iterates()
        group_values = base_state.group_values(self.base) if self.pending else []
        loss = self.base.step(closure)
        if measured or self.pair_steps:
            self._refresh()  # the base may have given the parameters other memory
        if not self._moved(measured):
            self._watch()
            return loss
        self.k = k
        self._show()
        if measured or self.pair_steps:
            self._extend_pair()
        if self.pending and not self._settle(self.pending, group_values):
            return loss
        stores = self.pair_steps > 0 and self._ends_pair(k)
        if stores:
            self._store()
        residual_max = self._residual_max(stores) if self._averages and measured else None
        jumped = stores and k % self.options.period == 0 and self._extrapolate(loss_fn)
        if residual_max is not None and not self.pending:
            self._average(residual_max, restart=jumped and self.options.period > 1)
        self._watch()
        return loss

    def _begins_pair(self, k: int) -> bool:
        """Whether the weights before base step k have to be kept."""
        if self._cyclic:
            return (k - 1) % self.options.period == 0 and k - 1 >= self.options.warmup
        return self._averages or self.pending is not None or self._ends_pair(k)

    def _ends_pair(self, k: int) -> bool:
        """Whether base step k completes a pair to store."""
        o = self.options
        if self._cyclic:
            return self.pair_steps == o.period
        return k > o.warmup and (k % o.store_period == 0 or k % o.period == 0)

    def _has_learning_rate(self) -> bool:
        return any(base_state.learning_rate(group) for group in self.base.param_groups)

    def _idle_step(self, closure: Callable[[], Any] | None) -> Any:
        """All learning rates are 0: how distributed checkpoints make an optimizer allocate its state."""
        loss = self.base.step(closure)
        self._show()
        self._watch()
        return loss

    def _moved(self, measured: bool) -> bool:
        """Whether the base step did anything (a cheap answer where the weights before it were not kept)."""
        if measured:
            return any(block.moved() for block in self.blocks)
        return any(p.grad is not None for group in self.base.param_groups for p in group["params"])

    # ---------------------------------------------------------------------------------------- measuring pairs

    def _keep_iterates(self) -> bool:
        """Copy the weights before a measured step; False if no parameter takes part."""
        self.ensure_blocks()
        self.pair_steps = 0
        for block in self.blocks:
            refuse_sparse(block.params)
            block.keep_iterate()
        return bool(self.blocks)

    def _extend_pair(self) -> None:
        """Count a base step in its pair: the only one, or one of a cycle, whose learning rates add up."""
        averaged = self.pair_steps - (self.options.period - self.options.average_window)
        for block in self.blocks:
            rate = self._learning_rate(block) if self._proportional else 1.0
            block.learning_rate = rate + block.learning_rate if self.pair_steps and self._proportional else rate
            if self._cycle_mean and averaged >= 0:
                block.add_displacement(first=averaged == 0)
        self.pair_steps += 1

    def _refresh(self) -> None:
        for block in self.blocks:
            block.refresh()

    def _residual_max(self, stored: bool) -> Tensor:
        return largest([block.residual_max(stored) for block in self.blocks])

    def _store(self) -> None:
        """Add the pair (iterate, residual) to the history."""
        self._restart_if_rates_are_unlike()
        for block in self.blocks:
            read = block.read_mean(self.options.average_window) if self._cycle_mean else block.read
            block.history.store(block.iterate, read, block.learning_rate)
        self.pair_steps = 0
        self.pairs_since_jump += 1

    def _restart_if_rates_are_unlike(self) -> None:
        """Residuals of another learning rate cannot be compared if the step is not proportional to it, nor can
        those of rate 0, which say nothing of others."""
        for block in self.blocks:
            before, block.stored_rate = block.stored_rate, self._learning_rate(block)
            changed = before is not None and before != block.stored_rate
            if changed and not (self._proportional and before and block.stored_rate):
                self._forget_pairs()

    def _learning_rate(self, block: Block) -> float:
        return base_state.learning_rate(self.base.param_groups[block.group])

    # ------------------------------------------------------------------------------------------ extrapolation

    def _extrapolate(self, loss_fn: LossFn | None) -> bool:
        """Jump to the accelerated weights if they pass; True if that is final."""
        if self.blocks[0].history.pairs < 2:
            return self._skip("short_history")
        problem = joint.assemble(self.blocks, self.options)
        if problem is None:
            self.reset_history()
            return self._skip("nonfinite")
        if cause := self._reason_to_skip(problem, loss_fn):
            return self._skip(cause, problem)
        length, descent = joint.form_candidates(self.blocks, problem, self.options)
        decision = geometric_test(
            Jump(length, descent, problem.path),
            max_jump=self.options.max_jump,
            least_descent=self._least_descent(problem),
        )
        if decision.accepted:
            decision = self._write_candidates(loss_fn)
        self.stats.counts["attempted"] += 1
        describe = partial(_describe, problem, self.k, decision.cause, length)
        if decision.accepted and self.options.safeguard == "residual":
            self.snapshot.take(self.base)
            self.pending = Pending(problem.normalized_norm, describe())
            return False
        self._conclude(decision, describe)
        return decision.accepted

    def _reason_to_skip(self, problem: joint.Problem, loss_fn: LossFn | None) -> str:
        if problem.residual_norm == 0:
            return "converged"
        if self.options.safeguard == "loss" and loss_fn is None:
            return "no_loss"
        cautious = self.options.safeguard == "descent"
        wary = cautious and not self._cyclic  # the noise of cycles is met by their regularization
        if wary and is_noise(problem.gram, self.pairs_since_jump - 1):  # first, as it needs no solution
            return "noisy"
        n = sum(block.n for block in self.blocks)
        gain = adjusted_gain(problem.gain, problem.solution.rank, n) if cautious else problem.gain
        return "no_gain" if gain > (TRUSTED_GAIN if wary else MAX_GAIN) else ""

    def _least_descent(self, problem: joint.Problem) -> float:
        """What the inner product of the jump with r must exceed: |r|^2, that of the plain step, or what the last
        iterate of a cycle has, which is ahead of the mean."""
        if self.options.safeguard != "descent":
            return -inf
        return problem.residual_norm**2 / self.options.cycle_progress

    def _write_candidates(self, loss_fn: LossFn | None) -> Decision:
        """Set the weights to the candidate; go back if the loss is asked for and not lower there."""
        if self.options.safeguard != "loss" or loss_fn is None:
            self._write([block.iterate for block in self.blocks])
            return Decision(True)
        params = [p for group in self.base.param_groups for p in group["params"]]
        plain = [block.keep_last_iterate() if self._cycle_mean else block.history.last_map for block in self.blocks]
        before = evaluate(loss_fn, params)
        self._refresh()  # so may a forward pass
        self._write([block.iterate for block in self.blocks])
        decision = Decision(False)
        try:
            decision = loss_test(before, evaluate(loss_fn, params))
        finally:
            if not decision.accepted:
                self._refresh()
                self._write(plain)
        self.stats.counts["extra_evaluations"] += 2
        return decision

    def _write(self, vectors: list[Tensor]) -> None:
        for block, vector in zip(self.blocks, vectors, strict=True):
            block.write(vector)

    # --------------------------------------------------------------------------------------------- decisions

    def _settle(self, pending: Pending, group_values: list[dict[str, Any]]) -> bool:
        """Decide on the pending jump, now that the residual after it is known; False takes the step back."""
        self.pending = None
        norm = sqrt(sum(block.normalized_residual_sq() for block in self.blocks))
        decision = residual_test(pending.norm, norm)
        if self._averages:
            points = [block.iterate if decision.accepted else block.history.last_map for block in self.blocks]
            self._push(points, restart=decision.accepted and self.options.period > 1)
        if not decision.accepted:
            for block in self.blocks:
                block.write_all(block.history.last_map)
            self.snapshot.restore(self.base)
            base_state.restore_group_values(self.base, group_values)
            self.waiting = None  # restored parameters may be without state again
            self._watch()
        self._conclude(decision, partial(replace, pending.record, cause=decision.cause))
        return decision.accepted

    def _skip(self, cause: str, problem: joint.Problem | None = None) -> bool:
        self.stats.counts[f"skipped_{cause}"] += 1
        if problem is not None:
            self._tell(partial(_describe, problem, self.k, cause))
        return False

    def _conclude(self, decision: Decision, describe: Callable[[], Acceleration]) -> None:
        self.stats.counts["accepted" if decision.accepted else f"rejected_{decision.cause}"] += 1
        if decision.accepted:
            self.pairs_since_jump = 0
            if self.options.on_accept == "reset_momentum" and not base_state.reset_momentum(self.base):
                self._tell_once("on_accept='reset_momentum': %s keeps no momentum that we know of")
        self._tell(describe)

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.info(message, type(self.base).__name__)

    def _tell(self, describe: Callable[[], Acceleration]) -> None:
        """Tell of an acceleration; what nobody listens to is worked out when somebody asks."""
        self.stats.describe = describe
        if self.hooks or logger.isEnabledFor(logging.DEBUG):
            record = self.stats.latest
            assert record is not None
            logger.debug("%s", record)
            for hook in self.hooks.values():
                hook(record)

    # --------------------------------------------------------------------------------------- moving average

    def _push(self, points: list[Tensor] | None, restart: bool) -> None:
        """Add points (the present weights if None) to the windows."""
        for i, block in enumerate(self.blocks):
            assert block.window is not None
            if restart:
                block.window.clear()
            row = block.window.new_row()
            block.copy_to(row) if points is None else row.copy_(points[i])

    def _average(self, residual_max: Tensor, restart: bool) -> None:
        """Push the present weights; replace them by the window's mean if it is full and noisy.

        The choice is made on the device, so that no step waits for it.
        """
        self._push(None, restart)
        windows = [block.window for block in self.blocks if block.window]
        if not windows[0].full:
            return
        with full_precision(residual_max.device):
            noise = largest([window.average(block.iterate) for block, window in zip(self.blocks, windows, strict=True)])
        noisy = noise > self.options.average_tolerance * residual_max
        self.stats.counts["averaged"] += noisy  # type: ignore[assignment]  # on the device too
        for block, window in zip(self.blocks, windows, strict=True):
            torch.where(noisy.to(block.device), block.iterate, window.newest, out=block.iterate)
        self._write([block.iterate for block in self.blocks])

    # --------------------------------------------------------------------------------------------- lifecycle

    def reset_history(self) -> None:
        """Forget pairs, averages, a pending jump and a cycle under way; the weights stay."""
        self.cancel()
        self._forget_pairs()

    def _forget_pairs(self) -> None:
        self.pairs_since_jump = 0
        for block in self.blocks:
            block.reset()
        self.stats.counts["restarts"] += 1

    def cancel(self) -> None:
        """Drop what does not survive weights that come from elsewhere."""
        if self.pending:
            record = replace(self.pending.record, cause="outside_write")
            self._conclude(Decision(False, record.cause), lambda: record)
        self.pending = None
        self.pair_steps = 0
        for block in self.blocks:
            if block.window:
                block.window.clear()

    def _watch(self) -> None:
        """Remember the parameters' versions while something depends on nobody else writing to them."""
        open_cycle = self._cyclic and self.pair_steps
        self._versions = self._version() if self.pending or self._averages or open_cycle else None

    def _version(self) -> int:
        return sum(p._version for block in self.blocks for p in block.params)

    def _look_around(self) -> None:
        """Before a step: has anybody written to the parameters, or given them gradients we cannot read?"""
        if self.waiting is None:
            refuse_sparse(p for _, p in accelerated(self.base.param_groups))
            checkpoint.stand_still(self)
        if self._versions is not None and self._versions != self._version():
            self.cancel()
        if not self._cyclic:
            self.pair_steps = 0

    def ensure_blocks(self) -> None:
        """(Re)build the blocks when parameters came, went, were frozen, moved, or got another state from outside.

        Histories of the same parameters are taken along; otherwise they start anew.
        """
        seen = look(self.base.param_groups)
        if seen == self._seen and (self.waiting is None or checkpoint.in_place(self)):
            return
        self._seen = seen
        known, now = self._layout, Layout.of(self.base.param_groups)
        if now == known and (self.waiting is None or checkpoint.in_place(self)):
            self._refresh()
            return
        if known is not None and now.members == known.members and now.places != known.places:
            self.publish()
        elif known is not None:
            self.reset_history()
            checkpoint.withdraw(self.base)
        self.blocks = build_blocks(
            self.base.param_groups,
            history_size=self.options.history_size,
            window=self.options.window_rows,
            criterion=self.options.average_criterion,
        )
        checkpoint.adopt(self)
        self._layout, self.waiting = now, None
        self.stats.history_bytes = sum(block.bytes for block in self.blocks)

    def start_over(self) -> None:
        """Begin again with what the base's state holds, after a checkpoint was loaded into it."""
        kept = self.hooks, self.enabled
        self.__init__(self.base, self.options)  # type: ignore[misc]
        self.hooks, self.enabled = kept
        self.begin()

    def begin(self) -> None:
        """Before the first step: take over what the base's state holds of ours, and be part of it at once if there
        is any state (Adagrad makes it when it is built), since tools look there for the names to load."""
        if self.base.state:
            self.ensure_blocks()
            self.publish()
            self.waiting = None

    def take_loss_fn(self) -> LossFn | None:
        """The function given ahead of the step, once."""
        loss_fn, self.next_loss_fn = self.next_loss_fn, None
        return loss_fn

    def publish(self, stepped: bool = False) -> None:
        """Bring the entries in the base's state up to date; ``stepped``: the base has just made a step."""
        if self.options.safeguard == "residual" and not self.pending:
            self.snapshot.take(self.base)
        self.waiting = checkpoint.publish(self, stepped)

    def _show(self) -> None:
        """Make the memory part of the base's state as soon as the base has made its own."""
        if self.waiting is None or any(p.grad is not None for p in self.waiting):
            self.ensure_blocks()
            self.publish(stepped=True)


def _describe(problem: joint.Problem, step: int, cause: str, length: float = 0.0) -> Acceleration:
    return Acceleration(
        step=step,
        residual_norm=problem.residual_norm,
        predicted_residual_norm=problem.predicted_residual_norm,
        rank=problem.solution.rank,
        history_len=len(problem.gram),
        coefficient_norm=hypot(*problem.solution.values),
        step_ratio=length and length / problem.residual_norm,
        cause=cause,
        gram=problem.gram,
    )
