"""The algorithm for gradients: every gradient, with the weights it was computed at, tells where to jump.

1. Read the weights and the gradient before the base sees it, and add the pair to the history.
2. If the weights are those of a jump, this gradient decides on it: it stays, and the base's momentum is zeroed; or it
   becomes shorter, or is taken back, and the base makes no step.
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
from .._tensors.checkpoint import Entries
from .gradient_memory import BRIEF_LOOK, FIRST_REST, LONGEST_PAUSE, LONGEST_REST, LOOK, GradientMemory
from .noise import CERTAIN, PROBATION, has_changed, is_late_noise, is_noise
from .residual import WHY_PLAIN, Reading
from .secants import COARSE_RIDGE, RIDGE, Proposal, Secants

FLATTER, STEEPER = 0.3, 4.0
"""A jump passes if the slope at its end is at most this part of the descent at its start, and the gradient at most so
many times as long."""
RETRIES = 6
"""Most times that a refused jump is shortened before the weights return to the plain point, which may be where the base
alone is unstable. Before many jumps were accepted, ``TOO_MANY`` ends it after one or two."""
SHORTEST, LONGEST = 0.1, 0.5
"""Limits of the part of a refused jump that is tried next."""
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

        A pending jump stays, undecided, where gradients can no longer be compared (``reset_history`` cancels it) and
        where other code has written to the weights.
        """
        if not self.space.blocks:
            return True
        state, history = self.state, self.history
        disturbed = self.overwritten()
        reading = self.residual.read(self.point, self.gradient)
        if reading is Reading.NOT_COMPARABLE:
            self.reset_history()
        elif reading is not Reading.COMPARABLE:
            if reading in WHY_PLAIN:
                self.tell_once(WHY_PLAIN[reading].format(name=type(self.base).__name__))
            return True
        self.point = history.store(self.point, self.gradient)
        state.k += 1
        state.look = max(state.look - 1, 0)
        if state.look or history.pairs < 2:
            return True
        disturbed = self.gram.take_in(history, self.space.ranks, disturbed)
        secants = Secants(self.gram.matrix, history.newest_first, RIDGE if history.fine else COARSE_RIDGE)
        if state.pending and disturbed:
            self.cancel()
        if state.pending and not self.settle(secants):
            return False
        if not secants.finite:
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
        self.space.read(self.plain)
        self.history.subtract(proposal.weights, self.point)
        self.residual.write(self.point)
        coefficient_norm, ratio = hypot(*fitted.values), proposal.length / norm
        columns = fitted.rank, len(fitted.values)
        self.attempt(JumpRecord(state.k, norm, norm * proposal.gain, *columns, coefficient_norm, step_ratio=ratio))
        if self.options.safeguard is None:
            self.accept()

    def attempt(self, record: JumpRecord) -> None:
        """Mark a jump as pending: the next gradient decides on it."""
        self.state.pending, self.record = True, record
        self.stats.counts["attempted"] += 1
        self.watch()

    def settle(self, secants: Secants) -> bool:
        """Decide on the pending jump by the gradient at its end; False if it does not stay."""
        state = self.state
        slope = state.reach * secants.along_newest
        if slope <= FLATTER * state.descent and secants.gradient_norm <= STEEPER * state.norm:
            self.accept()
            return True
        record, tries = self.record, state.tries
        self.refuse()
        if not secants.finite:
            self.forget()
            self.go_back()
            return False
        proven = state.proven >= PROBATION
        changed = tries > 0 and proven and has_changed(secants, tries + 1)
        hopeless = state.refusals > TOO_MANY and (not proven or is_late_noise(secants, tries + 1))
        if changed or hopeless or tries == RETRIES:
            self.go_back(changed)
        else:
            self.shorten(secants, slope, record, tries)
        return False

    def refuse(self) -> None:
        """Count a jump that does not stay."""
        self.state.refusals = MEMORY * self.state.refusals + 1 - MEMORY
        self.conclude("gradient")

    @property
    def pending(self) -> bool:
        """Whether a jump waits for its gradient."""
        return self.state.pending

    def take_back(self) -> None:
        """Refuse a pending jump whose gradients are not finite, step after step, so that no step was made from it.

        The driver calls it when gradients are cleared (``gradients_cleared``).
        """
        if not self.overwritten():
            self.refuse()
            self.go_back()

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

    def shorten(self, secants: Secants, slope: float, record: JumpRecord | None, tries: int) -> None:
        """Try a part of the refused jump: up to where a straight line through the slopes at both ends is 0."""
        state = self.state
        part = min(max(state.descent / (state.descent + slope) if slope > 0 else 0.0, SHORTEST), LONGEST)
        weights = [0.0] * len(secants.matrix)
        weights[secants.s(secants.slots[0])] = (1 - part) * state.reach
        self.history.subtract(weights, self.point)
        self.residual.write(self.point, everything=True)
        state.reach = part / (1 - part)
        state.descent *= part
        state.length *= part
        state.radius = state.length
        state.tries = tries + 1
        assert record is not None
        self.attempt(replace(record, step_ratio=part * record.step_ratio))

    def go_back(self, changed: bool = False) -> None:
        """Return to the plain point; rest if too many jumps were refused, for long if the function has changed."""
        state = self.state
        self.space.write(self.plain, everything=True)
        state.radius = state.length / 2
        if changed or state.refusals > TOO_MANY:
            self.rest()
        if changed:
            self.resting, state.smooth = state.pause, False
            state.pause = min(LONGER * state.pause, LONGEST_PAUSE)

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
        record, self.record, self._version = self.record, None, None
        assert record is not None
        self.report(partial(replace, record, cause=cause))

    def report(self, describe: Callable[[], JumpRecord]) -> None:
        """Note a record and hand it to listeners; without any it is made on demand."""
        self.stats.describe = describe
        if self.hooks or logger.isEnabledFor(logging.DEBUG):
            self.publish()

    # ---------------------------------------------------------------------------------------------- outside writes

    def watch(self) -> None:
        """Remember the parameters' versions while a jump is pending."""
        self._version = self.space.version() if self.state.pending else None

    def overwritten(self) -> bool:
        """Whether other code has written to the weights of a pending jump."""
        return self._version is not None and self._version != self.space.version()

    def idle(self, base_step: BaseStep) -> Any:
        """Go on with a pending jump: a step at rate 0 writes to the weights, but does not move them."""
        disturbed = self.overwritten()
        loss = super().idle(base_step)
        if not disturbed:
            self.watch()
        return loss

    def entries(self, only: Tensor | None = None) -> dict[Tensor, Entries]:
        """What a checkpoint holds; a pending jump that other code has overwritten is not saved."""
        if self.space.ranks.size == 1 and self.overwritten():
            self.cancel()
        return super().entries(only)

    def cancel(self) -> None:
        """Let a pending jump stay, undecided."""
        if self.state.pending:
            self.conclude("outside_write")
