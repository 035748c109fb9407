"""Evaluating the user's functions in the middle of training, leaving no trace: a loss, or outputs at any weights."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import sqrt
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_pre_hook

from .._ranks.ranks import Ranks
from .blocks import Space, Vector

LossFn = Callable[[], Any]
OutputsFn = Callable[[], Any]
"""The user's functions: the loss, or a forward pass, at the present weights."""
Loss = str | Callable[..., Tensor]
WROTE = "outputs changed the parameters; it must only evaluate the model"
INTEGERS = "outputs returned integers as predictions or residuals; return what the model computes before it rounds"
HALF = 1e-4
"""Outputs that are rounded more coarsely are in half precision."""


@contextmanager
def leaving_no_trace(params: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Restore random state, gradients, and the buffers (BatchNorm) of all modules that are called in this thread.

    Yields a function that restores random state and buffers between two evaluations. The random state belongs to the
    process: threads that draw random numbers at the same time are not kept apart.
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
        # Compiled models run as written: our hook and frozen parameters would invalidate their compiled code.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield rewind
    finally:
        hook.remove()
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        rewind()


def evaluate(loss_fn: LossFn, params: Sequence[Tensor]) -> float:
    """The loss at the present parameters, in the caller's gradient mode (a PINN differentiates in its loss)."""
    with leaving_no_trace(params):
        return float(torch.as_tensor(loss_fn()).detach())


# --------------------------------------------------------------------------------------- what a forward pass returns


class Unusable(Exception):
    """Outputs that cannot be used, for reasons that depend on data; ``cause`` is the name that is counted."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@contextmanager
def agreeing(ranks: Ranks) -> Iterator[None]:
    """Raise on all ranks, or on none: what one rank cannot use, no rank uses."""
    if ranks.size == 1:
        yield
        return
    found: Exception | None = None
    try:
        yield
    except Exception as problem:
        found = problem
    # Outputs that are not finite are less severe: they only show that these weights are no better; others may be.
    severity = 0.0 if found is None else 1.0 if getattr(found, "cause", "") == "nonfinite_outputs" else 2.0
    worst = float(ranks.largest(torch.tensor(severity)))
    if found is not None and worst == severity:
        raise found
    if worst:
        cause = "nonfinite_outputs" if worst == 1.0 else "other_rank"
        raise Unusable(cause, "outputs could not be used on another rank")


class Outputs(NamedTuple):
    """The model's outputs on a batch as one vector, and the loss as a function of such vectors."""

    values: Tensor
    shapes: tuple[torch.Size, ...]
    """Shapes of the tensors that were returned: they must not change between evaluations."""
    convex: Callable[[Tensor], Tensor] | None
    """The loss; None for the sum of squares."""
    eps: float
    """Largest rounding unit of the tensors that were returned."""

    def loss(self) -> float:
        """The loss at these outputs."""
        values = self.values.double()
        return float(self.convex(values) if self.convex else values.square().sum())


def read(loss: Loss, found: Any) -> Outputs:
    """Make one vector of what the user's function returned; raises ``TypeError`` or ``Unusable``."""
    tensors = [found] if isinstance(found, Tensor) else list(found) if isinstance(found, (tuple, list)) else []
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"outputs must return tensors, e.g. (predictions, targets), not {type(found).__name__}.")
    if loss in ("mse", "cross_entropy") and len(tensors) != 2:
        raise TypeError(f"outputs must return (predictions, targets) for loss={loss!r}, not {len(tensors)} tensors.")
    tensors = [tensor.detach() for tensor in tensors]
    integer = [not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors]
    smooth = len(tensors) if loss == "residual" else 1
    if any(integer[:smooth]):
        raise Unusable("integer_outputs", INTEGERS)
    if all(tensor.dim() == 0 for tensor in tensors[:smooth]):
        raise TypeError(
            "outputs returned a number, such as a loss. Return predictions or residuals: one entry for each sample."
        )
    values, convex = _convex(loss, tensors) if callable(loss) or loss == "cross_entropy" else _squares(loss, tensors)
    if not values.isfinite().all():
        raise Unusable("nonfinite_outputs", "outputs returned numbers that are not finite")
    eps = max(torch.finfo(tensor.dtype).eps for tensor, i in zip(tensors, integer, strict=True) if not i)
    return Outputs(values, tuple(tensor.shape for tensor in tensors), convex, eps)


def _squares(loss: Loss, tensors: Sequence[Tensor]) -> tuple[Tensor, None]:
    """One vector, whose squares add up to the tensors' means of squares; complex numbers as pairs."""
    if loss == "mse":
        predictions, targets = tensors
        if predictions.shape != targets.shape:
            shapes = f"{tuple(predictions.shape)} and targets of shape {tuple(targets.shape)}"
            raise TypeError(f"outputs returned predictions of shape {shapes}. Give both the same shape.")
        tensors = [predictions - targets]
    real = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]
    counts = [max(x.numel(), 1) for x in tensors]
    return torch.cat([_working(x).reshape(-1) / sqrt(n) for x, n in zip(real, counts, strict=True)]), None


