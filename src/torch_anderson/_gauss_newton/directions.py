"""Directions of the history, along which outputs are measured and jumps are made.

Rows are differences of points stored every few base steps, the last accepted jumps, the present base step and the
gradient.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from .._tensors.blocks import Space, Vector
from .._tensors.evaluate import Span, Unusable
from .._tensors.members import Group
from .state import FEWEST, HISTORY, GaussNewtonState

STORE_PERIOD = 5
"""q, base steps between two stored points."""
JUMPS = 5
"""Accepted jumps that are directions."""
KEPT = HISTORY + JUMPS
"""Rows that outlive a jump; behind them:"""
STEP, GRADIENT = KEPT, KEPT + 1
"""... the present step and the gradient."""


class HistoryDirections:
    """Rows of directions for all blocks, and the point that the next one is measured from."""

    fewest = FEWEST + 1
    """Points to store before the first jump."""

    def __init__(self, space: Space, state: GaussNewtonState):
        self.space = space
        self.state = state
        self.rows = space.rows(KEPT + 2)
        self.step, self.gradient = ([rows[i] for rows in self.rows] for i in (STEP, GRADIENT))
        for block, row in zip(space.blocks, self.gradient, strict=True):
            block.remember(row)
        self.stored = space.vector()
        """The point from which the next difference is taken."""
        self.used: list[int] = []
        """Rows that the latest jump was made of."""
        self.ages: list[int] = []
        """Positions of differences among them, from the newest on."""
        self.idle: list[list[slice]] = []
        """Columns of each block in which no jump goes, because the base leaves them alone."""

    def saved(self) -> dict[str, list[Tensor]]:
        """What a checkpoint keeps in the length of the parameters."""
        return {"directions": [rows[:KEPT] for rows in self.rows], "stored": self.stored}

    # --------------------------------------------------------------------------------------- what is kept at a step

    def end_step(self, start: Vector, groups: Sequence[dict[str, Any]]) -> bool:
        """Make rows of the base step that began at ``start``, and of the gradient; ``start`` is then where it ended.

        The gradient is multiplied by the relative learning rates, as in a base step: a small rate slows a group down.
        Returns whether the weights have moved. On other devices than the CPU the check would wait for the device, and
        with sharded parameters it would need all ranks: there the answer is yes.
        """
        now = self.gradient  # not in use yet
        self.space.refresh()  # the base may have given the parameters other memory
        self.space.read(now)
        if self.space.settled and all(map(torch.equal, start, now)):
            return False
        for before, after, step in zip(start, now, self.step, strict=True):
            torch.sub(after, before, out=step)
            before.copy_(after)
        self.space.read_gradients(self.gradient, groups)
        self.idle = self.space.idle(groups)
        return True

    def store(self) -> None:
        """Make a row of the difference between the present weights and those stored before."""
        self.space.refresh()
        if self.state.stores:
            row = [rows[(self.state.stores - 1) % HISTORY] for rows in self.rows]
            self.space.read(row)
            torch._foreach_sub_(row, self.stored)
        self.space.read(self.stored)
        self.state.stores += 1

    def propose(self, jump: Vector) -> None:
        """Make a row of a jump that other samples decide on; it replaces the oldest jump."""
        for rows, by in zip(self.rows, jump, strict=True):
            rows[self.next_jump].copy_(by)

    def proposal(self, groups: Sequence[Group]) -> Vector:
        """The jump that was proposed, without parameters that the base has left alone since."""
        found = [rows[self.next_jump] for rows in self.rows]
        for part, idle in zip(found, self.space.idle(groups), strict=True):
            for columns in idle:
                part[columns] = 0
        return found

    @property
    def next_jump(self) -> int:
        """The row of the next jump."""
        return HISTORY + self.state.jumps % JUMPS

    def keep(self, jump: Vector, point: Vector) -> None:
        """Make a row of a jump that was accepted, and measure the next difference from where it ended."""
        for rows, stored, by, end in zip(self.rows, self.stored, jump, point, strict=True):
            rows[self.next_jump].copy_(by)
            stored.copy_(end)
        self.state.jumps += 1

    # ------------------------------------------------------------------------------------------------ one jump

    def span(self, start: Vector) -> tuple[Span, float]:
        """Choose the rows to use: step, gradient, differences from the newest on, jumps. Returns them and |start|."""
        squares = [_squares(rows, point) for rows, point in zip(self.rows, start, strict=True)]
        *lengths, size = self.space.add_up(squares).sqrt().tolist()
        held = min(self.state.stores - 1, self.state.width)
        newest_first = [(self.state.stores - 2 - age) % HISTORY for age in range(held)]
        jumps = range(HISTORY, HISTORY + min(self.state.jumps, JUMPS))
        shortest = max(_shortest(rows.dtype) for rows in self.rows)
        self.used = [i for i in (STEP, GRADIENT, *newest_first, *jumps) if shortest < lengths[i] < inf]
        self.ages = [position for position, i in enumerate(self.used) if i < HISTORY]
        if not self.used:
            raise Unusable("converged", "neither steps nor gradients show a direction")
        return Span(self.rows, {i: lengths[i] for i in self.used}, self.idle), size or 1.0

    @property
    def has_gradient(self) -> bool:
        """Whether the gradient is among the used rows, so that the loss depends on the weights."""
        return GRADIENT in self.used


def _squares(rows: Tensor, point: Tensor) -> Tensor:
    """Squared lengths of rows and of a point."""
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).reshape(-1) for x in (rows, point)]
    return torch.cat(norms).square()


def _shortest(dtype: torch.dtype) -> float:
    """Length above which neither a row scaled to unit length, nor a square of it, loses digits to underflow."""
    info = torch.finfo(dtype)
    return max(info.tiny / info.eps, torch.finfo(torch.float64).tiny ** 0.5)
