"""Evaluating a loss in the middle of training, leaving no trace."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.swa_utils import update_bn

LossFn = Callable[[], Any]


@contextmanager
def leaving_no_trace(params: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Random state, buffers of the modules that are called (BatchNorm) and gradients end as they began. Modules of
    ``fully_shard`` gather their weights anew: they could still have those of an earlier forward pass.

    Yields a function that sets random state and buffers back to how they were, between two evaluations.
    """
    devices = _cuda_devices(params)
    buffers: dict[tuple[int, str], tuple[torch.nn.Module, Tensor, Tensor]] = {}

    sharded: dict[int, Any] = {}

    def keep_buffers(module: torch.nn.Module, _: Any) -> None:
        if is_sharded(module) and id(module) not in sharded:
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


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@contextmanager
def resharded(model: torch.nn.Module | None) -> Iterator[None]:
    """What ``fully_shard`` has gathered of a model is gathered anew, within and afterwards."""
    modules: list[Any] = [module for module in model.modules() if is_sharded(module)] if model else []
    for module in modules:
        module.reshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


def _as_written() -> AbstractContextManager[Any]:
    """Evaluates compiled models without their compiled code: for our hook and for parameters that want no gradient they
    would be compiled anew, time and again."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _cuda_devices(params: Iterable[Tensor]) -> list[int]:
    return sorted({p.device.index for p in params if p.device.type == "cuda"})


@contextmanager
def without_graph(params: Sequence[Tensor]) -> Iterator[None]:
    """No graph back to the parameters; a function may still differentiate in its inputs, as a PINN does."""
    trained = [p for p in params if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


@contextmanager
def batch_statistics(model: torch.nn.Module | None, batches: Iterable[Any] | None) -> Iterator[None]:
    """Statistics of BatchNorm layers from these inputs, at the present weights; those of training come back."""
    if model is None or batches is None:
        yield
        return
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        with _behaving_alike(model), torch.random.fork_rng(_cuda_devices(model.parameters())):  # dropout draws
            update_bn(batches, model)
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.detach().copy_(kept[name])


@contextmanager
def _behaving_alike(model: torch.nn.Module) -> Iterator[None]:
    """Modes and momenta of all layers end as they began: some of them may be frozen in a model that trains."""
    kept = [(module, module.training, getattr(module, "momentum", None)) for module in model.modules()]
    try:
        yield
    finally:
        for module, training, momentum in kept:
            module.training = training
            if hasattr(module, "momentum"):
                module.momentum = momentum  # type: ignore[assignment]


def evaluate(loss_fn: LossFn, params: Sequence[Tensor]) -> float:
    """The loss at the present parameters, in the caller's gradient mode (a PINN differentiates in its loss)."""
    with leaving_no_trace(params):
        return float(torch.as_tensor(loss_fn()).detach())
