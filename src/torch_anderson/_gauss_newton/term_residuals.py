"""The residuals of one term at any weights, and rows of their Jacobian, for a block of samples.

They are traced where that can be done (``trace``, ``factors``), and evaluated with ``torch.func`` otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from .._driver import logger
from .batch import Convex
from .factors import Factors
from .objective import Objective
from .rows import Pair
from .term import Samples
from .trace import rounds, trace
from .unusable import Unusable, one_line

SEEN = 4
"""Samples on which traced residuals and rows are compared with those of torch.func."""
CLOSE = 3e-8
"""Largest difference, relative to the largest number, in float64."""
NO_DERIVATIVES = (
    "torch.func cannot differentiate the residual of {name!r} by the weights ({problem}); Anderson needs no rows of "
    "its Jacobian"
)
RANDOM = "the residual of {name!r} is random, e.g. by dropout, which model.eval() ends"
ROUNDED = (
    "The residual of %r rounds numbers that are %s, which limits the accuracy. Make its constants in the type of the "
    "sample, e.g. constant.to(point)."
)


class OneSample(nn.Module):
    """A term's residuals at one sample, as a module around the model, whose parameters can be replaced for a call.

    A function that uses parameters of the model directly, such as an unknown coefficient, sees the replaced ones.
    """

    def __init__(self, objective: Objective, name: str):
        super().__init__()
        self.model = objective.module
        self.term = objective.terms[name]
        self.name = name
        self.whole = False
        """Whether to return all that the function returned."""

    def forward(self, one: Tensor | None, *sample: Tensor) -> Any:
        """The outputs that the loss depends on, as one vector. ``one`` makes all inputs depend on the sample."""
        found = self.term.outputs(self.name, self.model, sample, one)
        return found if self.whole else self.term.vector(found)


class TermResiduals:
    """Residuals (k, p) of one term at a block of k samples, and rows of their Jacobian."""

    def __init__(self, objective: Objective, name: str, trained: Sequence[str], constant: Sequence[str]):
        self.name = name
        self.module = OneSample(objective, name)
        self.keys = [f"model.{key}" for key in (*trained, *constant)]
        self.trained = len(trained)
        self.block = 0
        """Samples in a block."""
        self.size = 0
        """p, residuals of a sample."""
        self.traced: Callable[..., Tensor] | None = None
        self.factors: Factors | None = None
        self.untraced = ""
        """Why there is no trace, or none of the rows."""

    def prepare(self, fixed: Sequence[Tensor], samples: Samples, traces: bool) -> None:
        """Check the residuals at as many samples as a block has, and trace them."""
        self.block = len(samples[0])
        self.traced = self.factors = None
        self.untraced = ""
        plain = self.plain(*fixed, None, *samples)
        if not plain.isfinite().all():
            raise Unusable("nonfinite_outputs", f"the residual of {self.name!r} is not finite")
        if not torch.equal(self.plain(*fixed, None, *samples), plain):
            raise Unusable("random_outputs", RANDOM.format(name=self.name))
        self.size = plain.shape[1]
        arguments = [*fixed, samples[0].new_ones(self.block, dtype=fixed[0].dtype), *samples]
        try:
            rows = self._seen(self.plain_rows, arguments)
        except Exception as problem:
            raise Unusable("no_rows", NO_DERIVATIVES.format(name=self.name, problem=one_line(problem))) from problem
        if not traces:
            return
        try:
            self._trace(arguments, plain, rows)
        except Exception as problem:  # tracing can fail in many ways
            self.untraced = one_line(problem)
            logger.info("Jumps are slower, as the residual of %r could not be traced: %s", self.name, self.untraced)

    def _trace(self, arguments: Sequence[Tensor], plain: Tensor, rows: Tensor) -> None:
        """Use the trace if it gives what the plain way gives."""
        module = trace(self.plain, arguments)
        if rounds(module, arguments[0].dtype):
            logger.warning(ROUNDED, self.name, arguments[0].dtype)
        if close(module(*arguments), plain):
            self.traced = module.forward
            factors = Factors(module, self.trained, self.block)
            if close(self._seen(factors, arguments), rows):
                self.factors = factors

    def _seen(self, rows: Callable[..., None], arguments: Sequence[Tensor]) -> Tensor:
        """The rows of some samples: of two sums of their residuals, as all might take much memory."""
        if rows == self.plain_rows:
            arguments = [*arguments[: len(self.keys)], *(x[:SEEN] for x in arguments[len(self.keys) :])]
        sizes, count = [x.numel() for x in arguments[: self.trained]], len(arguments[-1])
        numbers = torch.arange(1.0, self.size + 1, dtype=arguments[0].dtype, device=arguments[0].device)
        sums = torch.stack([numbers.cos(), numbers.sin()])
        out = arguments[0].new_empty(min(count, SEEN) * len(sums), sum(sizes))
        rows(arguments, sums.unsqueeze(1).expand(-1, count, -1), out.split(sizes, 1))
        return out

    @property
    def uses(self) -> list[int | None]:
        """Numbers of outer products in the rows of each parameter; None where rows are not sums of them."""
        factors = self.factors
        return [factors.count_uses(i) if factors else None for i in range(self.trained)]

    # ------------------------------------------------------------------------------------------------- the plain way

    def plain(self, *arguments: Tensor | None) -> Tensor:
        """Residuals of some samples; the arguments are weights, constants, a one for each sample, and the samples."""
        return torch.vmap(self._one, self._dims(arguments), randomness="different")(*arguments)

    def plain_rows(self, arguments: Sequence[Tensor | None], sums: Tensor, out: Sequence[Tensor | Pair]) -> None:
        """Write the rows of weighted sums of residuals to ``out``, by differentiating the residuals of each sample."""

        def summed(weights: Tensor, *arguments: Tensor | None) -> Tensor:
            return weights @ self._one(*arguments)

        rows = jacrev(summed, argnums=tuple(range(1, self.trained + 1)))
        dims = (0, *self._dims(arguments))
        slopes = torch.vmap(rows, dims, randomness="different")(sums.movedim(1, 0), *arguments)
        for part, slope in zip(out, slopes, strict=True):
            assert isinstance(part, Tensor)  # there are no factors
            part.copy_(slope.detach().reshape(part.shape))

    def convex(self, function: Callable[..., Tensor], fixed: Sequence[Tensor], samples: Samples) -> Convex:
        """The loss of single samples, with what the term's function returned besides the output."""
        shapes: list[torch.Size] = []

        def besides(*arguments: Tensor | None) -> tuple[Tensor, ...]:
            count = len(self.keys)
            self.module.whole = True
            try:
                weights = dict(zip(self.keys, arguments[:count], strict=True))
                output, *rest = functional_call(self.module, weights, tuple(arguments[count:]))  # type: ignore[arg-type]
            finally:
                self.module.whole = False
            shapes.append(output.shape)
            return tuple(rest)

        arguments = (*fixed, None, *samples)
        rest = torch.vmap(besides, self._dims(arguments), randomness="different")(*arguments)
        return Convex(function, shapes[0], tuple(x.detach() for x in rest))

    def _one(self, *arguments: Tensor | None) -> Tensor:
        count = len(self.keys)
        weights: dict[str, Any] = dict(zip(self.keys, arguments[:count], strict=True))
        with constants_of(weights[self.keys[0]].dtype):
            return functional_call(self.module, weights, tuple(arguments[count:]))  # type: ignore[no-any-return]

    def _dims(self, arguments: Sequence[Tensor | None]) -> tuple[int | None, ...]:
        count = len(self.keys)
        return (*[None] * count, *(None if x is None else 0 for x in arguments[count:]))


@contextmanager
def constants_of(dtype: torch.dtype) -> Iterator[None]:
    """A context in which tensors that a function makes without a type get this one: ``jvp`` does not mix types."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def close(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal up to rounding; not if some are not finite."""
    if one.shape != other.shape:
        return False
    tolerance = CLOSE if one.dtype == torch.float64 and other.dtype == torch.float64 else 1e-3
    # Norms, as absolute values would be copies of rows that may be very long.
    one, other = one.detach(), other.detach()
    difference, size = float(torch.dist(one, other, inf)), float(torch.linalg.vector_norm(other, inf))
    return difference <= tolerance * size < inf
