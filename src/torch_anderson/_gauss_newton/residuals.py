"""The residuals of an objective as functions of one flat vector of weights, and the rows of their Jacobian.

Weights, samples and buffers are converted to float64, whatever the network's type. Nothing is written to the model: its
parameters and buffers are replaced during a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._driver import logger
from .batch import Convex, Squares, Values
from .numbers import numbers_of
from .objective import Closure, Objective
from .rows import Layout, Rows
from .term import ADVICE, Samples
from .term_residuals import SEEN, TermResiduals, close
from .unusable import Unusable, one_line

COARSE = (
    "GaussNewton computes in {dtype} instead of float64, which limits the accuracy: a residual function fails in "
    "float64 ({problem}). Make its constants in the type of the sample, e.g. point.new_tensor([0.0, 1.0])."
)
GUESS = 4
"""Uses of a weight matrix in a residual with derivatives."""
BLOCK = 500
"""Most samples that are evaluated at once."""
MOST_NUMBERS = 10_000_000
"""Numbers in the rows of a block that is not traced."""
Given = Mapping[str, Samples]
"""Samples by the names of terms."""


class Residuals:
    """All residuals of an objective at any weights; ``n`` of them are trained, in the order of the model's."""

    def __init__(self, objective: Objective, params: Sequence[Tensor]):
        trained, module = {id(p) for p in params}, objective.module
        found = dict(module.named_parameters())
        names = [name for name, p in found.items() if id(p) in trained]
        self.objective, self.module, self.trained = objective, module, trained
        self.params = [found[name] for name in names]
        self.constants = _forms(self._others())
        """Parameters that are not trained, and buffers: their forms, by name."""
        self.samples: dict[str, list[torch.Size]] = {}
        """Shapes of single samples that were traced, by the names of terms."""
        self.numbers: list[Any] = []
        """Numbers outside of model and samples that the functions read, which are constants of the traces."""
        self.traces = True
        """Whether residuals are traced; not while their numbers change from jump to jump."""
        self.jumps = 0
        """Jumps since they were traced, or were found to need no trace."""
        self.sizes = [p.numel() for p in self.params]
        self.n = sum(self.sizes)
        self.terms = {name: TermResiduals(objective, name, names, list(self.constants)) for name in objective.terms}
        self.dtype = torch.float64
        shapes = [p.shape for p in self.params]
        self.layout = Layout.cheapest(shapes, [GUESS if len(shape) == 2 else 0 for shape in shapes])
        """How rows are best stored: by the uses of parameters in the traces, or a guess before there are any."""
        self._constants: list[Tensor] = []

    def prepare(
        self, weights: Tensor, samples: Given, counts: Mapping[str, int] | None = None, traces: bool = True
    ) -> None:
        """Trace all terms, for blocks of so many samples or as before; in the network's type if functions need that."""
        blocks = {name: min(counts[name], BLOCK) if counts else term.block for name, term in self.terms.items()}
        samples = {name: tuple(x[: blocks[name]] for x in found) for name, found in samples.items()}
        self.samples = {name: _shapes(found) for name, found in samples.items()}
        self.numbers, self.traces, self.jumps = self._numbers(), traces, 0
        self.refresh()
        try:
            self._prepare(weights, samples)
        except Exception as problem:
            own = self.params[0].dtype
            if own == self.dtype or (isinstance(problem, Unusable) and problem.cause != "no_rows"):
                raise
            self.dtype = own
            self.refresh()
            self._prepare(weights, samples)
            logger.warning(COARSE.format(dtype=own, problem=one_line(problem)))

    def fits(self, objective: Objective, params: Sequence[Tensor]) -> bool:
        """Whether these are the residuals of an objective as it is now, with these parameters trained."""
        same = self.objective is objective and self.module is objective.module and self.trained == {*map(id, params)}
        terms = [(name, term.module.term) for name, term in self.terms.items()]  # rows follow their order
        return same and terms == list(objective.terms.items()) and _forms(self._others()) == self.constants

    def hold(self, samples: Given) -> bool:
        """Whether the traces hold for samples of these shapes."""
        return all(_shapes(found) == self.samples[name] for name, found in samples.items())

    def same_numbers(self) -> bool:
        """Whether the functions read the numbers that they read when they were traced."""
        return self._numbers() == self.numbers

    def _numbers(self) -> list[Any]:
        return numbers_of([term.function for term in self.objective.terms.values()], self.module)

    def _others(self) -> dict[str, Tensor]:
        """The present parameters that are not trained, and buffers: code may replace them by other tensors."""
        fixed = {name: p for name, p in self.module.named_parameters() if id(p) not in self.trained}
        return fixed | dict(self.module.named_buffers())

    def check(self, given: Given, params: Sequence[Tensor]) -> None:
        """Raise for what cannot be a residual, changes the weights, or depends on parameters outside the model."""
        ours, before = {id(p) for p in self.params}, self.read()
        others = [p for p in params if id(p) not in ours]
        loss = Closure(self.objective, given).loss()
        if not torch.allclose(before, self.read(), rtol=0, atol=0, equal_nan=True):
            self.write(before)
            raise Unusable("outputs_wrote", "a residual changed the parameters; it must only evaluate the model")
        if others and any(x is not None for x in torch.autograd.grad(loss, others, allow_unused=True)):
            raise Unusable("outside_parameters", OUTSIDE)

    def _prepare(self, weights: Tensor, samples: Given) -> None:
        for name, term in self.terms.items():
            try:
                term.prepare(self._fixed(weights), self._converted(samples[name]), self.traces)
            except Exception as problem:
                problem.add_note(ADVICE.format(name=name))
                raise
        counts = [term.uses for term in self.terms.values()]
        uses = [0 if None in found else max(found) for found in zip(*counts, strict=True)]
        self.layout = Layout.cheapest([p.shape for p in self.params], uses)

    def read(self) -> Tensor:
        """The parameters as one vector."""
        return torch.cat([p.detach().reshape(-1).double() for p in self.params] or [torch.zeros(0)])

    @torch.no_grad()
    def write(self, weights: Tensor) -> None:
        """Set the parameters."""
        for p, part in zip(self.params, weights.split(self.sizes), strict=True):
            p.copy_(part.view(p.shape))

    def refresh(self) -> None:
        """Read parameters that are not trained, and buffers."""
        self._constants = [self._cast(x.detach().clone()) for x in self._others().values()]

    @torch.no_grad()
    def values(self, weights: Tensor, samples: Given) -> Values:
        """Residuals of all terms."""
        fixed, values = self._fixed(weights), {}
        for name, term in self.terms.items():
            found = [fixed[0].new_empty(0, term.size)]
            for some, count in _blocks(self._converted(samples[name]), term.block):
                if term.traced is None:
                    found.append(term.plain(*fixed, None, *some)[:count])
                else:
                    found.append(term.traced(*fixed, fixed[0].new_ones(term.block), *some)[:count])
            values[name] = torch.cat(found).double()
        return values

    @torch.no_grad()
    def rows(self, weights: Tensor, samples: Given, sums: Values, out: Rows) -> None:
        """Write the rows of weighted sums of residuals, by weights (p', k, p), to ``out``, one term after the other."""
        fixed, done = self._fixed(weights), 0
        for name, term in self.terms.items():
            given = (*self._converted(samples[name]), sums[name].to(self.dtype).movedim(1, 0))
            for some, count in _blocks(given, term.block) if term.factors else _parts(given, self._few(term)):
                parts = out.parts(slice(done, done + count * term.size))
                arguments = [*fixed, fixed[0].new_ones(len(some[0])), *some[:-1]]
                (term.factors or term.plain_rows)(arguments, some[-1].movedim(0, 1), parts)
                done += count * term.size

    def _few(self, term: TermResiduals) -> int:
        """Samples whose rows by ``plain_rows`` fit into the memory for them."""
        return max(1, min(term.block, MOST_NUMBERS // (term.size * self.n)))

    @torch.no_grad()
    def misfits(self, weights: Tensor, samples: Given) -> dict[str, Squares | Convex]:
        """The losses of single samples, for these samples."""
        fixed = self._fixed(weights)
        found: dict[str, Squares | Convex] = {}
        for name, term in self.terms.items():
            function = self.objective.terms[name].loss
            if function is None:
                found[name] = Squares()
            else:
                parts = _parts(self._converted(samples[name]), max(term.block, 1))
                found[name] = Convex.joined([term.convex(function, fixed, some) for some, _ in parts])
        return found

    @torch.no_grad()
    def changed(self, weights: Tensor, samples: Given, values: Values) -> bool:
        """Whether traced values are no longer those of the functions, which may depend on more than their arguments."""
        fixed = self._fixed(weights)
        for name, term in self.terms.items():
            if term.traced is not None:
                few = self._converted(tuple(x[:SEEN] for x in samples[name]))
                if not close(values[name][:SEEN], term.plain(*fixed, None, *few)):
                    return True
        return False

    def _fixed(self, weights: Tensor) -> list[Tensor]:
        parts = weights.to(self.dtype).split(self.sizes)
        return [*(part.view(p.shape) for part, p in zip(parts, self.params, strict=True)), *self._constants]

    def _converted(self, samples: Samples) -> Samples:
        return tuple(map(self._cast, samples))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _shapes(samples: Samples) -> list[torch.Size]:
    """Shapes of single samples."""
    return [x.shape[1:] for x in samples]


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types by name."""
    return {name: (x.shape, x.dtype) for name, x in tensors.items()}


def _parts(samples: Samples, most: int) -> Iterator[tuple[Samples, int]]:
    """At most so many samples at a time, and their number."""
    for start in range(0, len(samples[0]), most):
        some = tuple(x[start : start + most] for x in samples)
        yield some, len(some[0])


def _blocks(samples: Samples, length: int) -> Iterator[tuple[Samples, int]]:
    """Blocks of constant length, the last of which is filled up with its first sample; and their numbers of samples."""
    for some, count in _parts(samples, length):
        if count < length:
            some = tuple(torch.cat([x, x[:1].expand(length - count, *x.shape[1:])]) for x in some)
        yield some, count


OUTSIDE = (
    "residuals depend on trained parameters that are not part of the model; make them part of it, e.g. "
    "model.viscosity = torch.nn.Parameter(...)"
)
