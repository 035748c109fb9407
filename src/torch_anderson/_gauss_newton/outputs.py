"""The model's outputs: evaluating the user's function at any weights, and reading what it returned."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .._ranks.ranks import Ranks
from .._tensors.blocks import Space, Vector
from .._tensors.evaluate import leaving_no_trace, without_graph

Loss = str | Callable[..., Tensor]
OutputsFn = Callable[[], Any]
"""The user's function: a forward pass at the present weights."""

WROTE = "outputs changed the parameters; it must only evaluate the model"
INTEGERS = "outputs returned integers as predictions or residuals; return what the model computes before it rounds"
REPEATABLE = 1e-3
"""Two evaluations at the same weights may differ by this part of the outputs."""


class Unusable(Exception):
    """Outputs that cannot be used, for reasons that depend on data; ``cause`` is the name that is counted."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


# --------------------------------------------------------------------------------------------- the loss of outputs


class Quadratic(NamedTuple):
    """The loss to second order in the coefficients of columns."""

    loss: Tensor
    gradient: Tensor
    hessian: Tensor


class Squares:
    """The sum of squares."""

    exact = True
    """Whether the quadratic around one point holds everywhere."""

    def loss(self, values: Tensor) -> float:
        """The loss at these outputs."""
        return float(values.double().square().sum())

    def quadratic(self, values: Tensor, columns: Tensor) -> Quadratic:
        """The loss around these outputs, which the coefficients change along the rows of ``columns``."""
        return Quadratic(values @ values, 2 * (columns @ values), 2 * (columns @ columns.T))


class Convex:
    """A convex function of the outputs."""

    exact = False

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def loss(self, values: Tensor) -> float:
        """The loss at these outputs."""
        return float(self.function(values.double()))

    def quadratic(self, values: Tensor, columns: Tensor) -> Quadratic:
        """The loss around these outputs, which the coefficients change along the rows of ``columns``."""
        slopes, bend = torch.func.vjp(torch.func.grad(self.function), values)  # type: ignore[misc]
        hessian = torch.func.vmap(bend)(columns)[0] @ columns.T  # twice backward: several losses cannot go forward
        return Quadratic(self.function(values), columns @ slopes, hessian)


class Outputs(NamedTuple):
    """The model's outputs on a batch as one vector, and the loss as a function of such vectors."""

    values: Tensor
    shapes: tuple[torch.Size, ...]
    """Shapes of the tensors that were returned: they must not change between evaluations."""
    misfit: Squares | Convex
    eps: float
    """Largest rounding unit of the tensors that were returned."""


def read(loss: Loss, found: Any) -> Outputs:
    """Make one vector of what the user's function returned; raises ``TypeError`` or ``Unusable``."""
    tensors = [found] if isinstance(found, Tensor) else list(found) if isinstance(found, (tuple, list)) else []
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"outputs must return tensors, e.g. (predictions, targets), not {type(found).__name__}.")
    if loss in ("mse", "cross_entropy") and len(tensors) != 2:
        raise TypeError(f"outputs must return (predictions, targets) for loss={loss!r}, not {len(tensors)} tensors.")
    tensors = [tensor.detach() for tensor in tensors]
    _check(tensors if loss == "residual" else tensors[:1])
    values, misfit = _convex(loss, tensors) if callable(loss) or loss == "cross_entropy" else _squares(loss, tensors)
    if not values.isfinite().all():
        raise Unusable("nonfinite_outputs", "outputs returned numbers that are not finite")
    eps = max(torch.finfo(tensor.dtype).eps for tensor in tensors if _real_or_complex(tensor))
    return Outputs(values, tuple(tensor.shape for tensor in tensors), misfit, eps)


def _check(tensors: Sequence[Tensor]) -> None:
    if not all(map(_real_or_complex, tensors)):
        raise Unusable("integer_outputs", INTEGERS)
    if all(tensor.dim() == 0 for tensor in tensors):
        raise TypeError(
            "outputs returned a number, such as a loss. Return predictions or residuals: one entry for each sample."
        )


