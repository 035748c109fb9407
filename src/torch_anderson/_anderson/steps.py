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
from math import hypot, sqrt
from typing import Any

import torch
from torch import Tensor

from .._calls import BaseStep, JumpRefused
from .._driver import logger
from .._records import JumpRecord
from .._tensors.blocks import Vector
from .._tensors.checkpoint import Entries
from .._tensors.evaluate import LossFn, evaluate
from .._tensors.members import all_parameters
from .gram import Problem
from .jump_ends import FARTHEST
from .residual import Reading, largest_entry
from .safeguard import judge, reason_to_skip
from .step_memory import StepMemory
from .trial import group_values

NO_LOSS = "Anderson makes plain steps: safeguard='loss' needs step(loss_fn=...) or set_batch(loss_fn=...)."

FIRST_REST, LONGEST_REST = 4, 128
"""Base steps without a jump after one that a gradient has refused: twice as many each time, and a quarter of them
after one that was accepted. With at most 30, SGD with momentum on 25 weights, where all are refused, ended at 1.07 of
its loss alone."""

LONGEST_JUMP = 2.0
"""Longest jump on which a gradient decides, in lengths of the path through the stored points. Longer ones are
shortened: the weights are at their end until they are refused, where other code may read them."""


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
        groups = group_values(self.base) if self.trial.by_residual else []
        version = self.space.version()
        reads = measures and self.slopes and (self.pending or self.may_jump(k))
        try:
            loss, loss_fn = base_step(self.measure) if reads else base_step()
        except JumpRefused as refused:
            self.watch()
            return refused.loss
        if not (self.residual.end() if measures else self.acted(version)):
            self.watch()
            return loss
        self.k = k
        if measures:
            self.residual.note_rates()
        if self.trial.by_residual and not self.settle(groups):
            return loss
        residual = self.residual.difference() if measures else []
        residual_max = largest_entry(residual) if self.window and measures else None
        outcome = "plain"
        if measures and self.stores(k):
            self.store(residual)
            if self.may_jump(k):
                outcome = self.accelerate(loss_fn)
        self.wait = max(self.wait - 1, 0)
        if residual_max is not None and not self.trial.by_residual:
            self.average(residual_max, restart=outcome in ("accepted", "pending") and self.options.period > 1)
        self.watch()
        return loss

    def measures(self, k: int) -> bool:
        """Whether the weights before base step k have to be kept."""
        return self.options.average is not None or self.pending or self.stores(k)

    def stores(self, k: int) -> bool:
        """Whether the pair of base step k is stored."""
        o = self.options
        return bool(k > o.warmup and (k % o.store_period == 0 or k % o.period == 0))

    def may_jump(self, k: int) -> bool:
        """Whether the weights may jump after base step k."""
        return k > self.options.warmup and k % self.options.period == 0 and not self.wait

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
        if self.by_gradient and jump.length > LONGEST_JUMP * problem.path:
            jump = problem.shortened(jump, LONGEST_JUMP * problem.path)
        cause = judge(problem, jump, self.options.max_jump)
        if not cause:
            self.history.subtract(jump.weights, self.residual.point)
            if self.by_gradient and not self.slopes.descends(self.residual.point):  # type: ignore[union-attr]
                return self.skipped("no_descent", problem)
            overflows = self.space.overflows(self.residual.point, jump.length)
            cause = "nonfinite" if overflows else self.go(loss_fn)
        self.stats.counts["attempted"] += 1
        describe = partial(describe_jump, problem, self.k, cause, jump.length)
        if cause or not self.ends:
            return self.concluded(cause, describe)
        for plain, point in zip(self.ends.plain, self.history.last_point, strict=True):
            plain.copy_(point)
        self.space.read(self.ends.candidate)
        if self.by_gradient:
            self.trial.begin(describe())
        else:
            self.trial.begin(describe(), self.base, problem.residual_norm / problem.rates[-1])
        return "pending"

    @property
    def by_gradient(self) -> bool:
        """Whether the next gradient decides on jumps; if not, where there is a test, the next residual."""
        return self.slopes is not None and self.slopes.usable

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

    @torch.no_grad()
    def measure(self) -> bool:
        """Read the gradient before the base sees it; False if it refuses the jump that led here."""
        assert self.slopes is not None
        reading = self.slopes.read(self.residual.start)
        if self.trial.by_gradient and reading is not Reading.NO_GRADIENT:
            assert self.trial.record is not None
            comparable = reading is Reading.COMPARABLE
            known = self.trial.record.length + self.gram.path(self.history.newest_first)
            cause = self.slopes.judge(self.residual.start, known) if comparable else "gradient"
            if cause == "outside_write":
                self.reset_history()
            elif not cause:
                self.rest //= 4
                self.conclude_trial("")
            else:
                self.rest = min(max(2 * self.rest, FIRST_REST), LONGEST_REST)
                self.wait = self.rest
                if not self.go_back("gradient"):
                    return False
                self.space.read(self.residual.start)  # which has served as workspace
        self.slopes.keep()
        return True

    def settle(self, groups: list[dict[str, Any]]) -> bool:
        """Decide on the pending jump by the paper's test: the residual must be smaller; False takes the step back."""
        norm_sq = self.residual.norm_sq()
        if self.space.ranks.size > 1:
            norm_sq = float(self.space.ranks.sum(torch.tensor(norm_sq, dtype=torch.float64)))
        passes = sqrt(norm_sq) / (self.residual.rate or 1.0) < self.trial.norm
        if self.window:
            point = self.residual.start if passes else self.history.last_point
            self.window.push(point, restart=passes and self.options.period > 1)
        if passes:
            self.conclude_trial("")
        else:
            self.go_back("residual", groups)
            self.watch()
        return passes

    def go_back(self, cause: str, groups: list[dict[str, Any]] | None = None) -> bool:
        """Refuse the pending jump: return to the plain point, with what other code has written to the weights since.

        With ``groups``, the base returns to where it was before the jump. If other weights were loaded, they stay, and
        the history restarts. Returns whether they stay.
        """
        assert self.ends is not None
        stays = not self.ends.separate_writes(self.residual.start) <= FARTHEST
        if stays:
            self.reset_history()
        else:
            self.space.write(self.ends.plain, everything=True)
            if groups is not None:
                self.trial.take_back(self.base, groups)
            elif self.window and self.window.count:
                self.window.replace_newest(self.history.last_point)
        if self.pending:
            self.conclude_trial(cause)
        return stays

    def conclude_trial(self, cause: str) -> None:
        """Count and report the end of a pending jump."""
        self.concluded(cause, partial(replace, self.trial.end(), cause=cause))

    @property
    def pending(self) -> bool:
        """Whether a jump waits for its test."""
        return self.trial.record is not None

    def take_back(self) -> None:
        """Refuse a pending jump whose gradient is of no use."""
        self.space.read(self.residual.start)
        if self.trial.by_residual:
            self.go_back("residual", group_values(self.base))
        else:
            self.go_back("gradient")
        self.watch()

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
        """Replace the weights by the window's mean if it is full and noisy, and both ends of a pending jump."""
        assert self.window is not None
        self.window.push(None, restart)
        mean = self.residual.start
        noisy = self.window.average(residual_max, out=mean)
        if noisy is None:
            return
        self.stats.counts["averaged"] += noisy  # type: ignore[assignment]  # on the device, so that no step waits
        self.space.write(mean)
        if self.ends and self.pending:
            for plain, newest, part in zip(self.ends.plain, self.window.newest, mean, strict=True):
                without_jump = part - (newest - plain) / self.window.length
                plain.copy_(torch.where(noisy.to(plain.device), without_jump, plain))
            self.space.read(self.ends.candidate)

    # ---------------------------------------------------------------------------------------------- outside writes

    def watch(self) -> None:
        """Remember the parameters' versions while writes of other code would invalidate the window."""
        self._version = self.space.version() if self.window else None

    def idle(self, base_step: BaseStep) -> Any:
        """Go on with what is under way: a step at rate 0 writes to the weights, but does not move them."""
        self.notice_outside_writes()
        loss = super().idle(base_step)
        self.watch()
        return loss

    def notice_outside_writes(self) -> None:
        """Drop the window if other code has written to the weights: an average would undo a part of that.

        Other ranks, which may not have detected it, are informed with the next message.
        """
        if not self.window or self._version is None or self._version == self.space.version():
            return
        if self.space.ranks.size == 1:
            self.window.clear()
        else:
            self.window.stale = self.window.length

    def cancel(self) -> None:
        """Let a pending jump stay, undecided, and drop the averages."""
        if self.pending:
            self.conclude_trial("outside_write")
        if self.window:
            self.window.clear()

    # ---------------------------------------------------------------------------------------------- in and out

    def entries(self, only: Tensor | None = None) -> dict[Tensor, Entries]:
        """What a checkpoint holds; averages of weights that other code has overwritten are not saved."""
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
