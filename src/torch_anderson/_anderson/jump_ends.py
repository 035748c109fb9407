"""Both ends of a pending jump, by which it is taken back although other code has written to the weights since."""

from math import inf, sqrt

import torch

from .._tensors.blocks import Space, Vector

FARTHEST = 1.5
"""Longest write, in units of the jump, after which a jump is taken back; after longer ones, other weights were loaded.
Writes of constraints are about as long as the jump that they cut off."""


class JumpEnds:
    """The weights without the jump and with it, in the type of the parameters."""

    def __init__(self, space: Space):
        self._space = space
        self.plain = space.vector()
        """Where the weights would be without the jump: at the end of the base's step."""
        self.candidate = space.vector()
        """The weights as the jump has left them."""

    def separate_writes(self, present: Vector) -> float:
        """Add to the plain point what other code has written to the weights since the jump, and measure it.

        The ``present`` weights are the plain point + t J + e, J the jump from there, which ``candidate`` then holds,
        and e orthogonal to J, which ``present`` then holds. They have to lose t J, not J: a write such as
        ``w.mul_(0.999)`` changes a long jump by more than it would change the plain point. Returns the length of the
        write, |(t - 1) J + e| / |J|.
        """
        moves = list(zip(present, self.candidate, self.plain, strict=True))
        for w, candidate, plain in moves:
            w.sub_(candidate)
            candidate.sub_(plain)
        products = [torch.stack([w @ w, w @ j.to(w), (j @ j).to(w)]) for w, j, _ in moves]
        written_sq, along, jump_sq = self._space.add_up(products).tolist()
        if not written_sq:
            return 0.0
        if not jump_sq:
            return inf
        part = along / jump_sq
        for w, j, plain in moves:
            plain.add_(w.sub_(j, alpha=part))
        return sqrt(written_sq / jump_sq)
