"""Counts what is kept, sent and multiplied, as torch's dispatcher sees it."""

from collections import Counter
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("c10d", "_c10d_functional")
MATRIX_PRODUCTS = {"aten::mm": 0, "aten::mv": 0, "aten::addmv": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Operation -> position of the two factors among its arguments."""
NEW = ("aten::zeros", "aten::empty")
"""Operations that make a tensor from nothing."""


class Allocating(TorchDispatchMode):
    """Adds up the bytes of new tensors on one type of device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Add up what the operation makes."""
        made = function(*args, **(kwargs or {}))
        if function._schema.name in NEW and made.device.type == self.device:
            self.bytes += made.nbytes
        return made


class Counting(TorchDispatchMode):
    """Counts collectives and the bytes a rank gives to them, and the flops of matrix products by their type."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operation."""
        name = function._schema.name
        if function.namespace in COLLECTIVES:
            kind = "gather" if "gather" in name else "sum" if "reduce" in name else name
            self.collectives[kind] += 1
            self.sent[kind] += _given(kind, args)
        elif name in MATRIX_PRODUCTS:
            first = MATRIX_PRODUCTS[name]
            left, right = args[first : first + 2]
            self.flops[left.dtype] += 2 * prod(left.shape) * (right.shape[-1] if right.dim() > 1 else 1)
        return function(*args, **(kwargs or {}))

    def as_dict(self) -> dict[str, int]:
        """All counts by name."""
        return {
            "all-reduces": self.collectives["sum"],
            "bytes given to the all-reduce": self.sent["sum"],
            "all-gathers": self.collectives["gather"],
            "bytes given to the all-gather": self.sent["gather"],
            "other collectives": self.collectives.total() - self.collectives["sum"] - self.collectives["gather"],
            "flops in float64": self.flops[torch.float64],
            "flops in float32": self.flops[torch.float32],
        }


def _given(kind: str, args: Any) -> int:
    """Bytes of the tensors that a rank gives; the first argument of a gather is what it fills."""
    given = args[1] if kind == "gather" else args[0]
    tensors = [given] if isinstance(given, Tensor) else given
    return sum(tensor.nbytes for tensor in tensors)
