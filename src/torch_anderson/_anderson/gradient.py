"""The algorithm for gradients: every gradient, with the weights it was computed at, tells where to jump.

1. Read the weights and the gradient before the base sees it, and add the pair to the history.
2. If a jump led here, this gradient decides on it: it stays, and the base's momentum is zeroed; or it becomes shorter,
   or is taken out of the weights, and the base makes no step. What other code has written to the weights since the
   jump is never undone.
3. Make the base's step; its end is the plain point, to which a refused jump returns.
4. Jump from the weights of the gradient, not from the end of the base's step, to where the pairs say that the gradient
   vanishes (``quasi_newton``).

Nothing is evaluated besides the gradients that training computes anyway. While gradients are noisy, or jumps are
refused too often, it rests: for a number of steps nothing is read, stored or computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot, inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._calls import BaseStep, JumpRefused
from .._driver import Driver
from .._ranks.placement import is_dtensor, local_part
from .._records import JumpRecord
from .._tensors.blocks import Space
from .._tensors.checkpoint import STATE, Entries, Saved, Shapes, pack, padded, unpack, unpadded
from .noise import CERTAIN, PROBATION, has_changed, is_late_noise, is_noise
from .pairs import Pairs
from .quasi_newton import RIDGE, ROUNDED_RIDGE, Proposal, Secants
from .residuals import WHY_PLAIN, GradientResidual, Reading
from .storage import Storage
from .trial import FARTHEST, LOADED, Trial, passes

LOOK = 4
"""Gradients that are stored before the first jump, and after each rest: enough to detect noise."""
BRIEF_LOOK = 3
"""Gradients that are stored after repeated noise: usually enough to see that it goes on."""
FIRST_REST, LONGEST_REST = 4, 30
"""Base steps of the first rest, and of the longest: each is twice as long as the last, until jumps are accepted."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 4096
"""Base steps of the first rest after the function has changed, and of the longest."""
PAUSE_GROWTH = 4
"""A rest after the function has changed is this many times as long as the last of its kind: it will change again."""
RETRIES = 6
"""Most times that a refused jump is shortened before the weights return to the plain point, which may be where the base
alone is unstable. Before many jumps were accepted, ``TOO_MANY_REFUSALS`` ends it after one or two."""
SHORTEST_PART, LONGEST_PART = 0.1, 0.5
"""Limits of the part of a refused jump that is tried next."""
SLIGHT_WRITE = 0.1
"""Length of what other code has written to the weights of a refused jump, in units of the jump, up to which the jump is
shortened. After longer ones, as constraints make them, shortened jumps did harm (least squares on a sphere)."""
SAME_LENGTH = 1e-4
"""Relative difference of the lengths of two gradients up to which both have been clipped: rounding is far below it."""
GROWTH = 4.0
"""A jump may be this many times as long as the last accepted one."""
MEMORY, TOO_MANY_REFUSALS, FEW_REFUSALS = 0.8, 0.4, 0.1
"""Memory of the moving average of refusals, the average above which the driver rests, and the one below which the next
rest is short again."""
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
"""Names of first moments in the state of torch's optimizers."""


@dataclass
class GradientState:
    """The numbers of a checkpoint, besides those of pairs, rates, the pending jump and counters; in this order."""

    resting: int = 0
    """Base steps still to rest: in a checkpoint; otherwise ``Driver.resting``."""
    k: int = 0
    """Gradients read."""
    look: int = LOOK
    """Gradients to store before noise is judged and the weights may jump."""
    proven: int = 0
    """Jumps accepted since the last rest."""
    rest: int = FIRST_REST
    """Length of the next rest."""
    noisy: bool = False
    """Whether gradients were noise, and again after a rest, and have never been ``smooth``."""
    smooth: bool = False
    """Whether many jumps were accepted between two rests, so that noise would be something new."""
    pause: int = FIRST_PAUSE
    """Length of the next rest after the function has changed."""
    refusals: float = 0.0
    """Moving average over jumps: 1 for a refused one, 0 for an accepted one."""
    radius: float = inf
    """Longest jump."""
    tries: int = 0
    """How often the pending jump D was shortened."""
    descent: float = 0.0
    """-g'D at the point where D begins."""
    longest_gradient: float = 0.0
    """Length of the longest gradient so far: another one of just this length has been clipped."""
    reach: float = -1.0
    """D in units of the newest difference of points, once the gradient at its end is stored."""


