"""A pretended accelerator: tensors that say they are on the device ``pretend`` and are computed on the processor.

A tensor of the device wraps one of the host, which does the arithmetic, so results equal those of the processor bit
for bit. Otherwise the device behaves like a GPU: an operation on tensors of both devices raises, reading a number makes
the host wait, and a model that is moved keeps its parameters. ``counted`` counts what would cost time on a GPU.
Streams, pinned memory and speed are not pretended.

torch cannot remove a device, and consults it in many places once it is there (seeds, the default accelerator, threads
of autograd). Importing this module therefore changes nothing; ``on_device`` runs a test in another process, which has
the device.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib import import_module
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

NAME = "pretend"
HOST = torch.device("cpu")
SECONDS = 600
"""How long one test may take."""

NUMBERS = ("operations", "views", "waits", "uploads")

aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._foreach_copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
CHECKED = (aten._linalg_eigh.default, aten._linalg_svd.default, aten._linalg_check_errors.default)
"""Factorizations that read from the device whether they succeeded."""


# ---------------------------------------------------------------------------------------------------------- costs


@dataclass
class Cost:
    """What the device and its host have done."""

    operations: int = 0
    """Kernels launched, and copies to the host."""
    views: int = 0
    """Views of memory of the device, which take the host's time only."""
    waits: int = 0
    """Results that the host needed, and so waited for."""
    uploads: int = 0
    """Copies from the host."""
    names: Counter[str] = field(default_factory=Counter)
    """Calls of each operation, to find out where a cost comes from."""

    def __sub__(self, other: Cost) -> Cost:
        numbers = {name: getattr(self, name) - getattr(other, name) for name in NUMBERS}
        return Cost(**numbers, names=self.names - other.names)


_counting: list[Cost] = []


@contextmanager
def counted() -> Iterator[Cost]:
    """Count the cost of what is done within."""
    cost = Cost()
    _counting.append(cost)
    try:
        yield cost
    finally:
        _counting.remove(cost)


def allocated() -> int:
    """Bytes in use on the device."""
    gc.collect()
    storages = [found.raw.untyped_storage() for found in gc.get_objects() if type(found) is Pretended]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# -------------------------------------------------------------------------------------------------------- tensors


class Pretended(Tensor):
    """A tensor of the device."""

    raw: Tensor
    """The tensor of the host that stands for the device's memory."""

    @staticmethod
    def __new__(cls, raw: Tensor) -> Pretended:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        return Tensor._make_wrapper_subclass(cls, raw.size(), device=torch.device(NAME, 0), **layout)

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.raw!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file holds what ``torch.load(..., map_location="cpu")`` makes of a tensor of a GPU."""
        return self.raw.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """As for a tensor of a GPU: with its gradient, and views of one memory stay views of one memory."""
        if id(self) not in memo:
            copy = Pretended(deepcopy(self.raw, memo)).requires_grad_(self.requires_grad)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if hasattr(self, "_is_param") else copy
            memo[id(self)].grad = deepcopy(self.grad, memo)
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch refuses it for subclasses

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what a GPU refuses, count, compute on the host, and wrap results that are on the device."""
        kwargs = kwargs or {}
        _require_one_device(func, args, kwargs)
        to_host = _is_copy_to_host(func, args, kwargs)
        _count(func, args, to_host)
        result = func(*_mapped(_raw, args), **_mapped(_raw, kwargs))
        given = {id(_raw(tensor)): tensor for tensor in _tensors(args, kwargs)}
        return result if to_host else _mapped(lambda leaf: _wrapped(leaf, given), result)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """What torch's own functions for trees do, several times faster."""
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(function, item) for name, item in value.items()}
    return function(value)


def _tensors(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, values)
    return found


