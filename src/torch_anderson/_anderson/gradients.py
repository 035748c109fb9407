"""The algorithm for gradients: every gradient, with the weights it was computed at, tells where to jump.

1. Read the weights and the gradient before the base sees it, and add the pair to the history.
2. If a jump led here, this gradient decides on it: it stays, and the base's momentum is zeroed; or it becomes shorter,
   or is subtracted from the weights, and the base makes no step. What other code has written to the weights since the
   jump is never undone.
3. Make the base's step; its end is the plain point, to which a refused jump returns.
4. Jump from the weights of the gradient, not from the end of the base's step, to where the pairs say that the gradient
   vanishes (``secants``).

Nothing is evaluated besides the gradients that training computes anyway. While gradients are noisy, or jumps are
refused too often, it rests: for a number of steps nothing is read, stored or computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import hypot, inf
from typing import Any

import torch
from torch import Tensor

from .._calls import BaseStep, JumpRefused
from .._driver import logger
from .._ranks.placement import is_dtensor, local_part
from .._records import JumpRecord
from .gradient_memory import BRIEF_LOOK, FIRST_REST, LONGEST_PAUSE, LONGEST_REST, LOOK, GradientMemory
from .jump_ends import FARTHEST
from .noise import CERTAIN, PROBATION, has_changed, is_late_noise, is_noise
from .residual import WHY_PLAIN, Reading
from .secants import COARSE_RIDGE, RIDGE, Proposal, Secants
from .slopes import LOADED, passes

RETRIES = 6
"""Most times that a refused jump is shortened before the weights return to the plain point, which may be where the base
alone is unstable. Before many jumps were accepted, ``TOO_MANY`` ends it after one or two."""
SHORTEST, LONGEST = 0.1, 0.5
"""Limits of the part of a refused jump that is tried next."""
SLIGHT = 0.1
"""Length of what other code has written to the weights of a refused jump, in units of the jump, up to which the jump is
shortened. After longer ones, as constraints make them, shortened jumps did harm (least squares on a sphere)."""
GROWTH = 4.0
"""A jump may be this many times as long as the last accepted one."""
MEMORY, TOO_MANY = 0.8, 0.4
"""Memory of the moving average of refusals, and the average above which the driver rests."""
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
"""Names of first moments in the state of torch's optimizers."""
CALM = 0.1
"""Average of refusals below which the next rest is short again."""
LONGER = 4
"""A rest after the function has changed is this many times as long as the last of its kind: it will change again."""


