"""Evaluating a loss in the middle of training, leaving no trace."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

LossFn = Callable[[], Any]


@contextmanager
def leaving_no_trace(params: Sequence[Tensor]) -> Iterator[None]:
    """Random state, buffers of the modules that are called (BatchNorm) and gradients end as they began."""
    devices = sorted({p.device.index for p in params if p.device.type == "cuda"})
    buffers: dict[tuple[int, str], tuple[torch.nn.Module, Tensor, Tensor]] = {}

    def keep_buffers(module: torch.nn.Module, _: Any) -> None:
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and (id(owner), name) not in buffers:
                    buffers[id(owner), name] = (owner, buffer, buffer.detach().clone())

    gradients = [p.grad for p in params]
    hook = register_module_forward_pre_hook(keep_buffers)
    try:
        with torch.random.fork_rng(devices=devices):
            for p in params:
                p.grad = None
            yield
    finally:
        hook.remove()
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        for (_, name), (owner, buffer, value) in buffers.items():
            owner._buffers[name] = buffer
            buffer.detach().copy_(value)


def evaluate(loss_fn: LossFn, params: Sequence[Tensor]) -> float:
    """The loss at the present parameters, in the caller's gradient mode (a PINN differentiates in its loss)."""
    with leaving_no_trace(params):
        return float(torch.as_tensor(loss_fn()).detach())