class GradientDriver(Driver):
    """Quasi-Newton jumps between the steps of any base, decided by the next gradient."""

    kind = 3

    def __init__(self, base: Optimizer, options: Any):
        self.storage = options.storage or Storage()
        super().__init__(base, options, self.storage.shard)
        self.resting = options.warmup
        self.state = GradientState()
        self.build(self.space)

    def build(self, space: Space) -> None:
        """Make room for pairs, for the pair that is being read, and for both ends of a pending jump.

        Points are as ``GradientResidual`` reads and writes them, scaled by group; the ends of a jump are weights as
        they are.
        """
        self.pairs = Pairs(space, self.options.history_size, self.storage)
        self.residual = GradientResidual(self.base, space)
        self.point, self.gradient = self.pairs.vector(), self.pairs.vector()
        self.trial = Trial(space)

    # ------------------------------------------------------------------------------------------------ the algorithm

    def step(self, base_step: BaseStep) -> Any:
        """Make one base step, then jump; or undo or shorten the last jump, which replaces the step."""
        if self.resting:
            self.count_rest()
            return base_step()[0]
        secants: Secants | None = None  # some bases do not call their closure at every step

        def measure() -> None:
            nonlocal secants
            secants = self.measure()

        try:
            loss, _ = base_step(measure)
        except JumpRefused as refused:
            return refused.loss
        if secants is not None:
            self.jump(secants)
        return loss

    @torch.no_grad()  # gradients may carry a graph, and closures enable it
    def measure(self) -> Secants | None:
        """Take in the gradient before the base sees it; returns the problem that it completes, None if no jump is due.

        Raises ``JumpRefused`` where the jump that led here does not stay, or gradients can no longer be compared.
        """
        if not self.space.blocks:
            return None
        state, pairs = self.state, self.pairs
        reading = self.residual.read(self.point, self.gradient)
        if reading is Reading.NO_GRADIENT:
            return None
        if reading is not Reading.COMPARABLE and self.pending:
            self.take_back()
            self.forget()
            raise JumpRefused
        if reading is Reading.NOT_COMPARABLE:
            self.forget()
        elif reading in WHY_PLAIN:
            self.tell_once(WHY_PLAIN[reading].format(name=type(self.base).__name__))
            return None
        self.point = pairs.store(self.point, self.gradient)
        state.k += 1
        state.look = max(state.look - 1, 0)
        if state.look or pairs.count < 2:
            return None
        pairs.update()
        secants = Secants(pairs.matrix, pairs.newest_first, ROUNDED_RIDGE if pairs.rounded else RIDGE)
        clipped = abs(secants.gradient_norm - state.longest_gradient) <= SAME_LENGTH * state.longest_gradient
        state.longest_gradient = max(state.longest_gradient, secants.gradient_norm)
        if self.pending and not self.decide_pending(secants, clipped):
            raise JumpRefused
        if not pairs.count or not secants.finite:
            self.forget()
            return None
        return secants if state.k % self.options.period == 0 else None

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
        elif state.noisy and self.pairs.count <= CERTAIN:
            state.look = CERTAIN + 1 - self.pairs.count
        elif (proposal := secants.propose(state.radius)) is None:
            self.skip("no_descent", secants)
        else:
            self.apply(secants, proposal)

    def skip(self, cause: str, secants: Secants) -> None:
        """Count and report a jump that was not attempted."""
        norm = secants.gradient_norm
        self.record_skip(cause, JumpRecord(self.state.k, norm, norm, 0, len(secants.slots), 0.0, cause=cause))

    def apply(self, secants: Secants, proposal: Proposal) -> None:
        """Set the weights to the end of the jump; the plain point is kept until it is decided."""
        state, norm, c = self.state, secants.gradient_norm, proposal.coefficients
        state.descent, state.reach = proposal.descent, -1.0
        self.space.refresh()  # the base may have given the parameters other memory
        self.space.read(self.trial.plain)
        self.combine(proposal.weights)
        ratio = proposal.length / norm
        self.attempt(
            JumpRecord(state.k, norm, norm * proposal.gain, c.rank, len(c.values), hypot(*c.values), step_ratio=ratio)
        )

    def combine(self, weights: list[float]) -> None:
        """Let ``point`` be the newest stored point plus the rows with these weights."""
        self.pairs.combine(weights, self.point)
        self.residual.unscale(self.point)

    def attempt(self, record: JumpRecord, everything: bool = False) -> None:
        """Set the weights to ``point``; the next gradient decides on it."""
        self.stats.counts["attempted"] += 1
        if self.space.overflows(self.point, record.length):
            self.state.radius = record.length / 2
            self.conclude("nonfinite", record)
            return
        self.space.write(self.point, everything)
        self.trial.record = record
        if self.options.safeguard is None:
            self.accept()
        else:
            self.space.read(self.trial.candidate)

    # ------------------------------------------------------------------------------------------------- the decision

    def decide_pending(self, secants: Secants, clipped: bool) -> bool:
        """Decide on the pending jump by the gradient at its end, which may be ``clipped``; False if it does not stay.

        The first gradient after a jump compares slopes along the displacement of the weights, with what other code has
        written to them; after that, along the jump. Where other weights were loaded, nothing is decided: they stay, and
        the history restarts.
        """
        state, record = self.state, self.trial.record
        assert record is not None
        if secants.newest_length > LOADED * (secants.older_path + record.length / abs(state.reach)):
            self.cancel()
            self.forget()
            return True
        slope = state.reach * secants.slope
        descent = state.descent if state.tries else secants.slope_before
        if passes(slope, descent, secants.gradient_norm, record.residual_norm, clipped):
            self.accept()
            return True
        tries, written = state.tries, self.separate_writes()
        self.refuse("gradient" if written <= FARTHEST else "outside_write", record)
        if not secants.finite:
            self.forget()
            return self.revert(record, written)
        proven = state.proven >= PROBATION
        changed = tries > 0 and proven and has_changed(secants, tries + 1)
        hopeless = state.refusals > TOO_MANY_REFUSALS and (not proven or is_late_noise(secants, tries + 1))
        if changed or hopeless or tries == RETRIES or written > SLIGHT_WRITE:
            return self.revert(record, written, changed)
        self.shorten(secants, slope, record, tries, written > 0)
        return False

    def accept(self) -> None:
        """Let the jump stay, and zero the base's first moments: they describe the steps that the jump replaces."""
        state, record = self.state, self.trial.record
        assert record is not None
        state.refusals *= MEMORY
        state.rest = FIRST_REST if state.refusals < FEW_REFUSALS else state.rest
        state.radius = GROWTH * record.length
        state.proven += 1
        state.smooth = state.smooth or state.proven == PROBATION
        state.noisy = state.noisy and not state.smooth
        states = [self.base.state[p] for p in self.space.params if p in self.base.state]
        kept = [state.get(name) for state in states if isinstance(state, dict) for name in FIRST_MOMENTS]
        if moments := [local_part(x) if is_dtensor(x) else x for x in kept if isinstance(x, Tensor)]:
            torch._foreach_zero_(moments)
        self.conclude("", record)

    def refuse(self, cause: str, record: JumpRecord) -> None:
        """Count a jump that has failed its test."""
        self.state.refusals = MEMORY * self.state.refusals + 1 - MEMORY
        self.conclude(cause, record)

    def conclude(self, cause: str, record: JumpRecord) -> None:
        """Count and report the end of an attempt."""
        self.trial.record, self.state.tries = None, 0
        self.record_end(cause, record)

    def shorten(self, secants: Secants, slope: float, record: JumpRecord, tries: int, overwritten: bool) -> None:
        """Try a part of the refused jump: up to where a straight line through the slopes at both ends is 0.

        It begins at the weights of the gradient before it. If other code has written to the weights, that would undo
        a part of the write; then it begins at the plain point.
        """
        state = self.state
        part = state.descent / (state.descent + slope) if slope > 0 else 0.0
        part = min(max(part, SHORTEST_PART), LONGEST_PART)
        if overwritten:
            for target, jump, plain in zip(self.point, self.trial.candidate, self.trial.plain, strict=True):
                target.copy_(plain).add_(jump, alpha=part)
        else:
            weights = [0.0] * len(secants.matrix)
            weights[secants.s(secants.slots[0])] = (part - 1) * state.reach
            self.combine(weights)
        state.reach = part / (1 - part)
        state.descent *= part
        state.radius = part * record.length
        state.tries = tries + 1
        self.attempt(replace(record, step_ratio=part * record.step_ratio), everything=True)

    def revert(self, record: JumpRecord, written: float, changed: bool = False) -> bool:
        """Return to the plain point; rest if too many jumps were refused, for long if the function has changed.

        ``written``: how far other code has moved the weights since, in units of the jump. Above ``FARTHEST``, other
        weights were loaded: they stay, and the history restarts. Returns whether they stay.
        """
        state = self.state
        stays = not written <= FARTHEST
        if stays:
            self.forget()
        else:
            self.space.write(self.trial.plain, everything=True)
        state.radius = record.length / 2
        if changed or state.refusals > TOO_MANY_REFUSALS:
            self.rest()
        if changed:
            self.resting, state.smooth = state.pause, False
            state.pause = min(PAUSE_GROWTH * state.pause, LONGEST_PAUSE)
        return stays

    def separate_writes(self) -> float:
        """Length of what other code has written since the jump, in units of the jump."""
        self.space.read(self.point)
        return self.trial.separate_writes(self.point)

    def rest(self) -> None:
        """Leave the next steps to the base, then look again."""
        state = self.state
        self.clear(zero=False)
        state.look = BRIEF_LOOK if state.noisy else LOOK
        self.resting, state.rest = state.rest, min(2 * state.rest, LONGEST_REST)
        state.refusals, state.radius = TOO_MANY_REFUSALS / 2, inf

    @property
    def pending(self) -> bool:
        """Whether a jump waits for its gradient."""
        return self.trial.record is not None

    def take_back(self) -> None:
        """Refuse a pending jump without a gradient that can decide on it."""
        record = self.trial.record
        assert record is not None
        self.refuse("gradient", record)
        self.revert(record, self.separate_writes())

    def cancel(self) -> None:
        """Let a pending jump stay, undecided."""
        if self.trial.record:
            self.conclude("outside_write", self.trial.record)

    def clear(self, zero: bool = True) -> None:
        """Start a new history, and look for noise before the next jump."""
        self.pairs.clear(zero)
        self.state.look, self.state.proven = LOOK, 0

    def forget(self) -> None:
        """Forget every pair."""
        self.stats.counts["restarts"] += self.pairs.count > 0
        self.clear()

    # -------------------------------------------------------------------------------------------------- checkpoints

    @property
    def steps(self) -> int:
        """Gradients read."""
        return self.state.k

    def saved(self) -> Saved:
        """Rows, points and numbers."""
        self.state.resting = self.resting
        numbers = {
            STATE: pack(self.state, self.kind),
            "group_rates": padded(self.residual.rates, len(self.base.param_groups)),
            "counts": torch.tensor(self.stats.counters(), dtype=torch.float64),
        }
        vectors = self.pairs.vectors() | self.trial.vectors()
        return Saved(vectors, numbers | self.pairs.numbers() | self.trial.numbers())

    def bytes(self) -> int:
        """Memory of rows and points, with the pair that is being read."""
        return super().bytes() + sum(part.nbytes for vector in (self.point, self.gradient) for part in vector)

    def shapes(self) -> Shapes:
        """Rows and points."""
        rows = ("history_size", (self.options.history_size,))
        points = dict.fromkeys(("last_residual", "last_point", "plain", "candidate"), ("residual", ()))
        return {"point_diffs": rows, "residual_diffs": rows, **points}

    def load_numbers(self, found: dict[Tensor, Entries]) -> None:
        """Continue where the entries were saved."""
        entries = next(iter(found.values()))
        self.state = unpack(GradientState, entries[STATE])
        self.resting = self.state.resting
        self.pairs.load_numbers(entries)
        self.trial.load_numbers(entries)
        self.residual.rates = unpadded(entries["group_rates"])
        self.stats.set_counters(entries["counts"].tolist())
