"""Vectors of the parameters' space as one flat tensor, in the order in which residuals take their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._ranks.placement import is_dtensor
from .._tensors.blocks import Space, Vector
from .._tensors.members import Group, members, shaped_like


def has_rows(groups: Sequence[Group]) -> bool:
    """Whether residuals can be differentiated sample by sample: by whole, real parameters on one device."""
    params = members(groups)
    whole = not any(is_dtensor(p) or p.is_complex() for p in params)
    return whole and len({p.device for p in params}) <= 1


def moving(groups: Sequence[Group]) -> list[Tensor]:
    """The parameters that a jump may change: those that take part, except groups with learning rate 0."""
    return members([group for group in groups if group.get("lr") != 0])


def double_vector(space: Space) -> Vector:
    """A new vector of zeros in float64, whatever the parameters' type."""
    return [part.double() for part in space.vector()]


def gathered(space: Space, vector: Vector, params: Sequence[Tensor]) -> Tensor:
    """The numbers of these parameters, one after the other, each in its own order (not that of memory)."""
    views = _views(space, vector)
    return torch.cat([views[p].reshape(-1) for p in params])


def scatter(space: Space, flat: Tensor, vector: Vector, params: Sequence[Tensor]) -> None:
    """Undo ``gathered``."""
    views = _views(space, vector)
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        views[p].copy_(part.view(p.shape))


def _views(space: Space, vector: Vector) -> dict[Tensor, Tensor]:
    """Parts of a vector in the shapes of the parameters."""
    return {
        p: shaped_like(part, p)
        for block, numbers in zip(space.blocks, vector, strict=True)
        for p, part in zip(block.params, numbers.split(block.sizes), strict=True)
    }
