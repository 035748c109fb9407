"""The loss of single samples as a function of their outputs z, and the samples of one jump with their losses.

A loss is a square or any convex function. Around outputs z, a loss with gradient g and Hessian H is |r + L'dz|^2 up to
third order and a constant, with 2 L L' = H and 2 L r = g: the generalised Gauss-Newton method. For squares, r = z and
L = 1. In the code r is ``rhs``, and L' is ``loss_roots``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from .objective import Samples

Outputs = dict[str, Tensor]
"""Outputs (samples, p) by the names of terms."""
FLAT = 1e-10
"""Eigenvalues of H below this part of the largest one of the sample count as 0: the loss is straight there."""
OUTPUTS_AT_ONCE = 1_000_000
"""Outputs for which losses are evaluated at the same time."""


class Squares:
    """The sum of squares."""

    def each(self, outputs: Tensor) -> Tensor:
        """The loss of each sample, from outputs (k, p)."""
        return outputs.square().sum(1)

    def along(self, start: Tensor, slope: Tensor, curvature: Tensor, lengths: Tensor) -> Tensor:
        """The sum of losses at outputs start + a slope + a^2 curvature, for each of the lengths a."""
        x, y, z = start.reshape(-1), slope.reshape(-1), curvature.reshape(-1)
        powers = torch.stack([x @ x, 2 * x @ y, y @ y + 2 * x @ z, 2 * y @ z, z @ z]).cpu()
        return lengths.unsqueeze(1) ** torch.arange(5, device="cpu") @ powers

    def expand(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """r (k, p), and L' as weights (p, k, p) of the outputs in it, of the first k samples."""
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
    """The further arguments of the function: one row for each sample."""

    def _one(self, output: Tensor, *rest: Tensor) -> Tensor:
        return self.function(output.reshape(self.shape), *rest).reshape(())

    def each(self, outputs: Tensor) -> Tensor:
        """The loss of each sample, from outputs (k, p)."""
        return torch.vmap(self._one)(outputs, *self.rest)

    def along(self, start: Tensor, slope: Tensor, curvature: Tensor, lengths: Tensor) -> Tensor:
        """The sum of losses at outputs start + a slope + a^2 curvature, for each of the lengths a."""
        sums = []
        for some in lengths.to(start).split(max(1, OUTPUTS_AT_ONCE // max(start.numel(), 1))):
            # All samples at all lengths as one batch: a second vmap would refuse functions that write to the rest.
            count, a = len(some), some.view(-1, 1, 1)
            outputs = (start + a * slope + a**2 * curvature).flatten(0, 1)
            rest = tuple(x.expand(count, *x.shape).flatten(0, 1) for x in self.rest)
            sums.append(torch.vmap(self._one)(outputs, *rest).view(count, -1).sum(1))
        return torch.cat(sums).double().cpu()

    def expand(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """r (k, p), and L' as weights (p, k, p) of the outputs in it, of the first k samples."""
        gradient = torch.func.grad(self._one)
        hessian = torch.func.jacrev(gradient)  # twice backward: several losses of torch cannot go forward
        given = (outputs, *(x[: len(outputs)] for x in self.rest))
        g, h, each = (torch.vmap(f)(*given).double() for f in (gradient, hessian, self._one))
        eigenvalues, vectors = torch.linalg.eigh(h)
        slopes = torch.einsum("kpj,kp->kj", vectors, g)
        slopes = torch.where(slopes.abs() > FLAT * slopes.abs().amax(1, keepdim=True), slopes, 0.0)  # not by rounding
        # Without any curvature, as Huber's loss at outliers, a sample would have no influence on a jump: there it is
        # that of the parabola with the same slope that falls to 0.
        straight, losses = eigenvalues <= FLAT * eigenvalues[:, -1:], each.unsqueeze(1)
        steepness = (slopes * straight).square().sum(1, keepdim=True)
        secant = torch.where(losses > 0, steepness / (2 * losses), 0.0)
        roots = (torch.where(straight, secant, eigenvalues) / 2).sqrt()
        r = torch.where(roots > 0, slopes / (2 * roots), 0.0)
        return r, (vectors * roots.unsqueeze(1)).permute(2, 0, 1)


@dataclass
class Batch:
    """The samples of one jump. Samples, outputs and numbers are given by the names of terms."""

    samples: dict[str, Samples]
    """All samples; the first of each term are fitted."""
    fitted: dict[str, int]
    """Numbers of samples that are fitted."""
    weights: dict[str, float]
    """Factors of the terms in the loss."""
    losses: dict[str, Squares | Convex]

    def __post_init__(self) -> None:
        self.fitted_samples = {
            name: tuple(x[: self.fitted[name]] for x in samples) for name, samples in self.samples.items()
        }
        self.count = sum(len(samples[0]) for samples in self.samples.values())
        """Number of all samples."""
        self.fitted_count = sum(self.fitted.values())

    def residual_sizes(self, outputs: Outputs) -> dict[str, Tensor]:
        """|r| of each sample: the square root of its loss."""
        return {name: self.losses[name].each(z).clamp_min(0).sqrt() for name, z in outputs.items()}

    def loss(self, outputs: Outputs) -> Tensor:
        """The loss of all samples, of fitted ones, and of the others (0 if there are none); on the host."""
        total = torch.zeros(3, dtype=torch.float64, device="cpu")
        for name, z in outputs.items():
            each, fitted = self.losses[name].each(z), self.fitted[name]
            parts = each, each[:fitted], each[fitted:]
            total += self.weights[name] * torch.stack([x.sum() / max(len(x), 1) for x in parts]).double().cpu()
        return total

    def along(self, start: Outputs, slope: Outputs, curvature: Outputs, lengths: Tensor) -> Tensor:
        """The loss of all samples for outputs on parabolas, at each length."""
        total = torch.zeros_like(lengths)
        for name, loss in self.losses.items():
            factor = self.weights[name] / len(start[name])
            total += factor * loss.along(start[name], slope[name], curvature[name], lengths)
        return total

    def expand(self, fitted_outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        """r of the fitted samples, with |r|^2 as their loss nearby, and by term L', the weights of outputs in r."""
        rhs, loss_roots = [], {}
        for name, outputs in fitted_outputs.items():
            r, roots = self.losses[name].expand(outputs)
            scale = sqrt(self.weights[name] / self.fitted[name])
            rhs.append(scale * r.reshape(-1))
            loss_roots[name] = scale * roots
        return torch.cat(rhs), loss_roots
