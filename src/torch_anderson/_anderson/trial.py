"""A jump that waits for its test: its record, both of its ends, and the test by the next gradient.

While it waits, other code may write to the weights. Such a write is never undone: a refusal takes the jump out of the
written weights.
"""

from itertools import chain
from math import inf, sqrt

import torch
from torch import Tensor

from .._records import NUMBERS, JumpRecord
from .._tensors.blocks import Space, Vector
from .._tensors.checkpoint import Entries, Vectors, padded, unpadded

FLATTER, STEEPER = 0.3, 4.0
"""A jump passes if the slope at its end is at most this part of the descent at its start, and the gradient at most so
many times as long."""
LOADED = 2.0
"""Displacement of the weights, in units of the jump and the path through all stored points, above which other code has
loaded other weights."""
FARTHEST = 1.5
"""Longest write, in units of the jump, after which a jump is taken back; after longer ones, other weights were loaded.
Writes of constraints are about as long as the jump that they cut off."""


def passes(slope: float, descent: float, norm: float, norm_before: float, clipped: bool = False) -> bool:
    """Whether a displacement D lowers the loss, by the gradients at its ends: slope g'D there, descent -g D here.

    ``clipped``: the gradient there has been shortened, so that its slope is too small by an unknown factor.
    """
    return slope <= (0.0 if clipped else FLATTER * descent) and norm <= STEEPER * norm_before


class Trial:
    """The weights without the jump and with it, in the type of the parameters, and the record of the jump."""

    def __init__(self, space: Space):
        self._space = space
        self.plain = space.vector()
        """Where the weights would be without the jump: at the end of the base's step."""
        self.candidate = space.vector()
        """The weights as the jump has left them."""
        self.record: JumpRecord | None = None
        """The record of the jump; None if no jump waits."""

    def separate_writes(self, present: Vector) -> float:
        """Add to the plain point what other code has written to the weights since the jump, and measure it.

        The ``present`` weights of each parameter are the plain point + t J + e, J the jump from there, which
        ``candidate`` then holds, and e orthogonal to J, which ``present`` then holds. They have to lose t J, not J: a
        write such as ``w.mul_(0.999)`` changes a long jump by more than it would change the plain point. Returns the
        length of the write, |(t - 1) J + e| / |J| over all parameters.
        """
        blocks, sums = self._space.blocks, []
        for block, w, candidate, plain in zip(blocks, present, self.candidate, self.plain, strict=True):
            w.sub_(candidate)
            candidate.sub_(plain)
            writes, jumps = block.pieces(w), block.pieces(candidate.to(w))
            norms = [torch._foreach_norm(pieces) for pieces in (writes, jumps, torch._foreach_add(writes, jumps))]
            squares = torch.stack([*chain.from_iterable(norms)]).double().cpu().square()
            sums.append(block.copy_weight * squares.view(3, -1))
        written_sq, jump_sq, moved_sq = self._space.ranks.sum(torch.cat(sums, dim=1))
        if not written_sq.any():
            return 0.0
        if not jump_sq.any():
            return inf
        along = (moved_sq - written_sq - jump_sq) / 2
        parts = iter(torch.where(jump_sq > 0, along / jump_sq, 0.0).tolist())  # t - 1 of each parameter
        for block, w, jump, plain in zip(blocks, present, self.candidate, self.plain, strict=True):
            jumps = block.pieces(jump.to(w))
            torch._foreach_sub_(block.pieces(w), torch._foreach_mul(jumps, [next(parts) for _ in jumps]))
            plain.add_(w)
        return sqrt(float(written_sq.sum() / jump_sq.sum()))

    def vectors(self) -> Vectors:
        """What a checkpoint holds in the length of the parameters."""
        return {"plain": self.plain, "candidate": self.candidate}

    def numbers(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides: the record, NaN if there is none."""
        record = [float(getattr(self.record, name)) for name in NUMBERS] if self.record else []
        return {"trial": padded(record, len(NUMBERS))}

    def load_numbers(self, entries: Entries) -> None:
        """Undo ``numbers``."""
        values = unpadded(entries["trial"])
        self.record = JumpRecord.from_numbers(values) if values else None