def _convex(loss: Loss, tensors: Sequence[Tensor]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    predictions, *rest = tensors
    values = _working(predictions).reshape(-1).clone()  # a model may use the memory of its outputs again
    given: Callable[..., Tensor] = loss if callable(loss) else cross_entropy
    # The user's function gets the type that it is made for: it may hold tensors, such as weights of classes.
    dtype = values.dtype if callable(loss) else torch.float64
    return values, lambda values: given(values.to(dtype).view(predictions.shape), *rest).double()


def _working(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# ---------------------------------------------------------------------------------------------- at displaced weights


class Span(NamedTuple):
    """Directions: some rows of a matrix for each block, scaled to unit length."""

    rows: Sequence[Tensor]
    lengths: Mapping[int, float]
    """Lengths of the rows in use, by their places in the matrices."""
    idle: Sequence[Sequence[slice]]
    """Columns of each block in which no direction goes."""

    def vector(self, coefficients: Mapping[int, float]) -> Vector:
        """The sum of directions times their coefficients; infinite where numbers are too large."""
        weights = [x / self.lengths[i] for i, x in coefficients.items()]
        total = [torch.zeros_like(rows[0]) for rows in self.rows]
        for part, rows, idle in zip(total, self.rows, self.idle, strict=True):
            for i, weight in zip(coefficients, torch.tensor(weights, dtype=part.dtype).to(part.device), strict=True):
                part.addcmul_(rows[i], weight)
            for columns in idle:
                part[columns].zero_()
        return total


@dataclass
class Probe:
    """The user's function at displaced weights: always with the same random numbers and buffers, without a graph."""

    function: OutputsFn
    kind: Loss
    space: Space
    start: Vector
    """The weights after the plain step."""
    params: Sequence[Tensor]
    rewind: Callable[[], None]
    counts: Counter[str]
    point: Vector
    """The weights of the latest evaluation."""
    end: Vector
    """The weights that stay when all is done."""
    count: int = 0
    """Evaluations so far."""
    shapes: tuple[torch.Size, ...] | None = None

    def write(self, point: Vector) -> None:
        """Set the weights."""
        for block, part in zip(self.space.blocks, point, strict=True):
            torch._foreach_copy_(block.views, part.split(block.sizes))

    def __call__(self, displacement: Vector | None = None) -> Outputs:
        """The outputs at the start, or displaced from it; raises ``Unusable``, on all ranks or on none.

        Ranks agree after every evaluation: the model may communicate in its forward pass, so that all ranks have to
        make the same number of them.
        """
        if displacement is not None:
            self.point = [a + b for a, b in zip(self.start, displacement, strict=True)]
            self.write(self.point)
        self.count += 1
        self.counts["extra_evaluations"] += 1
        with agreeing(self.space.ranks):
            version = sum(p._version for p in self.params)
            found = self.function()
            self.rewind()
            if version != sum(p._version for p in self.params):
                raise Unusable("outputs_wrote", WROTE)
            outputs = read(self.kind, found)
            if self.shapes not in (None, outputs.shapes):
                raise Unusable("outputs_changed", "outputs returned tensors of another shape when called again")
            self.shapes = outputs.shapes
            return outputs

    def loss(self, displacement: Vector | None = None) -> float:
        """The loss at displaced weights, over all ranks; infinite where outputs are not finite."""
        ranks = self.space.ranks
        try:
            outputs = self(displacement)
        except Unusable as problem:
            if problem.cause != "nonfinite_outputs":
                raise
            return torch.inf  # the same on all ranks
        with agreeing(ranks):
            found = outputs.loss()
        return found if ranks.size == 1 else float(ranks.mean(torch.tensor(found, dtype=torch.float64)))

    def slopes(self, first: Outputs, span: Span, size: float) -> Tensor:
        """How the outputs change along each direction, one row each; ``size`` is the length of the weights."""
        eps = max(first.eps, *(torch.finfo(block.params[0].dtype).eps for block in self.space.blocks))
        columns = []
        for i, length in span.lengths.items():
            # Differences of outputs in half precision would be rounding noise for tiny steps.
            distance = length if first.eps > HALF else size * eps**0.4
            columns.append((self(span.vector({i: distance})).values - first.values) / distance)
        return torch.stack(columns).double()


@contextmanager
def probing(
    function: OutputsFn, loss: Loss, space: Space, start: Vector, params: Sequence[Tensor], counts: Counter[str]
) -> Iterator[Probe]:
    """Evaluate at any weights; at the end, or at an error, these are ``probe.end``, and all else is as it was.

    No graph leads back to the parameters; a function may still differentiate in its inputs, as a PINN does.
    """
    trained = [p for p in params if p.requires_grad]
    with leaving_no_trace(params) as rewind:
        probe = Probe(function, loss, space, start, params, rewind, counts, start, start)
        try:
            for p in trained:
                p.requires_grad_(False)
            yield probe
        finally:
            for p in trained:
                p.requires_grad_(True)
            space.refresh()
            probe.write(probe.end)
