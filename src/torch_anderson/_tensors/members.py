"""Which parameters take part, how one is seen as a flat vector, and the learning rates of their groups."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._ranks.placement import is_dtensor, placement_of
from .._ranks.ranks import Ranks

Group = dict[str, Any]


def takes_part(group: Group) -> bool:
    """Whether a group has not opted out."""
    return bool(group.get("anderson", True))


def members(groups: Iterable[Group]) -> list[Tensor]:
    """The parameters that take part: trained, not empty, their group not opted out."""
    return [p for group in groups if takes_part(group) for p in group["params"] if p.requires_grad and p.numel()]


def all_parameters(groups: Iterable[Group]) -> list[Tensor]:
    """Every parameter, in the order in which a state dict numbers them."""
    return [p for group in groups for p in group["params"]]


def refuse_sparse(params: Iterable[Tensor]) -> None:
    """Raise for gradients that have no flat form."""
    if any((gradient := p.grad) is not None and gradient.layout != torch.strided for p in params):
        raise RuntimeError(
            "Sparse gradients are not supported. Use dense ones (e.g. Embedding(sparse=False)), or opt the "
            "parameters' group out with {'params': ..., 'anderson': False}."
        )


# ---------------------------------------------------------------------------------------------------- flat vectors


def flat_view(param: Tensor) -> Tensor:
    """All numbers of a parameter as one real vector, in memory order, sharing memory and version."""
    view = real_view(param)
    if view.is_contiguous():
        return view.view(-1)
    if not _dense(view):
        raise ValueError(
            f"Invalid parameter of shape {tuple(param.shape)} and strides {param.stride()}: its numbers are not "
            "dense in memory. Make it contiguous before the optimizer is built."
        )
    return view.as_strided((view.numel(),), (1,))


def _dense(view: Tensor) -> bool:
    """Whether the strides, sorted, are those of a contiguous tensor."""
    expected = 1
    for stride, length in sorted(zip(view.stride(), view.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def real_view(param: Tensor) -> Tensor:
    """The parameter without a graph; complex numbers as a last dimension of 2."""
    return torch.view_as_real(param.detach()) if param.is_complex() else param.detach()


def shaped_like(rows: Tensor, param: Tensor) -> Tensor:
    """A slice of flat rows seen in the parameter's shape (complex numbers as a last dimension of 2)."""
    like = real_view(param)
    return rows.as_strided((*rows.shape[:-1], *like.shape), (*rows.stride()[:-1], *like.stride()))


def real_numbers(param: Tensor) -> int:
    """Number of real numbers of a parameter, on all ranks."""
    return param.numel() * (2 if param.is_complex() else 1)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real type in which vectors are kept: at least float32."""
    return torch.promote_types(dtype.to_real(), torch.float32)


# ------------------------------------------------------------------------------------------------------ acceptance


def check_base(base: Any, group: Any) -> None:
    """Raise for optimizers that cannot be wrapped."""
    if not isinstance(base, Optimizer):
        raise TypeError(f"Invalid base: {type(base).__name__}. Allowed: an instance of torch.optim.Optimizer.")
    if isinstance(base, torch.optim.SparseAdam):
        raise ValueError("Invalid base: SparseAdam. Allowed: an optimizer for dense gradients.")
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(base).__mro__):
        raise ValueError(
            "Invalid base: ZeroRedundancyOptimizer, which hides its state from checkpoints. Allowed: the optimizer "
            "inside it; use fully_shard to shard its state, or Storage(shard=True) for the history."
        )
    check_parameters(base.param_groups, group)


def check_parameters(groups: Sequence[Group], group: Any) -> None:
    """Raise for parameters that cannot be seen as flat vectors, or that lie on other ranks than the group's."""
    if any(other.get("differentiable") for other in groups):
        raise ValueError("Invalid base: differentiable=True. Allowed: False, as a jump has no gradient.")
    ranks = Ranks(group)
    params: list[Any] = members(groups)
    for param in params:
        flat_view(placement_of(param, ranks, shard=False).local(param))
    largest = max((p.device_mesh.size() for p in params if is_dtensor(p)), default=ranks.size)
    if largest != ranks.size:
        raise ValueError(
            f"Invalid parameters: they lie on a mesh of {largest} of {ranks.size} ranks. Give the ranks that train "
            "this part of the model together (e.g. a pipeline stage) with process_group=..."
        )


def account(options: Any, groups: Sequence[Group]) -> dict[str, str]:
    """What has to be equal on all ranks, by name."""
    found = {f"option {name}": _described(value) for name, value in vars(options).items() if name != "process_group"}
    params = members(groups)
    found["the number of parameters"] = str(len(params))
    index = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    for i, param in enumerate(params):
        found[f"parameter {i}"] = f"shape {tuple(param.shape)} of {param.dtype} in group {index[id(param)]}" + _placed(
            param
        )
    found["the values of the parameters"] = f"checksum {checksum([p for p in params if not is_dtensor(p)])}"
    return found


def _described(value: Any) -> str:
    """Equal on ranks that mean the same: a function may have another address, a device another number."""
    if isinstance(value, torch.device):
        return value.type
    if is_dataclass(value):
        named = (f"{field.name}={_described(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({', '.join(named)})"
    if callable(value):
        known = value if hasattr(value, "__qualname__") else type(value)
        return f"{known.__module__}.{known.__qualname__}"
    return repr(value)


def _placed(param: Any) -> str:
    if not is_dtensor(param):
        return ""
    absent = param.device_mesh.get_coordinate() is None
    return f" on {param.placements}" + " of a mesh without this rank" * absent


def checksum(params: Sequence[Tensor]) -> int:
    """Checksum of all bits and their positions.

    >>> checksum([torch.tensor([1.0, 2.0])]) == checksum([torch.tensor([2.0, 1.0])])
    False
    """
    total = 0
    for param in params:
        for piece in flat_view(param).split(1 << 20):
            bits = piece.contiguous().view(torch.uint8).long()
            positions = torch.arange(1, len(bits) + 1, device=bits.device)
            total = (31 * total + int(((bits + 1) * positions).sum())) % (1 << 61)
    return total
