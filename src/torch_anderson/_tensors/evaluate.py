"""Evaluating the user's loss in the middle of training, leaving no trace."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

LossFn = Callable[[], Any]
"""The user's function: the loss at the present weights."""


@contextmanager
def leaving_no_trace(params: Sequence[Tensor]) -> Iterator[None]:
    """Restore random state, gradients, and the buffers (BatchNorm) of all modules that are called in this thread.

    The random state belongs to the process: threads that draw random numbers at the same time are not kept apart.
    """
    devices = sorted({p.device.index for p in params if p.device.type == "cuda"})
    buffers: dict[tuple[int, str], tuple[torch.nn.Module, Tensor, Tensor]] = {}
    sharded: dict[int, Any] = {}  # they gather weights anew: they could still hold those of an earlier forward pass
    fsdp = sys.modules.get("torch.distributed.fsdp")
    thread = get_ident()

    def keep_buffers(module: torch.nn.Module, _: Any) -> None:
        if get_ident() != thread:  # the hook sees the modules of all threads
            return
        if fsdp is not None and isinstance(module, fsdp.FSDPModule) and id(module) not in sharded:
            sharded[id(module)] = module
            sharded[id(module)].reshard()
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and (id(owner), name) not in buffers:
                    buffers[id(owner), name] = (owner, buffer, buffer.detach().clone())

    state, device_states = torch.get_rng_state(), [torch.cuda.get_rng_state(index) for index in devices]
    gradients = [p.grad for p in params]
    hook = register_module_forward_pre_hook(keep_buffers)
    try:
        for p in params:
            p.grad = None
        # Compiled models run as written: our hook and frozen parameters would invalidate their compiled code.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        hook.remove()
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        for module in sharded.values():
            module.reshard()
        torch.set_rng_state(state)
        for index, device_state in zip(devices, device_states, strict=True):
            torch.cuda.set_rng_state(device_state, index)
        for (_, name), (owner, buffer, value) in buffers.items():
            owner._buffers[name] = buffer
            buffer.detach().copy_(value)


def evaluate(loss_fn: LossFn, params: Sequence[Tensor]) -> float:
    """The loss at the present parameters, in the caller's gradient mode (a PINN differentiates in its loss)."""
    with leaving_no_trace(params):
        return float(torch.as_tensor(loss_fn()).detach())
