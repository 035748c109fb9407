"""Which parameters take part, and what tells that they are still those that they were."""

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .shards import real_numbers

Group = dict[str, Any]


def accelerated(groups: Sequence[Group]) -> list[tuple[int, Tensor]]:
    """(group index, parameter) for every parameter that takes part: trained, not empty, its group not opted out."""
    return [
        (index, param)
        for index, group in enumerate(groups)
        if group.get("anderson", True)
        for param in group["params"]
        if param.requires_grad and param.numel()
    ]


def refuse_sparse(params: Iterable[Tensor]) -> None:
    """Raise for gradients that have no flat form."""
    if any((gradient := p.grad) is not None and gradient.layout != torch.strided for p in params):
        raise RuntimeError(
            "Anderson does not support sparse gradients. Use dense ones (e.g. Embedding(sparse=False)), or opt the "
            "parameters' group out with {'params': ..., 'anderson': False}."
        )


def group_sizes(members: Iterable[tuple[int, Tensor]]) -> Counter[tuple[int, torch.dtype]]:
    """Numbers of each group and type, on all ranks: the same however the parameters lie."""
    sizes: Counter[tuple[int, torch.dtype]] = Counter()
    for index, param in members:
        sizes[index, param.dtype] += real_numbers(param)
    return sizes


def pointers(params: Iterable[Tensor]) -> list[int]:
    """Where the parameters lie in memory; of a DTensor, its local shard."""
    return [getattr(param, "_local_tensor", param).data_ptr() for param in params]


def look(groups: Sequence[Group]) -> list[Any]:
    """All that tells, at little cost, that the layout is what it was: another device or type means other memory."""
    seen: list[Any] = []
    for group in groups:
        params = group["params"]
        seen += [group.get("anderson", True), *map(id, params), *pointers(params), *map(_trained, params)]
    return seen


_trained = attrgetter("requires_grad")


class Layout(NamedTuple):
    """What the blocks depend on: when it changes, they are built anew."""

    members: list[Any]
    """Which parameters take part."""
    places: list[Any]
    """Their devices and types."""
    ranks: int
    """How many train together: there may be none but this one at first."""

    @classmethod
    def of(cls, groups: Sequence[Group], ranks: int) -> "Layout":
        """The layout as it is now."""
        members = accelerated(groups)
        return cls([(index, id(p)) for index, p in members], [(p.device, p.dtype) for _, p in members], ranks)