class GradientDriver(GradientMemory):
    """Quasi-Newton jumps between the steps of any base, decided by the next gradient."""

    # ------------------------------------------------------------------------------------------------ the algorithm

    def step(self, base_step: BaseStep) -> Any:
        """Make one base step, then jump; or undo or shorten the last jump, which replaces the step.

        ``base_step`` calls ``measure`` once, when the gradient is there and before the base sees it: at once, or after
        the first call of the closure. Where ``measure`` returns False, the base makes no step, and ``JumpRefused`` is
        raised.
        """
        if self.resting:
            self.count_rest()
            return base_step()[0]
        self.secants = None  # some bases do not call their closure at every step
        try:
            loss, _ = base_step(self.measure)
        except JumpRefused as refused:
            return refused.loss
        if self.secants is not None:
            self.jump(self.secants)
        return loss

    @torch.no_grad()  # gradients may carry a graph, and closures enable it
    def measure(self) -> bool:
        """Take in the gradient before the base sees it; False if it refuses the jump that led here.

        A pending jump is also refused where gradients can no longer be compared.
        """
        if not self.space.blocks:
            return True
        state, history = self.state, self.history
        reading = self.residual.read(self.point, self.gradient)
        if reading is Reading.NO_GRADIENT:
            return True
        if reading is not Reading.COMPARABLE and state.pending:
            self.take_back()
            self.forget()
            return False
        if reading is Reading.NOT_COMPARABLE:
            self.forget()
        elif reading in WHY_PLAIN:
            self.tell_once(WHY_PLAIN[reading].format(name=type(self.base).__name__))
            return True
        self.point = history.store(self.point, self.gradient)
        state.k += 1
        state.look = max(state.look - 1, 0)
        if state.look or history.pairs < 2:
            return True
        self.gram.take_in(history, self.space.ranks)
        secants = Secants(self.gram.matrix, history.newest_first, RIDGE if history.fine else COARSE_RIDGE)
        if state.pending and not self.settle(secants):
            return False
        if not history.pairs or not secants.finite:
            self.forget()
        elif state.k % self.options.period == 0:
            self.secants = secants
        return True

    # ------------------------------------------------------------------------------------------------------- jumps

    @torch.no_grad()
    def jump(self, secants: Secants) -> None:
        """Jump to the minimum that the pairs predict, unless they are noise or give no descent direction."""
        state = self.state
        if secants.gradient_norm == 0:
            self.skip("converged", secants)
        elif state.proven < PROBATION and is_noise(state, secants):
            self.skip("noisy", secants)
            state.noisy = state.proven == 0 and not state.smooth and state.rest > FIRST_REST
            self.rest()
        elif state.noisy and self.history.pairs <= CERTAIN:
            state.look = CERTAIN + 1 - self.history.pairs
        elif (proposal := secants.propose(state.radius)) is None:
            self.skip("no_descent", secants)
        else:
            self.go(secants, proposal)

    def go(self, secants: Secants, proposal: Proposal) -> None:
        """Set the weights to the end of the jump; the plain point is kept until it is decided."""
        state, norm, fitted = self.state, secants.gradient_norm, proposal.fitted
        state.length, state.descent, state.norm, state.reach = proposal.length, proposal.descent, norm, -1.0
        self.space.refresh()  # the base may have given the parameters other memory
        self.space.read(self.ends.plain)
        coefficient_norm, ratio = hypot(*fitted.values), proposal.length / norm
        columns = fitted.rank, len(fitted.values)
        record = JumpRecord(state.k, norm, norm * proposal.gain, *columns, coefficient_norm, step_ratio=ratio)
        self.combine(proposal.weights)
        self.attempt(record)

    def combine(self, weights: list[float]) -> None:
        """Let ``point`` be the newest stored point minus the rows with these weights."""
        self.history.subtract(weights, self.point)
        self.residual.unscale(self.point)

    def attempt(self, record: JumpRecord, everything: bool = False) -> None:
        """Set the weights to ``point``; the next gradient decides on it."""
        self.stats.counts["attempted"] += 1
        self.record = record
        if self.space.overflows(self.point, self.state.length):
            self.state.radius = self.state.length / 2
            self.conclude("nonfinite")
            return
        self.space.write(self.point, everything)
        self.state.pending = True
        if self.options.safeguard is None:
            self.accept()
        else:
            self.space.read(self.ends.candidate)

    def settle(self, secants: Secants) -> bool:
        """Decide on the pending jump by the gradient at its end; False if it does not stay.

        The first gradient after a jump compares slopes along the displacement of the weights, with what other code has
        written to them; after that, along the jump. Where other weights were loaded, nothing is decided: they stay, and
        the history restarts.
        """
        state = self.state
        if secants.newest_length > LOADED * (secants.older_path + state.length / abs(state.reach)):
            self.cancel()
            self.forget()
            return True
        slope = state.reach * secants.along_newest
        descent = secants.before_along_newest if not state.tries else state.descent
        if passes(slope, descent, secants.gradient_norm, state.norm):
            self.accept()
            return True
        record, tries = self.record, state.tries
        written = self.separate_writes()
        self.refuse("gradient" if written <= FARTHEST else "outside_write")
        if not secants.finite:
            self.forget()
            return self.go_back(written)
        proven = state.proven >= PROBATION
        changed = tries > 0 and proven and has_changed(secants, tries + 1)
        hopeless = state.refusals > TOO_MANY and (not proven or is_late_noise(secants, tries + 1))
        if changed or hopeless or tries == RETRIES or written > SLIGHT:
            return self.go_back(written, changed)
        self.shorten(secants, slope, record, tries, written > 0)
        return False

    def refuse(self, cause: str = "gradient") -> None:
        """Count a jump that has failed its test."""
        self.state.refusals = MEMORY * self.state.refusals + 1 - MEMORY
        self.conclude(cause)

    @property
    def pending(self) -> bool:
        """Whether a jump waits for its gradient."""
        return self.state.pending

    def take_back(self) -> None:
        """Refuse a pending jump whose gradients are not finite, step after step, so that no step was made from it.

        The driver calls it when gradients are cleared (``gradients_cleared``).
        """
        self.refuse()
        self.go_back(self.separate_writes())

    def accept(self) -> None:
        """Let the jump stay."""
        state = self.state
        state.refusals *= MEMORY
        state.rest = FIRST_REST if state.refusals < CALM else state.rest
        state.radius = GROWTH * state.length
        state.proven += 1
        state.smooth = state.smooth or state.proven == PROBATION
        state.noisy = state.noisy and not state.smooth
        self.forget_momentum()
        self.conclude("")

    def forget_momentum(self) -> None:
        """Zero the base's first moments: they describe the steps that the jump replaces."""
        states = [self.base.state[p] for p in self.space.params if p in self.base.state]
        kept = [state.get(name) for state in states if isinstance(state, dict) for name in FIRST_MOMENTS]
        if moments := [local_part(x) if is_dtensor(x) else x for x in kept if isinstance(x, Tensor)]:
            torch._foreach_zero_(moments)

    def shorten(self, secants: Secants, slope: float, record: JumpRecord | None, tries: int, overwritten: bool) -> None:
        """Try a part of the refused jump: up to where a straight line through the slopes at both ends is 0.

        It begins at the weights of the gradient before it. If other code has written to the weights, that would undo
        a part of the write; then it begins at the plain point.
        """
        state = self.state
        part = min(max(state.descent / (state.descent + slope) if slope > 0 else 0.0, SHORTEST), LONGEST)
        if overwritten:
            for target, jump, plain in zip(self.point, self.ends.candidate, self.ends.plain, strict=True):
                target.copy_(plain).add_(jump, alpha=part)
        else:
            weights = [0.0] * len(secants.matrix)
            weights[secants.s(secants.slots[0])] = (1 - part) * state.reach
            self.combine(weights)
        state.reach = part / (1 - part)
        state.descent *= part
        state.length *= part
        state.radius = state.length
        state.tries = tries + 1
        assert record is not None
        self.attempt(replace(record, step_ratio=part * record.step_ratio), everything=True)

    def go_back(self, written: float, changed: bool = False) -> bool:
        """Return to the plain point; rest if too many jumps were refused, for long if the function has changed.

        ``written``: how far other code has moved the weights since, in units of the jump. Above ``FARTHEST``, other
        weights were loaded: they stay, and the history restarts. Returns whether they stay.
        """
        state = self.state
        stays = not written <= FARTHEST
        if stays:
            self.forget()
        else:
            self.space.write(self.ends.plain, everything=True)
        state.radius = state.length / 2
        if changed or state.refusals > TOO_MANY:
            self.rest()
        if changed:
            self.resting, state.smooth = state.pause, False
            state.pause = min(LONGER * state.pause, LONGEST_PAUSE)
        return stays

    def separate_writes(self) -> float:
        """Length of what other code has written since the jump, in units of the jump."""
        self.space.read(self.point)
        return self.ends.separate_writes(self.point)

    def rest(self) -> None:
        """Leave the next steps to the base, then look again."""
        state = self.state
        self.clear(zero=False)
        state.look = BRIEF_LOOK if state.noisy else LOOK
        self.resting, state.rest = state.rest, min(2 * state.rest, LONGEST_REST)
        state.refusals, state.radius = TOO_MANY / 2, inf

    # ---------------------------------------------------------------------------------------------- reporting

    def skip(self, cause: str, secants: Secants) -> None:
        """Count and report a jump that was not attempted."""
        self.stats.counts[f"skipped_{cause}"] += 1
        norm, pairs = secants.gradient_norm, len(secants.slots)
        self.report(partial(JumpRecord, self.state.k, norm, norm, 0, pairs, 0.0, cause=cause))

    def conclude(self, cause: str) -> None:
        """Count and report the end of an attempt."""
        self.stats.counts[f"rejected_{cause}" if cause else "accepted"] += 1
        self.state.pending, self.state.tries = False, 0
        record, self.record = self.record, None
        assert record is not None
        self.report(partial(replace, record, cause=cause))

    def report(self, describe: Callable[[], JumpRecord]) -> None:
        """Note a record and hand it to listeners; without any it is made on demand."""
        self.stats.describe = describe
        if self.hooks or logger.isEnabledFor(logging.DEBUG):
            self.publish()

    def cancel(self) -> None:
        """Let a pending jump stay, undecided."""
        if self.state.pending:
            self.conclude("outside_write")
