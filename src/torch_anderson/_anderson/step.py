"""The algorithm for steps, the paper's: a base step evaluates a fixed-point map, whose residuals tell where to jump.

    w, r      the weights before a base step, and the step: the residual of the map w -> u = w + r
    U, R      differences of the last u and r, m of them at most; U = W + R
    c         argmin |r - R c|
    jump      from w to w + beta (r - (W + R) c), the paper's mixing: from u by -(1 - beta) r - beta U c

    p   period            base steps between two jumps
    q   store_period      base steps between two stored pairs
    m   history_size
    beta  relaxation

1. Read the weights w, and where a jump may follow or is pending, the gradient before the base sees it. If a jump led
   here, this gradient decides on it (or, with the paper's test, the residual of the step that follows).
2. Make the base's step; r = u - w.
3. Every q steps, and before a jump, add (u, r) to the pairs; r divided by the learning rate, which a schedule changes.
4. Every p steps, solve the least-squares problem, and jump.
5. Average: replace the weights by the mean of the last points while they are noisy (``average``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import hypot, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._calls import BaseStep, JumpRefused
from .._driver import Driver
from .._records import JumpRecord
from .._tensors.blocks import Space, Vector
from .._tensors.checkpoint import STATE, Entries, Saved, Shapes, pack, padded, unpack, unpadded
from .._tensors.evaluate import LossFn, evaluate
from .._tensors.members import all_parameters
from .average import Window
from .least_squares import Coefficients, solve
from .pairs import Pairs
from .residuals import WHY_PLAIN, GradientResidual, Reading, StepResidual, largest_entry, unusable_gradients
from .snapshot import Snapshot, group_values, restore_groups
from .storage import Storage
from .trial import FARTHEST, LOADED, Trial, passes

NO_LOSS = "Anderson makes plain steps: safeguard='loss' needs step(loss_fn=...) or set_batch(loss_fn=...)."

MOST_GAIN = 0.98
"""|r - R c| / |r| above which acceleration has stagnated: the candidate adds no new direction, the plain step does (the
breakdown that Anderson acceleration has where GMRES stagnates)."""
COLLINEAR, DISTINCT = 1e-2, 1e-1
"""Squared distances of a column from the span of the others: below the first, products have to be precise; above the
second, they need not be any more."""
FITTED = 1e-2
"""The share of |r|^2 that is left, below which products have to be precise."""
FIRST_REST, LONGEST_REST = 4, 128
"""Base steps without a jump after one that a gradient has refused: twice as many each time, and a quarter of them
after one that was accepted. With at most 30, SGD with momentum on 25 weights, where all are refused, ended at 1.07 of
its loss alone."""
LONGEST_JUMP = 2.0
"""Longest jump on which a gradient decides, in lengths of the path through the stored points. Longer ones are
shortened: the weights are at their end until they are refused, where other code may read them."""


@dataclass
class StepState:
    """The numbers of a checkpoint, besides those of pairs, rates, the pending jump and counters; in this order."""

    k: int = 0
    """Base steps that changed parameters."""
    rest: int = 0
    """Length of the last rest, in base steps."""
    wait: int = 0
    """Base steps still to make without a jump."""
    norm: float = 0.0
    """|r| / rate before the pending jump, if the next residual decides on it; otherwise 0."""
    comparable: bool = True
    """``StepResidual.comparable``, in a checkpoint, and ..."""
    window_count: int = 0
    """... ``Window.count`` and ..."""
    window_stale: int = 0
    """... ``Window.stale``."""


@dataclass(frozen=True)
class Problem:
    """The least-squares problem of one jump, with its solution."""

    gram: list[list[float]]
    """Lower triangle of R'R / rate^2, newest column first."""
    slots: list[int]
    """Where the columns are stored, newest first."""
    rates: list[float]
    """Largest learning rate of each pair, oldest first."""
    residual_norm: float
    """|r|"""
    path: float
    """Length of the path through the stored points."""
    c: Coefficients
    gain: float
    """|r - R c| / |r|, predicted over present residual norm."""

    @classmethod
    def posed(cls, pairs: Pairs, regularization: float) -> Problem:
        """Solve the problem if all numbers are finite; the diagonal bounds the rest of the matrix."""
        matrix, slots, own, rate = pairs.matrix, pairs.newest_first, pairs.size, pairs.rates[-1]
        gram = [[matrix[i][j] for j in slots[: a + 1]] for a, i in enumerate(slots)]
        norm, path = sqrt(matrix[own][own]), pairs.path
        finite = isfinite(norm + path + sum([row[-1] for row in gram]))
        c = solve(gram, [matrix[i][own] for i in slots], regularization) if finite else Coefficients([], 0.0, 0)
        return cls(gram, slots, pairs.rates, rate * norm, path, c, c.gain(norm) if finite else float("nan"))

    @property
    def finite(self) -> bool:
        """Whether there is a solution."""
        return isfinite(self.gain)

    def jump(self, relaxation: float, pairs: Pairs) -> tuple[list[float], float]:
        """Weights of the rows whose sum leads from u to the candidate, -(1 - beta) r - beta U c; |candidate - w|."""
        (by_residual, own), size = rate_change(self.c.values, self.rates), pairs.size
        weights = [0.0] * (2 * size + 1)
        weights[size] = -relaxation * own - (1 - relaxation) * self.rates[-1]
        for slot, c, x in zip(self.slots, self.c.values, by_residual, strict=True):
            weights[slot] = -relaxation * x
            weights[size + 1 + slot] = -relaxation * c
        from_w = [*weights[:size], weights[size] + self.rates[-1], *weights[size + 1 :]]
        return weights, pairs.length(from_w)

    def shortened(self, weights: list[float], part: float) -> list[float]:
        """The weights that lead from u to a part of the way from w = u - r to the candidate."""
        shorter = [part * weight for weight in weights]
        shorter[len(weights) // 2] -= (1 - part) * self.rates[-1]
        return shorter

    def record(self, step: int, cause: str = "", length: float = 0.0) -> JumpRecord:
        """The jump in numbers."""
        return JumpRecord(
            step=step,
            residual_norm=self.residual_norm,
            predicted_residual_norm=self.residual_norm * self.gain,
            rank=self.c.rank,
            history_len=len(self.gram),
            coefficient_norm=hypot(*self.c.values),
            step_ratio=length and length / self.residual_norm,
            cause=cause,
            gram=self.gram,
        )


def rate_change(coefficients: Sequence[float], rates: Sequence[float]) -> tuple[list[float], float]:
    """What rows of U measured at other learning rates lack, as weights of the rows of R and of the last r.

    At the present rate, u_i would be u_i + (rate_now - rate_i) r_i / rate_i, and each r_i / rate_i is the last one
    plus the differences (previous minus present) after it.

    >>> rate_change([3.0], [2.0, 1.0]), rate_change([3.0], [1.0, 1.0])
    (([-3.0], -3.0), ([0.0], 0.0))
    """
    now = rates[-1]
    if rates.count(now) == len(rates):
        return [0.0] * len(coefficients), 0.0
    c = [0.0, *reversed(coefficients), 0.0]
    lacking = [(now - rate) * (c[i + 1] - c[i]) for i, rate in enumerate(rates)]
    *totals, last = accumulate(lacking)
    return totals[::-1], last


def solved(pairs: Pairs, regularization: float) -> Problem:
    """Update the Gram matrix and solve the small problem, with one result on all ranks.

    Products of long rows are formed in the type of the rows, as long as that is accurate enough: relative errors of
    1e-6 change the least-squares residual by less than 1e-4, unless columns are nearly collinear or span r.
    """
    pairs.update()
    problem = Problem.posed(pairs, regularization)
    if pairs.float64 or not problem.finite:
        return problem
    distance = min(problem.c.least_distance_sq / COLLINEAR, problem.gain**2 / FITTED)
    if distance < 1 and not pairs.precise:
        pairs.precise, pairs.fresh = True, pairs.held
        pairs.update()
        return Problem.posed(pairs, regularization)
    if distance > DISTINCT / COLLINEAR:
        pairs.precise = False
    return problem


class StepDriver(Driver):
    """Jumps by the residuals of base steps, and the moving average."""

    kind = 1

    def __init__(self, base: Optimizer, options: Any):
        self.storage = options.storage or Storage()
        super().__init__(base, options, self.storage.shard)
        self.state = StepState()
        self.by_gradient, self.by_residual = options.safeguard == "gradient", options.safeguard == "residual"
        """Whether the next gradient decides on jumps, or the next residual."""
        self.snapshot = Snapshot()
        """The base's state at a jump that waits for the next residual."""
        self._version: int | None = None
        self.build(self.space)

    def build(self, space: Space) -> None:
        """Make room for pairs, the pair that is being measured, a pending jump, gradients and the window."""
        self.pairs = Pairs(space, self.options.history_size, self.storage)
        self.residual = StepResidual(self.base, space, self.pairs.vector(), self.pairs.vector())
        self.window = Window(self.options.average, space) if self.options.average else None
        self.trial = Trial(space) if self.by_gradient or self.by_residual else None
        self.gradients = GradientResidual(self.base, space, scaled=False)
        self.gradient, self.gradient_before = (self.pairs.vector() if self.by_gradient else [] for _ in range(2))
        """The newest gradient, and the last one that the base has seen before a jump."""

    # ------------------------------------------------------------------------------------------------ the algorithm

    def step(self, base_step: BaseStep) -> Any:
        """Make one base step, then store, jump and average as due."""
        if self.by_gradient and unusable_gradients(self.base) is Reading.OWN_PAIRS:
            self.tell_once(WHY_PLAIN[Reading.OWN_PAIRS].format(name=type(self.base).__name__))
            return base_step()[0]
        if not self.state.k:
            self.space.note_gradients()  # refuses sparse ones, even if nothing is measured yet
        self.notice_outside_writes()
        k = self.state.k + 1
        measures = bool(self.space.blocks) and self.measures(k)
        if measures:
            self.residual.begin()
        undecided = self.by_residual and self.pending
        groups = group_values(self.base) if undecided else []
        version = self.space.version()
        reads = measures and self.by_gradient and (self.pending or self.may_jump(k))
        try:
            loss, loss_fn = base_step(self.measure) if reads else base_step()
        except JumpRefused as refused:
            self.watch()
            return refused.loss
        if not (self.residual.end() if measures else self.acted(version)):
            self.watch()
            return loss
        self.state.k = k
        if undecided and not self.decide_by_residual(groups):
            self.watch()
            return loss
        residual = self.residual.difference() if measures else []
        residual_max = largest_entry(residual) if self.window and measures else None
        jumped = False
        if measures and self.stores(k):
            self.store(residual)
            jumped = self.may_jump(k) and self.jump(loss_fn)
        self.state.wait = max(self.state.wait - 1, 0)
        if residual_max is not None and not (self.by_residual and self.pending):
            self.average(residual_max, restart=jumped and self.options.period > 1)
        self.watch()
        return loss

    def measures(self, k: int) -> bool:
        """Whether base step k is measured."""
        return self.options.average is not None or self.pending or self.stores(k)

    def stores(self, k: int) -> bool:
        """Whether the pair of base step k is stored."""
        o = self.options
        return bool(k > o.warmup and (k % o.store_period == 0 or k % o.period == 0))

    def may_jump(self, k: int) -> bool:
        """Whether the weights may jump after base step k."""
        return k > self.options.warmup and k % self.options.period == 0 and not self.state.wait

    def store(self, residual: Vector) -> None:
        """Add the pair to the history; it starts anew where residuals cannot be compared with the stored ones."""
        pair = self.residual
        if not pair.comparable:
            self.forget()
        pair.point = self.pairs.store(pair.point, residual, pair.rate)
        pair.comparable = True

    # ------------------------------------------------------------------------------------------------------- jumps

    def jump(self, loss_fn: LossFn | None) -> bool:
        """Solve the small problem and jump if all tests are passed; returns whether the weights have jumped."""
        if self.pairs.count < 2:
            return self.skip("short_history")
        problem, candidate = solved(self.pairs, self.options.regularization), self.residual.point
        if not problem.finite:
            self.reset_history()
            return self.skip("nonfinite")
        if self.options.safeguard == "loss" and loss_fn is None:
            self.tell_once(NO_LOSS)
            return self.skip("no_loss", problem)
        if not problem.residual_norm or problem.gain > MOST_GAIN:
            return self.skip("no_gain" if problem.residual_norm else "converged", problem)
        weights, length = problem.jump(self.options.relaxation, self.pairs)
        if self.by_gradient and length > LONGEST_JUMP * problem.path:
            weights, length = (
                problem.shortened(weights, LONGEST_JUMP * problem.path / length),
                LONGEST_JUMP * problem.path,
            )
        cause = "too_long" if length > self.options.max_jump * problem.path else ""
        if not isfinite(length):
            cause = "nonfinite"
        elif not cause:
            self.pairs.combine(weights, candidate)
            if self.by_gradient and not self.descends(candidate):
                return self.skip("no_descent", problem)
            if self.trial:
                self.space.read(self.trial.plain)
            cause = "nonfinite" if self.space.overflows(candidate, length) else self.apply(candidate, loss_fn)
        self.stats.counts["attempted"] += 1
        record = problem.record(self.state.k, cause, length)
        if cause or not self.trial:
            self.record_end(cause, record)
            return not cause
        self.trial.record = record
        self.space.read(self.trial.candidate)
        if self.by_residual:
            self.state.norm = problem.residual_norm / problem.rates[-1]
            self.snapshot.take(self.base)
        return True

    def skip(self, cause: str, problem: Problem | None = None) -> bool:
        """Count and report a jump that was not attempted; returns False."""
        self.record_skip(cause, problem.record(self.state.k, cause) if problem else None)
        return False

    def apply(self, candidate: Vector, loss_fn: LossFn | None) -> str:
        """Set the weights to the candidate; go back if the loss is asked for and not lower there."""
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

    # ------------------------------------------------------------------------------------------------- the decision

    @torch.no_grad()
    def measure(self) -> None:
        """Read the gradient before the base sees it; raises ``JumpRefused`` if it refuses the jump that led here."""
        state, pair = self.state, self.residual
        reading = self.gradients.read(pair.start, self.gradient)
        if self.pending and reading is not Reading.NO_GRADIENT:
            cause = self.judge(pair.start) if reading is Reading.COMPARABLE else "gradient"
            if cause == "outside_write":
                self.reset_history()
            elif not cause:
                state.rest //= 4
                self.conclude("")
            else:
                state.rest = min(max(2 * state.rest, FIRST_REST), LONGEST_REST)
                state.wait = state.rest
                if not self.revert("gradient"):
                    raise JumpRefused
                self.space.read(pair.start)  # which has served as workspace
        self.gradient_before, self.gradient = self.gradient, self.gradient_before

    def judge(self, present: Vector) -> str:
        """The test by the gradient; empty if the jump passes, ``"outside_write"`` if other weights were loaded.

        D is the displacement from the weights w of the gradient g before the jump to the present ones, g' the gradient
        there. Besides ``passes``, the jump has to lower the loss by what half a plain step r would, to first order:
        (g + g')D <= g r.
        """
        assert self.trial is not None and self.trial.record is not None
        vectors = zip(self.displacements(present), self.gradient_before, self.gradient, self.pairs.rows, strict=True)
        products = [
            torch.stack([now @ d, g @ d, g @ rows.last_residual, now @ now, g @ g, d @ d])
            for d, g, now, rows in vectors
        ]
        slope, start, plain, norm_sq, norm_sq_before, moved_sq = self.space.add_up(products).tolist()
        if sqrt(moved_sq) > LOADED * (self.trial.record.length + self.pairs.path):
            return "outside_write"
        gains = slope + start <= self.pairs.rates[-1] * plain
        return "" if gains and passes(slope, -start, sqrt(norm_sq), sqrt(norm_sq_before)) else "gradient"

    def descends(self, candidate: Vector) -> bool:
        """Whether the displacement to a candidate is a descent direction for the gradient at w."""
        pairs = zip(self.displacements(candidate), self.gradient_before, strict=True)
        return float(self.space.add_up([g @ d for d, g in pairs])) < 0

    def displacements(self, point: Vector) -> Iterator[Tensor]:
        """From the weights w of the last stored pair to a point, block by block."""
        pairs, rate = self.pairs, self.pairs.rates[-1]
        for x, u, rows in zip(point, pairs.last_point, pairs.rows, strict=True):
            yield torch.sub(x, u).add_(rows.last_residual, alpha=rate)

    def decide_by_residual(self, groups: list[dict[str, Any]]) -> bool:
        """Decide on the pending jump by the paper's test: the residual must be smaller; False takes the step back."""
        assert self.trial is not None
        passed = self.residual.norm() / (self.residual.rate or 1.0) < self.state.norm
        if self.window:
            self.window.push(
                self.residual.start if passed else self.pairs.last_point, passed and self.options.period > 1
            )
        if passed:
            self.conclude("")
        else:
            self.revert("residual", groups)
        return passed

    def revert(self, cause: str, groups: list[dict[str, Any]] | None = None) -> bool:
        """Refuse the pending jump: return to the plain point, with what other code has written to the weights since.

        With ``groups``, the base returns to where it was before the jump. If other weights were loaded, they stay, and
        the history restarts. Returns whether they stay.
        """
        assert self.trial is not None
        if self.trial.separate_writes(self.residual.start) > FARTHEST:
            self.reset_history()
            return True
        self.space.write(self.trial.plain, everything=True)
        if groups is not None:
            self.snapshot.restore(self.base)
            restore_groups(self.base, groups)
        elif self.window and self.window.count:
            self.window.replace_newest(self.pairs.last_point)  # not the plain point, which an average may have moved
        self.conclude(cause)
        return False

    def conclude(self, cause: str) -> None:
        """Count and report the end of a pending jump."""
        assert self.trial is not None and self.trial.record is not None
        record, self.trial.record, self.state.norm = self.trial.record, None, 0.0
        self.snapshot.state = {}
        self.record_end(cause, record)

    @property
    def pending(self) -> bool:
        """Whether a jump waits for its test."""
        return self.trial is not None and self.trial.record is not None

    def take_back(self) -> None:
        """Refuse a pending jump without a gradient or residual that can decide on it."""
        self.space.read(self.residual.start)
        if self.by_residual:
            self.revert("residual", group_values(self.base))
        else:
            self.revert("gradient")
        self.watch()

    def cancel(self) -> None:
        """Let a pending jump stay, undecided, and drop the averages."""
        if self.pending:
            self.conclude("outside_write")
        if self.window:
            self.window.clear()

    def forget(self) -> None:
        """Forget every pair."""
        self.pairs.clear()
        self.stats.counts["restarts"] += 1

    # ----------------------------------------------------------------------------------------------------- averages

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
        if self.trial and self.pending:
            for plain, newest, part in zip(self.trial.plain, self.window.newest, mean, strict=True):
                without_jump = part - (newest - plain) / self.window.length
                plain.copy_(torch.where(noisy.to(plain.device), without_jump, plain))
            self.space.read(self.trial.candidate)

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

    # -------------------------------------------------------------------------------------------------- checkpoints

    @property
    def steps(self) -> int:
        """Base steps that changed parameters."""
        return self.state.k

    def entries(self, only: Tensor | None = None) -> dict[Tensor, Entries]:
        """What a checkpoint holds; averages of weights that other code has overwritten are not saved."""
        self.notice_outside_writes()
        return super().entries(only)

    def saved(self) -> Saved:
        """Rows, points and numbers; with the base's state, if a jump may have to be taken back."""
        vectors = self.pairs.vectors()
        state = replace(self.state, comparable=self.residual.comparable)
        if self.window:
            vectors["window"] = self.window.points
            state.window_count, state.window_stale = self.window.count, self.window.stale
        numbers = {
            STATE: pack(state, self.kind),
            "group_rates": padded(self.residual.group_rates, len(self.base.param_groups)),
            "counts": torch.tensor(self.stats.counters(), dtype=torch.float64),
            **self.pairs.numbers(),
        }
        if self.trial:
            vectors |= self.trial.vectors()
            numbers |= self.trial.numbers()
        if self.by_gradient:
            vectors["gradient"] = self.gradient_before
        if not self.by_residual:
            return Saved(vectors, numbers)
        return Saved(vectors, numbers, partial(self.snapshot.entries, self.base))

    def bytes(self) -> int:
        """Memory of rows and points, with the pair that is being measured."""
        vectors = self.residual.point, self.residual.start, self.gradient
        return super().bytes() + sum(part.nbytes for vector in vectors for part in vector)

    def shapes(self) -> Shapes:
        """Rows, points, and what depends on options."""
        m, average = self.options.history_size, self.options.average
        return {
            "point_diffs": ("history_size", (m,)),
            "residual_diffs": ("history_size", (m,)),
            "last_residual": ("residual", ()),
            "last_point": ("residual", ()),
            "window": ("average", (average.window,) if average else None),
            "plain": ("safeguard", () if self.trial else None),
            "candidate": ("safeguard", () if self.trial else None),
            "gradient": ("safeguard", () if self.by_gradient else None),
        }

    def load_numbers(self, found: dict[Tensor, Entries]) -> None:
        """Continue where the entries were saved."""
        entries = next(iter(found.values()))
        self.state = unpack(StepState, entries[STATE])
        self.residual.comparable = self.state.comparable
        self.residual.group_rates = unpadded(entries["group_rates"])
        self.pairs.load_numbers(entries)
        self.stats.set_counters(entries["counts"].tolist())
        if self.window:
            self.window.count, self.window.stale = self.state.window_count, self.state.window_stale
        if self.trial:
            self.trial.load_numbers(entries)
        if self.by_residual and self.pending:
            for param, kept in found.items():
                self.snapshot.load_entries(param, kept)
        self._version = None
