"""The samples of one jump, and their loss.

The loss of single samples is a function of the model's outputs: squares, or any convex function. Around outputs z, a
loss with gradient g and Hessian H is |r + L'dz|^2 up to third order and a constant, with 2 L L' = H and 2 L r = g: the
generalised Gauss-Newton method. For squares, r = z and L = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from .term import Samples

Values = dict[str, Tensor]
"""Outputs (samples, p) by the names of terms."""
FLAT = 1e-10
"""Eigenvalues of H below this part of the largest one of the sample count as 0: the loss is straight there."""
OUTPUTS_AT_ONCE = 1_000_000
"""Outputs for which losses are evaluated at the same time."""


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
        return lengths.unsqueeze(1) ** torch.arange(5, device="cpu") @ powers

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

    @classmethod
    def joined(cls, parts: Sequence[Convex]) -> Convex:
        """The function for the samples of all parts."""
        rest = zip(*(part.rest for part in parts), strict=True)
        return cls(parts[0].function, parts[0].shape, tuple(map(torch.cat, rest)))

    def __getitem__(self, some: slice) -> Convex:
        return Convex(self.function, self.shape, tuple(x[some] for x in self.rest))

    def _one(self, output: Tensor, *rest: Tensor) -> Tensor:
        return self.function(output.reshape(self.shape), *rest).reshape(())

    def each(self, outputs: Tensor) -> Tensor:
        """The loss of each sample, from outputs (k, p)."""
        return torch.vmap(self._one)(outputs, *self.rest)

    def along(self, start: Tensor, slope: Tensor, bend: Tensor, lengths: Tensor) -> Tensor:
        """The sum of losses at outputs start + a slope + a^2 bend, for each of the lengths a."""
        some = lengths.to(start).split(max(1, OUTPUTS_AT_ONCE // max(start.numel(), 1)))
        return torch.cat([self._along(start, slope, bend, a.view(-1, 1, 1)) for a in some]).double().cpu()

    def _along(self, start: Tensor, slope: Tensor, bend: Tensor, lengths: Tensor) -> Tensor:
        # All samples at all lengths as one batch: a second vmap would refuse functions that write to the rest.
        count = len(lengths)
        outputs = (start + lengths * slope + lengths**2 * bend).flatten(0, 1)
        rest = tuple(x.expand(count, *x.shape).flatten(0, 1) for x in self.rest)
        return Convex(self.function, self.shape, rest).each(outputs).view(count, -1).sum(1)

    def expand(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """r (k, p), and L' as weights (p, k, p) of the outputs in it."""
        slope = torch.func.grad(self._one)
        bend = torch.func.jacrev(slope)  # twice backward: several losses of torch cannot go forward
        g, hessian = (torch.vmap(f)(outputs, *self.rest) for f in (slope, bend))
        eigenvalues, vectors = torch.linalg.eigh(hessian.double())
        slopes = torch.einsum("kpj,kp->kj", vectors, g.double())
        slopes = torch.where(slopes.abs() > FLAT * slopes.abs().amax(1, keepdim=True), slopes, 0.0)  # not by rounding
        straight = eigenvalues <= FLAT * eigenvalues[:, -1:]
        losses = self.each(outputs).double().unsqueeze(1)
        roots = (torch.where(straight, _secant(slopes * straight, losses), eigenvalues) / 2).sqrt()
        r = torch.where(roots > 0, slopes / (2 * roots), 0.0)
        return r, (vectors * roots.unsqueeze(1)).permute(2, 0, 1)


def _secant(slopes: Tensor, losses: Tensor) -> Tensor:
    """The curvature of the parabola with these slopes that ends at 0: for a straight loss, as Huber's at outliers.

    Without any curvature the sample would have no influence on a jump.
    """
    return torch.where(losses > 0, slopes.square().sum(1, keepdim=True) / (2 * losses), 0.0)


@dataclass
class Batch:
    """Samples of all terms; the first of each are fitted. Outputs (samples, p) are given by the names of terms."""

    samples: dict[str, Samples]
    fitted: dict[str, int]
    factors: dict[str, float]
    """Factors of the terms in the loss."""
    misfits: dict[str, Squares | Convex]
    first: dict[str, Samples] = field(init=False)
    """The samples that are fitted."""

    def __post_init__(self) -> None:
        self.first = {name: tuple(x[: self.fitted[name]] for x in samples) for name, samples in self.samples.items()}

    @property
    def others(self) -> int:
        """Number of samples that are not fitted."""
        return sum(len(x[0]) for x in self.samples.values()) - sum(self.fitted.values())

    def seen(self, values: Values) -> Values:
        """The outputs of fitted samples."""
        return {name: found[: self.fitted[name]] for name, found in values.items()}

    def sizes(self, values: Values) -> Values:
        """Sizes of residuals, sample by sample; the root of the loss if that is not a square."""
        return {name: self.misfits[name].each(outputs).clamp_min(0).sqrt() for name, outputs in values.items()}

    def losses(self, values: Values) -> Tensor:
        """The loss of all samples, of fitted ones, and of the others (0 if there are none); on the host."""
        found = torch.zeros(3, dtype=torch.float64, device="cpu")
        for name, outputs in values.items():
            each, fitted = self.misfits[name].each(outputs), self.fitted[name]
            parts = each, each[:fitted], each[fitted:]
            found += self.factors[name] * torch.stack([x.sum() / max(len(x), 1) for x in parts]).double().cpu()
        return found

    def along(self, start: Values, slope: Values, bend: Values, lengths: Tensor) -> Tensor:
        """The loss of all samples for outputs on parabolas, at each length."""
        found = torch.zeros_like(lengths)
        for name, misfit in self.misfits.items():
            factor = self.factors[name] / len(start[name])
            found += factor * misfit.along(start[name], slope[name], bend[name], lengths)
        return found

    def expand(self, seen: Values) -> tuple[Tensor, Values]:
        """r of the fitted samples, with |r|^2 as their loss nearby, and by term the coefficients of outputs in r."""
        right, sums = [], {}
        for name, outputs in seen.items():
            r, coefficients = self.misfits[name][: self.fitted[name]].expand(outputs)
            scale = sqrt(self.factors[name] / self.fitted[name])
            right.append(scale * r.reshape(-1))
            sums[name] = scale * coefficients
        return torch.cat(right), sums


def weighted_change(sums: Values, before: Values, after: Values) -> Tensor:
    """Sums of the changes of outputs with these coefficients, as one vector in the order of the rows."""
    found = [torch.einsum("jkp,kp->kj", sums[name], after[name] - before[name]) for name in sums]
    return torch.cat([x.reshape(-1) for x in found])
