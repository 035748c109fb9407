"""Evaluating the model in the middle of training, leaving no trace."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

LossFn = Callable[[], Any]


@contextmanager
def leaving_no_trace(params: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Restore random state, gradients, and the buffers (BatchNorm) of all modules that are called in this thread.

    Modules of ``fully_shard`` gather their weights anew: they could still hold those of an earlier forward pass.
    Yields a function that restores random state and buffers between two evaluations. The random state belongs to the
    process: threads that draw random numbers at the same time are not kept apart.
    """
    devices = _cuda_devices(params)
    buffers: dict[tuple[int, str], tuple[torch.nn.Module, Tensor, Tensor]] = {}
    sharded: dict[int, Any] = {}
    thread = get_ident()

    def keep_buffers(module: torch.nn.Module, _: Any) -> None:
        if get_ident() != thread:  # the hook sees the modules of all threads
            return
        if _is_sharded(module) and id(module) not in sharded:
            sharded[id(module)] = module
            sharded[id(module)].reshard()
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and (id(owner), name) not in buffers:
                    buffers[id(owner), name] = (owner, buffer, buffer.detach().clone())

    def rewind() -> None:
        for module in sharded.values():
            module.reshard()
        torch.set_rng_state(state)
        for index, device_state in zip(devices, device_states, strict=True):
            torch.cuda.set_rng_state(device_state, index)
        for (_, name), (owner, buffer, value) in buffers.items():
            owner._buffers[name] = buffer
            buffer.detach().copy_(value)

    state, device_states = torch.get_rng_state(), [torch.cuda.get_rng_state(index) for index in devices]
    gradients = [p.grad for p in params]
    hook = register_module_forward_pre_hook(keep_buffers)
    try:
        for p in params:
            p.grad = None
        with _as_written():
            yield rewind
    finally:
        hook.remove()
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        rewind()


def _is_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _as_written() -> AbstractContextManager[Any]:
    """Evaluate compiled models without their compiled code, which our hook and frozen parameters would invalidate."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _cuda_devices(params: Iterable[Tensor]) -> list[int]:
    return sorted({p.device.index for p in params if p.device.type == "cuda"})


@contextmanager
def without_graph(params: Sequence[Tensor]) -> Iterator[None]:
    """Build no graph back to the parameters; a function may still differentiate in its inputs, as a PINN does."""
    trained = [p for p in params if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def evaluate(loss_fn: LossFn, params: Sequence[Tensor]) -> float:
    """The loss at the present parameters, in the caller's gradient mode (a PINN differentiates in its loss)."""
    with leaving_no_trace(params):
        return float(torch.as_tensor(loss_fn()).detach())
