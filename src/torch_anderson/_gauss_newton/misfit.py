"""The loss of single samples as a function of the model's outputs: squares, or any convex function.

Around outputs z, a loss with gradient g and Hessian H is |r + L'dz|^2 up to third order and a constant, with
2 L L' = H and 2 L r = g: the generalised Gauss-Newton method. For squares, r = z and L = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FLAT = 1e-10
"""Eigenvalues of H below this part of the largest one of the sample count as 0."""


class Squares:
    """The sum of squares."""

    def __getitem__(self, _: slice) -> Squares:
        return self

    def each(self, outputs: Tensor) -> Tensor:
        """The loss of each sample, from outputs (k, p)."""
        return outputs.square().sum(1)

    def along(self, start: Tensor, slope: Tensor, bend: Tensor, lengths: Tensor) -> Tensor:
        """The sum of losses at outputs start + a slope + a^2 bend, for each of the lengths a."""
        a, b, c = start.reshape(-1), slope.reshape(-1), bend.reshape(-1)
        powers = torch.stack([a @ a, 2 * a @ b, b @ b + 2 * a @ c, 2 * b @ c, c @ c]).cpu()
        return lengths.unsqueeze(1) ** torch.arange(5) @ powers

    def expand(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """r (k, p), and L' as weights (p, k, p) of the outputs in it."""
        count, size = outputs.shape
        eye = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
        return outputs, eye.unsqueeze(1).expand(size, count, size)


@dataclass
class Convex:
    """A convex function of the outputs, ``function(output, *rest)`` for one sample."""

    function: Callable[..., Tensor]
    shape: torch.Size
    """Shape of the output of one sample."""
    rest: tuple[Tensor, ...]
    """What the function gets besides: one row for each sample."""

    def __getitem__(self, some: slice) -> Convex:
        return Convex(self.function, self.shape, tuple(x[some] for x in self.rest))

    def _one(self, output: Tensor, *rest: Tensor) -> Tensor:
        return self.function(output.reshape(self.shape), *rest).reshape(())

    def each(self, outputs: Tensor) -> Tensor:
        """The loss of each sample, from outputs (k, p)."""
        return torch.vmap(self._one)(outputs, *self.rest)

    def along(self, start: Tensor, slope: Tensor, bend: Tensor, lengths: Tensor) -> Tensor:
        """The sum of losses at outputs start + a slope + a^2 bend, for each of the lengths a."""
        found = [self.each(start + a * slope + a**2 * bend).sum().double().cpu() for a in lengths.tolist()]
        return torch.stack(found)

    def expand(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """r (k, p), and L' as weights (p, k, p) of the outputs in it."""
        slope = torch.func.grad(self._one)
        bend = torch.func.jacrev(slope)  # twice backward: several losses of torch cannot go forward
        g, hessian = (torch.vmap(f)(outputs, *self.rest) for f in (slope, bend))
        eigenvalues, vectors = torch.linalg.eigh(hessian.double())
        roots = (eigenvalues / 2).clamp_min(FLAT * eigenvalues[:, -1:].abs()).sqrt()
        flat = roots <= 0
        inverse = torch.where(flat, 0.0, 0.5 / torch.where(flat, 1.0, roots))
        r = inverse * torch.einsum("kpj,kp->kj", vectors, g.double())
        return r, (vectors * roots.unsqueeze(1)).permute(2, 0, 1)