def _real_or_complex(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _refuse_targets(first: Outputs, columns: Tensor) -> None:
    """Raise for predictions and targets, given as two residuals: the targets do not depend on the weights."""
    n = first.shapes[0].numel()
    if len(first.shapes) != 2 or first.shapes[0] != first.shapes[1] or columns.shape[1] != 2 * n:
        return
    if columns[:, :n].any() and not columns[:, n:].any() and first.values[n:].any():
        raise TypeError(
            "outputs returned two tensors for loss='residual', and the second does not depend on the weights. "
            "Return predictions - targets, or build GaussNewton(..., loss='mse')."
        )


def _squares(loss: Loss, tensors: Sequence[Tensor]) -> tuple[Tensor, Squares | Convex]:
    """One vector, whose squares add up to the tensors' means of squares."""
    if loss == "mse":
        predictions, targets = tensors
        if predictions.shape != targets.shape:
            shapes = f"{tuple(predictions.shape)} and targets of shape {tuple(targets.shape)}"
            raise TypeError(f"outputs returned predictions of shape {shapes}. Give both the same shape.")
        tensors = [predictions - targets]
    return torch.cat([_real(tensor).reshape(-1) / sqrt(max(tensor.numel(), 1)) for tensor in tensors]), Squares()


def _convex(loss: Loss, tensors: Sequence[Tensor]) -> tuple[Tensor, Squares | Convex]:
    predictions, *rest = tensors
    values = _working(predictions).reshape(-1).clone()  # a model may use the memory of its outputs again
    given: Callable[..., Tensor] = loss if callable(loss) else cross_entropy
    # The user's function gets the type that it is made for: it may hold tensors, such as weights of classes.
    dtype = values.dtype if callable(loss) else torch.float64

    def function(values: Tensor) -> Tensor:
        return given(values.to(dtype).view(predictions.shape), *rest).double()

    return values, Convex(function)


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, at least in single precision."""
    return _working(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)


def _working(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# ------------------------------------------------------------------------------------------- evaluating the function


@dataclass
class Probe:
    """The user's function at displaced weights: always with the same random numbers and buffers, without a graph."""

    function: OutputsFn
    loss_kind: Loss
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

    def __call__(self, displacement: Vector | None = None) -> Outputs:
        """The outputs at the start, or displaced from it; raises ``Unusable``, on all ranks or on none.

        Ranks agree after every evaluation: the model may communicate in its forward pass, so that all ranks have to
        make the same number of them.
        """
        if displacement is not None:
            self.point = [a + b for a, b in zip(self.start, displacement, strict=True)]
            self.space.write(self.point, everything=True)
        self.count += 1
        self.counts["extra_evaluations"] += 1
        with agreeing(self.space.ranks):
            version = sum(p._version for p in self.params)
            found = self.function()
            self.rewind()
            if version != sum(p._version for p in self.params):
                raise Unusable("outputs_wrote", WROTE)
            outputs = read(self.loss_kind, found)
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
            found = outputs.misfit.loss(outputs.values)
        return found if ranks.size == 1 else float(ranks.mean(torch.tensor(found, dtype=torch.float64)))

    def check_repeatable(self, first: Outputs) -> None:
        """Raise ``Unusable`` if a second evaluation at the start differs, or if the function writes to the weights."""
        again = self()
        with agreeing(self.space.ranks):
            self.space.refresh()
            present = [torch.empty_like(part) for part in self.start]
            self.space.read(present)
            if not all(map(torch.equal, present, self.start)):
                raise Unusable("outputs_wrote", WROTE)  # through .data, which leaves no other trace
            apart = float(torch.linalg.vector_norm(again.values - first.values))
            if apart > REPEATABLE * float(torch.linalg.vector_norm(first.values)):
                raise Unusable("random_outputs", "outputs returned other numbers when called again at the same weights")

    def quadratic(self, first: Outputs, values: Tensor, columns: Tensor) -> Quadratic:
        """The loss around the start, to second order along columns, over all ranks."""
        ranks = self.space.ranks
        with agreeing(ranks):
            _refuse_targets(first, columns)
            here = first.misfit.quadratic(values, columns)
            if not all(part.isfinite().all() for part in here):
                raise Unusable("nonfinite_outputs", "the loss of the outputs has no finite value and derivatives")
        if ranks.size > 1:
            here = Quadratic(*map(ranks.mean, here))
        if not here.hessian.any() and not here.gradient.any():
            present, change = ranks.largest(torch.tensor([columns.numel() > 0, columns.any()], dtype=torch.float64))
            if not present:
                raise Unusable("no_outputs", "outputs returned empty tensors")
            if not change:
                raise Unusable("constant_outputs", "outputs returned numbers that do not depend on the weights")
        if not here.gradient.any():
            raise Unusable("converged", "the loss is at a minimum along all directions")
        return here


@contextmanager
def probing(
    function: OutputsFn, loss: Loss, space: Space, start: Vector, params: Sequence[Tensor], counts: Counter[str]
) -> Iterator[Probe]:
    """Evaluate at any weights; at the end, or at an error, these are ``probe.end``, and all else is as it was."""
    with leaving_no_trace(params) as rewind, without_graph(params):
        probe = Probe(function, loss, space, start, params, rewind, counts, start, start)
        try:
            yield probe
        finally:
            space.refresh()
            space.write(probe.end, everything=True)


NONFINITE, UNUSABLE = 1.0, 2.0
"""Severities. Outputs that are not finite only show that these weights are no better; others may be."""


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
    severity = _severity(found)
    worst = float(ranks.largest(torch.tensor(severity)))
    if found is not None and worst == severity:
        raise found
    if worst:
        cause = "other_rank" if worst > NONFINITE else "nonfinite_outputs"
        raise Unusable(cause, "outputs could not be used on another rank")


def _severity(found: Exception | None) -> float:
    if found is None:
        return 0.0
    return NONFINITE if isinstance(found, Unusable) and found.cause == "nonfinite_outputs" else UNUSABLE
