"""The discrepancy between targets and predictions: how the loss follows from the model's outputs."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from math import isfinite, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .options import is_integer

KINDS = ("mse", "residual", "cross_entropy")
USES = ("training", "evaluation", "both")
PROBES = ("difference", "secant")
SMALLEST = {"history_size": 1, "store_period": 1, "period": 1, "jumps": 0, "warmup": 0, "most_batches": 1}


@dataclass(frozen=True)
class Discrepancy:
    """What drives ``Anderson(base, discrepancy=...)``; ``"mse"`` stands for ``Discrepancy("mse")``.

    Every now and then the model's outputs are taken on one batch at a few points beside the present weights. They tell,
    with forward passes alone, how the outputs follow the weights along some directions, and so which combination of
    them makes the loss smallest. The batch comes with the step: ``optimizer.step(outputs=...)``.
    """

    loss: str | Callable[..., Tensor]
    """``"mse"`` of (predictions, targets); ``"residual"``: one tensor or several that shall be zero, whose means of
    squares add up; ``"cross_entropy"`` of (logits, classes); or a convex, twice differentiable function of
    (predictions, ...) that gives a mean over the batch."""
    _: KW_ONLY
    use: str = ""
    """``"training"``: jump there and train on, right for batches that are fixed or large. ``"evaluation"``: train
    undisturbed, and offer ``optimizer.accelerated_weights``; small batches would undo a jump at once, or a jump would
    fit their noise. Or ``"both"``. By default training for ``"residual"``, and evaluation for the others."""
    history_size: int = 20
    """m, the last differences of stored iterates that are directions."""
    store_period: int = 5
    """q, base steps between two stored iterates."""
    jumps: int = 5
    """The last accepted jumps are directions too, beside the present step and the gradient."""
    period: int = 10
    """p, the fewest base steps between two accelerations."""
    warmup: int = 0
    """Base steps before the first iterate is stored."""
    budget: float = 0.3
    """Share of the cost that accelerations may take at first; it grows to twice that while they pay more than base
    steps, and falls while they do not."""
    forward_cost: float = 1 / 3
    """Of a forward pass without graph on one batch, in gradients."""
    most_batches: int = 1
    """Above 1, ``outputs`` is called with a number up to this, and looks at fresh samples of as many batches: more
    while what a jump has gained is lost again, as it had fitted the noise of too few, and less while it is not."""
    damping: float = 1e-3
    """Levenberg and Marquardt's, at first; kept between accelerations."""
    held_out: bool | None = None
    """Whether a jump must also help the half of a batch that it was not fitted to: for batches that are not all there
    is to fit. The gradient and the present step are then no directions, as they are made of both halves. By default
    for ``"mse"``; only squares can be split."""
    probe: str = "difference"
    """``"difference"``: tiny steps along each direction. ``"secant"``: whole ones, as outputs in half precision ask for
    (and then get by themselves)."""

    def __post_init__(self) -> None:
        if not callable(self.loss) and self.loss not in KINDS:
            self._refuse("loss", f"{', '.join(map(repr, KINDS))} or a function")
        for name, smallest in SMALLEST.items():
            if not is_integer(getattr(self, name)) or getattr(self, name) < smallest:
                self._refuse(name, f"an integer of at least {smallest}")
        if self.use not in ("", *USES):
            self._refuse("use", ", ".join(map(repr, USES)))
        if self.probe not in PROBES:
            self._refuse("probe", ", ".join(map(repr, PROBES)))
        if self.held_out not in (None, True, False):
            self._refuse("held_out", "True, False or None")
        if self.held_out and not self.squares:
            self._refuse("held_out", "False or None for a loss that is not a sum of squares")
        for name, most in {"budget": 0.9, "forward_cost": float("inf"), "damping": float("inf")}.items():
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not isfinite(value) or not 0 < value <= most:
                self._refuse(name, "a finite number above 0" + (f" and at most {most}" if isfinite(most) else ""))

    @property
    def trains(self) -> bool:
        """Whether jumps go into training."""
        return (self.use or self._fitting_use) in ("training", "both")

    @property
    def evaluates(self) -> bool:
        """Whether weights to evaluate with are kept."""
        return (self.use or self._fitting_use) in ("evaluation", "both")

    @property
    def splits(self) -> bool:
        """Whether half of a batch judges what is fitted to the other."""
        return self.loss == "mse" if self.held_out is None else self.held_out

    @property
    def squares(self) -> bool:
        """Whether the loss is a sum of squares."""
        return self.loss in ("mse", "residual")

    @property
    def _fitting_use(self) -> str:
        return "training" if self.loss == "residual" else "evaluation"

    def _refuse(self, name: str, allowed: str) -> None:
        raise ValueError(f"Invalid {name} of Discrepancy: {getattr(self, name)!r}. Allowed: {allowed}.")


