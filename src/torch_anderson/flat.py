"""Parameters as flat vectors of real numbers, and back."""

import torch
from torch import Tensor

from .history import ReadMap


def flat_view(param: Tensor) -> Tensor:
    """All numbers of a parameter as one real vector, in the order of memory, sharing memory and version."""
    view = param.detach()
    if view.is_complex():
        view = torch.view_as_real(view)
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


def shaped_like(rows: Tensor, param: Tensor) -> Tensor:
    """A slice of flat rows seen in the parameter's shape (complex numbers as a last dimension of 2)."""
    like = torch.view_as_real(param.detach()) if param.is_complex() else param
    return rows.as_strided((*rows.shape[:-1], *like.shape), (*rows.stride()[:-1], *like.stride()))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real type in which vectors are kept: at least float32."""
    return torch.promote_types(dtype.to_real(), torch.float32)


def columns_of(vector: Tensor) -> ReadMap:
    """Reads ranges of columns of a vector."""
    return lambda a, b: vector[..., a:b]
