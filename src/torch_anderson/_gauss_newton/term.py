"""``Term``: a function of single samples whose loss is minimised, and where the samples come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from .._options import integer, invalid, real

Samples = tuple[Tensor, ...]
"""Samples of one term: tensors whose first dimension counts them."""
ADVICE = (
    "In the term {name!r}. Its function gets u and one sample, and is evaluated for all samples at once with "
    "torch.vmap: differentiate with torch.func (grad, jvp, jacrev, hessian) instead of torch.autograd.grad, choose "
    "with torch.where instead of if, and do not convert tensors to numbers. Samples and constants need the type and "
    "device of the model. For a model that vmap cannot evaluate, use Anderson with an ordinary closure."
)


@dataclass(frozen=True, eq=False)
class Term:
    """A term of an ``Objective``: weight times the mean over samples of the sum of squared residuals, or of a loss.

    Args:
        function: the residual at one sample, ``function(u, sample)``; returns a tensor, or a tuple or dictionary of
            tensors. ``u`` is the model as a function of one point. If samples consist of
            several tensors, the function gets one row of each, ``function(u, point, value)``.
        samples: a function that gets a number and returns exactly as many samples, or fixed samples: a tensor, or a
            tuple of tensors, whose first dimension counts the samples.
        count: number of samples to draw; only if ``samples`` is a function.
        weight: factor of the term in the loss.
        loss: None for squares, or a convex function of one sample's output, such as
            ``torch.nn.functional.cross_entropy``. It gets everything that ``function`` returns: the model's output
            first, then data such as the class.
        retain: whether samples whose residual is above the mean are kept for the next evaluation, while the others
            are drawn again; only if ``samples`` is a function. None: only for jumps, because it makes other methods
            worse, and only for squares. Use False for noisy data: residuals that cannot vanish would stay.

    >>> def decay(u, t):
    ...     return torch.func.grad(u)(t).sum() + u(t)
    >>> inside = Term(decay, lambda count: torch.rand(count, 1), count=100, weight=10.0)
    >>> data = Term(lambda u, t, value: u(t) - value, (torch.rand(20, 1), torch.rand(20)))
    >>> Term(lambda u, point: u(point), torch.zeros(10, 2), count=5)
    Traceback (most recent call last):
    ValueError: Invalid count: 5. Allowed: None for samples that are given.
    """

    function: Callable[..., Any]
    samples: Callable[[int], Any] | Tensor | Samples
    _: KW_ONLY
    count: int | None = None
    weight: float = 1.0
    loss: Callable[..., Tensor] | None = None
    retain: bool | None = None
    fixed: bool = field(init=False, repr=False)
    """Whether the samples are fixed."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Invalid function: {self.function!r}. Allowed: a function of u and one sample.")
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"Invalid loss: {self.loss!r}. Allowed: None for squares, or a function of one output.")
        weight = real("weight", self.weight, lambda x: x > 0 and isfinite(x), "a finite number above 0")
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "fixed", not callable(self.samples))
        if callable(self.samples):
            if self.count is None:
                raise ValueError("`count` is needed if samples are drawn by a function.")
            object.__setattr__(self, "count", integer("count", self.count, 1))
        elif self.count is not None:
            raise invalid("count", self.count, "None for samples that are given")
        else:
            object.__setattr__(self, "samples", checked_samples("samples", self.samples))

    @property
    def stays(self) -> bool:
        """Whether jumps retain samples; other losses than squares rarely vanish at all samples."""
        return self.loss is None if self.retain is None else self.retain

    def draw(self, name: str, count: int | None = None) -> Samples:
        """The samples for one evaluation."""
        if not callable(self.samples):
            return self.samples  # type: ignore[return-value]
        wanted: int = count or self.count  # type: ignore[assignment]
        return checked_samples(f"what the sampler of {name!r} returned", self.samples(wanted), wanted)

    def outputs(self, name: str, model: nn.Module, sample: Samples, one: Tensor | None = None) -> tuple[Tensor, ...]:
        """What the function returns at one sample: residuals, or what the loss depends on.

        ``one`` makes all inputs of the model depend on the sample.
        """

        def u(*point: Tensor) -> Tensor:
            if one is not None:
                point = tuple(x * one if x.is_floating_point() else x for x in point)
            return at_point(model, *point)

        found = tensors(name, self.function(u, *sample))
        smooth = found if self.loss is None else found[:1]
        if not any(x.numel() for x in smooth):
            raise TypeError(f"The function of {name!r} returned no number. Return at least one residual.")
        if not all(x.is_floating_point() or x.is_complex() for x in smooth):
            raise TypeError(f"The function of {name!r} returned integers. Return residuals in floating point.")
        return found

    def vector(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """The outputs at one sample that the loss depends on, as one vector."""
        return torch.cat([real_view(x).reshape(-1) for x in (outputs if self.loss is None else outputs[:1])])

    def each(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """The loss of each sample, from the outputs of all."""
        if self.loss is not None:
            found = torch.vmap(self.loss)(*outputs)
            if found.numel() != len(found):
                raise TypeError(f"A loss returned {found.numel() // len(found)} numbers. Return one for each sample.")
            return found.reshape(-1)
        return torch.stack([real_view(x).square().reshape(len(x), -1).sum(1) for x in outputs]).sum(0)


def at_point(model: nn.Module, *point: Tensor) -> Tensor:
    """The model at one point: called with a batch of one; a single output is a scalar."""
    outputs = model(*(x.unsqueeze(0) for x in point))
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        raise TypeError(f"The model returned {kind}. Give Objective a module that returns one tensor.")
    found = outputs.squeeze(0)
    return found.reshape(()) if found.numel() == 1 else found


def checked_samples(what: str, found: Any, count: int | None = None) -> Samples:
    """Samples as a tuple of tensors of one length; raises TypeError or ValueError that says what was found."""
    tensors = (found,) if isinstance(found, Tensor) else found
    if not isinstance(tensors, (tuple, list)) or not tensors or not all(isinstance(x, Tensor) for x in tensors):
        raise TypeError(f"Invalid {what}: {type(found).__name__}. Allowed: a tensor, or a tuple of tensors.")
    if any(x.dim() == 0 for x in tensors) or len({len(x) for x in tensors}) != 1 or not len(tensors[0]):
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"Invalid {what}: shapes {shapes}. Allowed: one row for each of at least one sample.")
    if count is not None and len(tensors[0]) != count:
        raise ValueError(f"Invalid {what}: {len(tensors[0])} samples. Allowed: as many as asked for, {count}.")
    return tuple(x.detach() for x in tensors)  # many make points that require gradients


def tensors(name: str, found: Any) -> tuple[Tensor, ...]:
    """What a term's function returned, as a tuple of tensors."""
    values = found.values() if isinstance(found, dict) else found if isinstance(found, (tuple, list)) else (found,)
    found = tuple(values)
    if not found or not all(isinstance(x, Tensor) for x in found):
        kinds = ", ".join(type(x).__name__ for x in found) or "nothing"
        raise TypeError(f"The function of {name!r} returned {kinds}. Return a tensor, or several: the residuals.")
    return found


def real_view(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
