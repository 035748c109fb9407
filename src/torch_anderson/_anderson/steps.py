"""The algorithm for steps: one base step evaluates a fixed-point map, whose residuals determine where to jump.

p   period            base steps between two accelerations
q   store_period      base steps between two stored pairs
m   history_size      largest number of columns of the least-squares problem
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import hypot
from typing import Any

import torch
from torch import Tensor

from .._calls import BaseStep
from .._driver import logger
from .._records import JumpRecord
from .._tensors.blocks import Vector
from .._tensors.checkpoint import Entries
from .._tensors.evaluate import LossFn, evaluate
from .._tensors.members import all_parameters
from .gram import Problem
from .residual import largest_entry
from .safeguard import judge, reason_to_skip
from .step_memory import StepMemory
from .trial import group_values

NO_LOSS = "Anderson makes plain steps: safeguard='loss' needs step(loss_fn=...) or set_batch(loss_fn=...)."


class StepDriver(StepMemory):
    """The paper's algorithm."""

    # ------------------------------------------------------------------------------------------------ the algorithm

    def step(self, base_step: BaseStep) -> Any:
        """Make one base step, then store, jump and average as due."""
        if not self.k:
            self.space.note_gradients()  # refuses sparse ones, even if nothing is measured yet
        self.notice_outside_writes()
        k = self.k + 1
        measures = bool(self.space.blocks) and self.measures(k)
        if measures:
            self.residual.begin()
        groups = group_values(self.base) if self.trial.record else []
        version = self.space.version()
        loss, loss_fn = base_step()
        if not (self.residual.end() if measures else self.acted(version)):
            self.watch()
            return loss
        self.k = k
        if measures:
            self.residual.note_rates()
        if self.trial.record and not self.settle(groups):
            return loss
        residual = self.residual.difference() if measures else []
        residual_max = largest_entry(residual) if self.window and measures else None
        outcome = "plain"
        if measures and self.stores(k):
            self.store(residual)
            if k % self.options.period == 0:
                outcome = self.accelerate(loss_fn)
        if residual_max is not None and outcome != "pending":
            self.average(residual_max, restart=outcome == "accepted" and self.options.period > 1)
        self.watch()
        return loss

    def measures(self, k: int) -> bool:
        """Whether the weights before base step k have to be kept."""
        return self.options.average is not None or self.trial.record is not None or self.stores(k)

    def stores(self, k: int) -> bool:
        """Whether the pair of base step k is stored."""
        o = self.options
        return bool(k > o.warmup and (k % o.store_period == 0 or k % o.period == 0))

    def store(self, residual: Vector) -> None:
        """Add the pair to the history; it starts anew where residuals cannot be compared with the stored ones."""
        pair = self.residual
        if not pair.comparable:
            self.forget()
        pair.point = self.history.store(pair.point, residual, pair.rate)
        pair.comparable = True

    # ------------------------------------------------------------------------------------------------------- jumps

    def accelerate(self, loss_fn: LossFn | None) -> str:
        """Solve the small problem and jump if all tests are passed; returns accepted, rejected, skipped or pending."""
        if self.history.pairs < 2:
            return self.skipped("short_history")
        problem = self.gram.update(self.history, self.space.ranks, self.options.regularization)
        if not problem.finite:
            self.reset_history()
            return self.skipped("nonfinite")
        if self.options.safeguard == "loss" and loss_fn is None:
            self.tell_once(NO_LOSS)
            return self.skipped("no_loss", problem)
        if cause := reason_to_skip(problem):
            return self.skipped(cause, problem)
        jump = problem.jump(self.options.relaxation)
        cause = judge(problem, jump, self.options.max_jump)
        if not cause:
            self.history.subtract(jump.weights, self.residual.point)
            cause = self.go(loss_fn)
        self.stats.counts["attempted"] += 1
        describe = partial(describe_jump, problem, self.k, cause, jump.length)
        if not cause and self.options.safeguard == "residual":
            self.trial.begin(self.base, problem.residual_norm / problem.rates[-1], describe())
            return "pending"
        return self.concluded(cause, describe)

    def go(self, loss_fn: LossFn | None) -> str:
        """Set the weights to the candidate; go back if the loss is asked for and not lower there."""
        candidate = self.residual.point
        if self.options.safeguard != "loss" or loss_fn is None:
            self.space.write(candidate)
            return ""
        params = all_parameters(self.base.param_groups)
        plain = [[view.clone() for view in block.held()] for block in self.space.blocks]  # going back takes no message
        cause = "loss"
        before = evaluate(loss_fn, params)
        self.space.refresh()  # a forward pass may swap memory
        self.space.write(candidate)
        try:
            losses = torch.tensor([before, evaluate(loss_fn, params)], dtype=torch.float64)
            at_plain_point, at_candidate = self.space.ranks.mean(losses).tolist()
            cause = "" if at_candidate < at_plain_point else "loss"
        finally:
            if cause:
                self.space.refresh()
                for block, values in zip(self.space.blocks, plain, strict=True):
                    torch._foreach_copy_(block.held(), values)
        self.stats.counts["extra_evaluations"] += 2
        return cause

    def settle(self, groups: list[dict[str, Any]]) -> bool:
        """Decide on the pending jump, now that the residual after it is known; False takes the step back."""
        passes = self.trial.test.passes(self.residual, self.space.ranks, self.disturbed)
        if passes is None:
            self.cancel()
            return True
        record, cause = self.trial.end(), "" if passes else "residual"
        if self.window:
            point = self.residual.start if passes else self.history.last_point
            self.window.push(point, restart=passes and self.options.period > 1)
        if not passes:
            self.go_back(groups)
        self.concluded(cause, partial(replace, record, cause=cause))
        return passes

    def go_back(self, groups: list[dict[str, Any]]) -> None:
        """Return weights and base to where they were before the jump."""
        self.space.write(self.history.last_point, everything=True)
        self.trial.take_back(self.base, groups)
        self.watch()

    @property
    def pending(self) -> bool:
        """Whether a jump waits for its residual."""
        return self.trial.record is not None

    def take_back(self) -> None:
        """Refuse a pending jump whose gradient is of no use."""
        if self._version == self.space.version():
            record = self.trial.end()
            self.go_back(group_values(self.base))
            self.concluded("residual", partial(replace, record, cause="residual"))

    def skipped(self, cause: str, problem: Problem | None = None) -> str:
        """Count and report an acceleration that was not attempted."""
        self.stats.counts[f"skipped_{cause}"] += 1
        if problem is not None:
            self.report(partial(describe_jump, problem, self.k, cause))
        return "skipped"

    def concluded(self, cause: str, describe: Callable[[], JumpRecord]) -> str:
        """Count and report the end of an attempt."""
        self.stats.counts[f"rejected_{cause}" if cause else "accepted"] += 1
        self.report(describe)
        return "rejected" if cause else "accepted"

    def report(self, describe: Callable[[], JumpRecord]) -> None:
        """Note a record; without hooks it is made on demand."""
        self.stats.describe = describe
        if self.hooks or logger.isEnabledFor(logging.DEBUG):
            self.publish()

    def average(self, residual_max: Tensor, restart: bool) -> None:
        """Replace the weights by the window's mean if it is full and noisy."""
        assert self.window is not None
        self.window.push(None, restart)
        noisy = self.window.average(residual_max, out=self.residual.start)
        if noisy is not None:
            self.stats.counts["averaged"] += noisy  # type: ignore[assignment]  # on the device, so that no step waits
            self.space.write(self.residual.start)

    # ---------------------------------------------------------------------------------------------- outside writes

    def watch(self) -> None:
        """Remember the parameters' versions while writes of other code would invalidate a jump or the window."""
        if self.trial.record or self.window:
            self._version = self.space.version()
        else:
            self._version = None

    def idle(self, base_step: BaseStep) -> Any:
        """Go on with what is under way: a step at rate 0 writes to the weights, but does not move them."""
        self.notice_outside_writes()
        loss = super().idle(base_step)
        self.watch()
        return loss

    def notice_outside_writes(self) -> None:
        """Drop a pending jump and the window if other code has written to the weights.

        Other ranks, which may not have detected it, are informed with the next message.
        """
        if self._version is None or self._version == self.space.version():
            return
        if self.space.ranks.size == 1:
            self.cancel()
        elif self.trial.record:
            self.disturbed = True
        elif self.window:
            self.window.stale = self.window.length

    def cancel(self) -> None:
        """Drop a pending jump and the averages."""
        if self.trial.record:
            self.concluded("outside_write", partial(replace, self.trial.end(), cause="outside_write"))
        self.disturbed = False
        if self.window:
            self.window.clear()

    # ---------------------------------------------------------------------------------------------- in and out

    def entries(self, only: Tensor | None = None) -> dict[Tensor, Entries]:
        """What a checkpoint holds; what depends on weights that other code has overwritten is not saved."""
        self.notice_outside_writes()
        return super().entries(only)


def describe_jump(problem: Problem, step: int, cause: str, length: float = 0.0) -> JumpRecord:
    """The record of one acceleration."""
    return JumpRecord(
        step=step,
        residual_norm=problem.residual_norm,
        predicted_residual_norm=problem.residual_norm * problem.gain,
        rank=problem.solution.rank,
        history_len=len(problem.gram),
        coefficient_norm=hypot(*problem.solution.values),
        step_ratio=length and length / problem.residual_norm,
        cause=cause,
        gram=problem.gram,
    )