def _raw(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return HOST
    return leaf.raw if isinstance(leaf, Pretended) else leaf


def _wrapped(leaf: Any, given: dict[int, Tensor]) -> Any:
    """On the device; operations in place return the tensor that they were given."""
    if not isinstance(leaf, Tensor):
        return leaf
    return given[id(leaf)] if id(leaf) in given else Pretended(leaf)


def _on_host(*values: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors(*values) if not isinstance(tensor, Pretended)]


def _require_one_device(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise where a GPU would: it takes indices and scalars from the host, but no parts of lists and no results."""
    if func in COPIES:
        return
    others = _on_host(args[:1], args[2:], kwargs) if func in INDEXING else _on_host(args, kwargs)
    in_lists = _on_host([value for value in args if isinstance(value, (list, tuple))])
    is_list = func not in INDEXING and (in_lists or func.__name__.startswith("_foreach"))
    if others and (is_list or any(tensor.dim() for tensor in others) or _on_host(_written(func, args, kwargs))):
        raise RuntimeError(f"Expected all tensors to be on the same device, found {NAME}:0 and cpu in {func}.")


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that an operation writes to."""
    names = [argument.name for argument in func._schema.arguments if argument.is_write]
    by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return [by_name[name] for name in names if name in by_name]


def _is_copy_to_host(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func in COPIES:
        return bool(_on_host(args[0]))
    return kwargs.get("device") is not None and kwargs["device"].type == HOST.type


def _count(func: Any, args: Any, to_host: bool) -> None:
    is_upload = func in COPIES and not to_host and bool(_on_host(args[1]))
    for cost in _counting:
        cost.names[str(func)] += 1
        cost.uploads += is_upload
        cost.views += func.is_view
        cost.operations += not (is_upload or func.is_view)
        cost.waits += to_host or _is_read(func, args)


def _is_read(func: Any, args: Any) -> bool:
    """Whether the host needs numbers of the device: as a result, or to know the result's shape."""
    if func is aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    return func in CHECKED or bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})


# --------------------------------------------------------------------------------------------------------- device


def _make_device() -> None:
    """Add the device to torch, in this process and for good: its name, and the three operations that all others use
    to make tensors of it."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    for name, function in {"empty.memory_format": _empty, "empty_strided": _empty_strided, "_copy_from": _copy}.items():
        _library().impl(name, function, "PrivateUse1")
    torch.__future__.set_swap_module_params_on_conversion(True)  # else a model that is moved gets new parameters
    torch.set_num_threads(1)  # sums of several threads could differ in the last bit


@cache  # kernels live as long as their library
def _library() -> torch.library.Library:
    return torch.library.Library("aten", "IMPL")


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return Pretended(torch.empty(size, dtype=dtype, device=HOST))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return Pretended(torch.empty_strided(size, stride, dtype=dtype, device=HOST))


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Of numbers that Python has given: ``torch.tensor([1.0], device="pretend")``."""
    _raw(target).copy_(_raw(source))
    for cost in _counting:
        cost.uploads += 1
    return target


def move(model: torch.nn.Module) -> None:
    """Move a model to the device; as with a GPU, its parameters stay the same objects, in the same version."""
    params = tuple(model.parameters())
    versions = tuple(param._version for param in params)
    model.to(NAME)
    torch._C._autograd._unsafe_set_version_counter(params, versions)


# ------------------------------------------------------------------------------------------------- another process


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test so that it runs in the process that has the device; its arguments must be picklable."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        _process().submit(_run, test.__module__, test.__name__, arguments).result(timeout=SECONDS)

    supported = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    return pytest.mark.skipif(not supported, reason="this torch cannot have a device that is written in Python")(run)


@cache
def _process() -> ProcessPoolExecutor:
    """One process for all tests; spawned, since a fork of a process that has used autograd may hang."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_start)


def _start() -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    _make_device()


def _end_with_parent() -> None:
    """Nobody else ends this process if the one that runs the tests is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(module: str, test: str, arguments: dict[str, Any]) -> None:
    getattr(import_module(module), test).__wrapped__(**arguments)