class Unusable(Exception):
    """Outputs that tell nothing; ``cause`` is the name that is counted."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Outputs(NamedTuple):
    """The model's outputs on a batch as one vector, and the loss as a function of such vectors."""

    values: Tensor
    shape: tuple[Any, ...]
    """Of what they were made of: it must not change between evaluations."""
    misfit: "Squares | Convex"


class Model(NamedTuple):
    """The loss to second order in coefficients of columns, for each part of the batch; they add up."""

    loss: Tensor
    gradient: Tensor
    hessian: Tensor


class Squares:
    """The sum of squares. Two halves of the samples tell whether what helps one helps the other."""

    def __init__(self, half: Tensor) -> None:
        self.half = half

    def loss(self, values: Tensor) -> float:
        """At these outputs."""
        return float(values.double().square().sum())

    def slopes(self, values: Tensor) -> Tensor:
        """The gradient in the outputs."""
        return 2 * values

    def model(self, values: Tensor, columns: Tensor) -> Model:
        """Around these outputs, which the coefficients change along the rows of ``columns``."""
        parts = [(values[half].double(), columns[:, half].double()) for half in (self.half, ~self.half)]
        return Model(
            torch.stack([part @ part for part, _ in parts]),
            torch.stack([2 * (rows @ part) for part, rows in parts]),
            torch.stack([2 * (rows @ rows.T) for _, rows in parts]),
        )


class Convex:
    """Any convex function of the outputs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def loss(self, values: Tensor) -> float:
        """At these outputs."""
        return float(self.function(values.double()))

    def slopes(self, values: Tensor) -> Tensor:
        """The gradient in the outputs."""
        return torch.func.grad(self.function)(values)

    def model(self, values: Tensor, columns: Tensor) -> Model:
        """Around these outputs, which the coefficients change along the rows of ``columns``."""
        values, columns = values.double(), columns.double()
        slopes, bend = torch.func.vjp(torch.func.grad(self.function), values)  # type: ignore[misc]
        hessian = torch.func.vmap(bend)(columns)[0] @ columns.T  # twice backward: several losses cannot go forward
        return Model(self.function(values)[None], (columns @ slopes)[None], hessian[None])


def read(kind: str | Callable[..., Tensor], found: Any) -> Outputs:
    """Make one vector of what the user's function returned; raises ``Unusable`` or ``TypeError``."""
    tensors = [found] if isinstance(found, Tensor) else list(found) if isinstance(found, (tuple, list)) else []
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"outputs must return tensors, e.g. (predictions, targets), not {type(found).__name__}.")
    if kind != "residual" and len(tensors) < 2 and not callable(kind):
        raise TypeError(f"outputs must return (predictions, targets) for discrepancy={kind!r}, not one tensor.")
    tensors = [tensor.detach() for tensor in tensors]
    if kind == "mse":
        tensors = [_difference(*tensors[:2])]
    outputs = _squares(tensors) if kind in ("mse", "residual") else _convex(kind, tensors)
    if not outputs.values.isfinite().all():
        raise Unusable("nonfinite_outputs", "outputs returned numbers that are not finite")
    return outputs


def _difference(predictions: Tensor, targets: Tensor) -> Tensor:
    if predictions.shape != targets.shape:
        raise TypeError(f"outputs returned predictions of shape {tuple(predictions.shape)} for targets of shape "
                        f"{tuple(targets.shape)}. Give both the same shape.")  # fmt: skip
    return predictions - targets


def _squares(tensors: list[Tensor]) -> Outputs:
    """Each tensor by its own mean of squares; samples, the first dimension, are drawn to one of two halves."""
    values = torch.cat([real(tensor).reshape(-1) / sqrt(max(tensor.numel(), 1)) for tensor in tensors])
    halves = [_half(real(tensor)) for tensor in tensors]
    return Outputs(values, tuple(tensor.shape for tensor in tensors), Squares(torch.cat(halves)))


def _half(tensor: Tensor) -> Tensor:
    """Half of the samples by lot, always the same: samples may come in a regular order. One alone is split itself."""
    samples = len(tensor) if tensor.dim() and len(tensor) > 1 else tensor.numel()
    lots = torch.randperm(samples, generator=torch.Generator().manual_seed(samples)) % 2 == 0
    return lots.to(tensor.device).repeat_interleave(tensor.numel() // max(samples, 1))


def _convex(kind: str | Callable[..., Tensor], tensors: list[Tensor]) -> Outputs:
    predictions, *rest = tensors
    values = working(predictions).reshape(-1).clone()  # a model may use the memory of its outputs again
    loss: Callable[..., Tensor] = kind if callable(kind) else cross_entropy
    # A function of the user's gets the type that it is made for: it may hold tensors, such as weights of classes.
    dtype = values.dtype if callable(kind) else torch.float64

    def function(values: Tensor) -> Tensor:
        return loss(values.to(dtype).view(predictions.shape), *rest).double()

    return Outputs(values, tuple(tensor.shape for tensor in tensors), Convex(function))


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, and at least in single precision."""
    return working(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)


def working(tensor: Tensor) -> Tensor:
    """At least in single precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
