"""The residual drives: parameters -> history -> least squares -> extrapolation -> safeguard, in every step."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import hypot, inf, nan, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import base_state, joint
from .averaging import largest
from .driver import Batch, Driver
from .evaluation import LossFn, evaluate
from .history import full_precision
from .layout import refuse_sparse
from .least_squares import System
from .options import Options
from .parameters import Block, build_blocks, fitted
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
from .stats import COUNTS, Acceleration, Pending

NO_LOSS = "Anderson makes plain steps: safeguard='loss' wants step(loss_fn=...) or set_batch(loss_fn=...)."


class ResidualDriver(Driver[Block]):
    """The paper's: one base step is an evaluation of a fixed-point map, whose residuals tell where to jump."""

    def __init__(self, base: Optimizer, options: Options):
        super().__init__(base, fitted(options, base.param_groups))
        self.pair_steps = 0  # base steps in the cycle under way
        self.pairs_since_jump = 0
        self.pending: Pending | None = None
        self._disturbed = False  # whether somebody else has written to the parameters, and other ranks may not know
        self._stale = 0  # points until windows hold none from before that
        self.snapshot = base_state.Snapshot()
        self._path_sq = [0.0] * self.options.history_size  # for a checkpoint
        self._versions: int | None = None
        self._proportional = not isinstance(base, base_state.NOT_PROPORTIONAL)
        self._cyclic = options.residual == "cycle"
        self._averages = options.average_window > 0 and not self._cyclic
        self._cycle_mean = options.average_window > 1 and self._cyclic
        self.points = ("last_map", "iterate") if self._cyclic else ("last_map", "iterate", "window")

    # ------------------------------------------------------------------------------------------ the algorithm

    def accelerated_step(self, closure: Callable[[], Any] | None, batch: Batch) -> Any:
        """One base step, then what Anderson acceleration makes of it."""
        k = self.k + 1
        measured = self._begins_pair(k) and self._keep_iterates()
        group_values = base_state.group_values(self.base) if self.pending else []
        loss, batch = self.base_step(closure, batch)
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
        jumped = stores and k % self.options.period == 0 and self._extrapolate(batch.loss_fn)
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

    def _idle_step(self, closure: Callable[[], Any] | None) -> Any:
        loss = super()._idle_step(closure)
        self._watch()
        return loss

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

    def _residual_max(self, stored: bool) -> Tensor:
        return largest([block.residual_max(stored) for block in self.blocks])

    def _store(self) -> None:
        """Add the pair (iterate, residual) to the history."""
        self._restart_if_rates_are_unlike()
        for block in self.blocks:
            if self._disturbed:
                block.iterate.fill_(nan)  # the sum over ranks tells all of them to start anew
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
                self._forget()

    def _learning_rate(self, block: Block) -> float:
        return base_state.learning_rate(self.base.param_groups[block.group])

    # ------------------------------------------------------------------------------------------ extrapolation

    def _extrapolate(self, loss_fn: LossFn | None) -> bool:
        """Jump to the accelerated weights if they pass; True if that is final."""
        if self.blocks[0].history.pairs < 2:
            return self._skip("short_history")
        problem = joint.assemble(self.blocks, self.options, self.ranks)
        if problem is None:
            self.reset_history()
            return self._skip("nonfinite")
        if cause := self._reason_to_skip(problem, loss_fn):
            return self._skip(cause, partial(_describe, problem, self.k, cause))
        length, descent = joint.form_candidates(self.blocks, problem, self.options, self.ranks)
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
            self.tell_once(NO_LOSS, logging.WARNING)
            return "no_loss"
        cautious = self.options.safeguard == "descent"
        wary = cautious and not self._cyclic  # the noise of cycles is met by their regularization
        if wary and is_noise(problem.gram, self.pairs_since_jump - 1):  # first, as it needs no solution
            return "noisy"
        n = sum(block.total for block in self.blocks)
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
        plain = [block.present() for block in self.blocks]  # going back takes no message
        before = evaluate(loss_fn, params)
        self._refresh()  # so may a forward pass
        self._write([block.iterate for block in self.blocks])
        decision = Decision(False)
        try:
            losses = torch.tensor([before, evaluate(loss_fn, params)], dtype=torch.float64)
            decision = loss_test(*self.ranks.mean(losses).tolist())
        finally:
            if not decision.accepted:
                self._refresh()
                for block, values in zip(self.blocks, plain, strict=True):
                    block.put_back(values)
        self.stats.counts["extra_evaluations"] += 2
        return decision

    # --------------------------------------------------------------------------------------------- decisions

    def _settle(self, pending: Pending, group_values: list[dict[str, Any]]) -> bool:
        """Decide on the pending jump, now that the residual after it is known; False takes the step back."""
        own = [sum(block.normalized_residual_sq() for block in self.blocks), float(self._disturbed)]
        norm_sq, disturbed = self.ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        if disturbed:
            self.cancel()
            return True
        self.pending = None
        decision = residual_test(pending.norm, sqrt(norm_sq))
        if self._averages:
            points = [block.iterate if decision.accepted else block.history.last_map for block in self.blocks]
            self._push(points, restart=decision.accepted and self.options.period > 1)
        if not decision.accepted:
            self._write([block.history.last_map for block in self.blocks], everything=True)
            self.snapshot.restore(self.base)
            base_state.restore_group_values(self.base, group_values)
            self.waiting = None  # restored parameters may be without state again
            self._watch()
        self._conclude(decision, partial(replace, pending.record, cause=decision.cause))
        return decision.accepted

    def _conclude(self, decision: Decision, describe: Callable[[], Acceleration]) -> None:
        if decision.accepted:
            self.pairs_since_jump = 0
        super()._conclude(decision, describe)

    # --------------------------------------------------------------------------------------- moving average

    def _push(self, points: list[Tensor] | None, restart: bool) -> None:
        """Add points (the present weights if None) to the windows."""
        self._stale = max(self._stale - 1, 0)
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
        if self._shares_windows:
            noise = torch.full_like(noise, nan) if self._stale else noise  # no rank averages then
            noise, residual_max = self.ranks.largest(torch.stack([noise, residual_max]))
        noisy = noise > self.options.average_tolerance * residual_max
        self.stats.counts["averaged"] += noisy  # type: ignore[assignment]  # on the device too
        for block, window in zip(self.blocks, windows, strict=True):
            torch.where(noisy.to(block.device), block.iterate, window.newest, out=block.iterate)
        self._write([block.iterate for block in self.blocks])

    # --------------------------------------------------------------------------------------------- lifecycle

    def build_blocks(self) -> list[Block]:
        """Without a pair."""
        o = self.options
        return build_blocks(
            self.base.param_groups,
            Block,
            self.ranks,
            self.storage.shard,
            history_size=o.history_size,
            window=o.window_rows,
            criterion=o.average_criterion,
            storage=self.storage,
        )

    def cancel(self) -> None:
        """A pending jump, a cycle under way and the averages do not survive weights that come from elsewhere."""
        if self.pending:
            record = replace(self.pending.record, cause="outside_write")
            self._conclude(Decision(False, record.cause), lambda: record)
        self.pending = None
        self._disturbed, self._stale = False, 0
        self.pair_steps = 0
        for block in self.blocks:
            if block.window:
                block.window.clear()

    def _forget(self) -> None:
        self.pairs_since_jump = 0
        super()._forget()

    def _watch(self) -> None:
        """Remember the parameters' versions while something depends on nobody else writing to them."""
        open_cycle = self._cyclic and self.pair_steps
        self._versions = self._version() if self.pending or self._averages or open_cycle else None

    def _version(self) -> int:
        return sum(p._version for block in self.blocks for p in block.params)

    def _look_around(self) -> None:
        """Has anybody else written to the parameters?"""
        super()._look_around()
        if self._versions is not None and self._versions != self._version():
            self._on_outside_write()
        if not self._cyclic:
            self.pair_steps = 0

    def _on_outside_write(self) -> None:
        """End what depends on the weights; if other ranks wait for us, who may not have seen it, when they hear of it.

        Averages that are not shared are nobody else's business: ranks have to write alike.
        """
        if self.ranks.size > 1 and (self.pending or (self._cyclic and self.pair_steps)):
            self._disturbed = True
        elif self._shares_windows:
            self._stale = self.options.average_window
        else:
            self.cancel()

    @property
    def _shares_windows(self) -> bool:
        """Whether ranks decide on averages together, each by its own columns."""
        return self.ranks.size > 1 and any(block.sharded for block in self.blocks)

    def publish(self, stepped: bool = False) -> None:
        """With the base's own state, if a jump may have to be taken back."""
        if self.blocks and not stepped:  # within a step it could take a message that other ranks do not send
            self._path_sq = joint.path_sq(self.blocks, self.ranks)
        if self.options.safeguard == "residual" and not self.pending:
            self.snapshot.take(self.base)
        super().publish(stepped)

    def base_entries(self, param: Tensor) -> dict[str, Any]:
        """What the base returns to if the pending jump fails."""
        return self.snapshot.state.get(param, {})

    def take_base_entries(self, param: Tensor, saved: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.snapshot.state[param] = saved

    def numbers(self, block: Block) -> list[float]:
        """Progress, the pending record, counters, learning rates, the path and the small system of the group."""
        progress = [self.options.cycle_length, self.k, self.pair_steps, self.pairs_since_jump]
        counts = [float(self.stats.counts[name]) for name in COUNTS]
        system = System.sum([other.system for other in self._group_of(block)])
        small = [*self._path_sq, *system.numbers(self.options.history_size)]
        return [*progress, *Pending.as_numbers(self.pending), *counts, *block.numbers(), *small]

    def set_numbers(self, block: Block, numbers: Sequence[float]) -> None:
        """From a checkpoint."""
        rest = iter(numbers)
        _, self.k, self.pair_steps, self.pairs_since_jump = (int(x) for x in islice(rest, 4))
        pending = Pending.from_numbers(list(islice(rest, Pending.LENGTH)))
        self.pending = pending if self.options.safeguard == "residual" else None
        self.stats.set_counts(islice(rest, len(COUNTS)))
        block.set_numbers(rest)
        path_sq, system = list(islice(rest, self.options.history_size)), System.from_numbers(rest)
        # These are sums over blocks, which may have been others: the first that comes has them all.
        if not any(other.history.path_sq.any() for other in self.blocks):
            joint.set_path_sq(block, path_sq, self.ranks)
        block.system = system.empty() if any(other.system.rhs for other in self._group_of(block)) else system

    def _group_of(self, block: Block) -> list[Block]:
        return [other for other in self.blocks if other.group == block.group]


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
