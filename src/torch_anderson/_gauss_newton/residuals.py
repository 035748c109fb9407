"""The residuals of an objective as functions of one flat vector of weights, and the rows of their Jacobian.

Weights, samples and buffers are converted to float64, whatever the network's type. Nothing is written to the model: its
parameters and buffers are replaced during a call. Residuals are traced where that can be done (``trace``, ``factors``),
and evaluated with ``torch.func`` otherwise.

A trace is valid as long as what it was made for has not changed:

    ``structure_of``   objective, module, trained parameters, terms, forms of all other parameters and buffers; if one
                       of them changes, other ``Residuals`` are built
    ``Signature``      shapes of samples, and numbers that functions read from elsewhere; if one of them changes, the
                       same ``Residuals`` are traced again

Everything else is an argument of a trace. What this misses is found by a comparison with the plain functions at every
so many jumps (``Residuals.retrace_if_wrong``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from .._driver import logger
from .._ranks.ranks import Ranks
from .factors import Factors
from .jacobian import Layout, Pair, Rows
from .losses import Batch, Convex, Outputs, Squares
from .numbers import numbers_of
from .objective import ADVICE, Closure, Objective, Samples, Term, Unusable
from .trace import rounds, trace

CHECK_PERIOD = 16
"""Jumps between two comparisons of traced outputs with plain ones; also those for which a trace has to be valid to be
worth its cost."""
BLOCK = 500
"""Most samples that are evaluated at once."""
MOST_NUMBERS = 10_000_000
"""Most numbers in the rows of samples that are differentiated at once without a trace."""
EXPECTED_USES = 4
"""Uses of a weight matrix in a residual, as expected before there is a trace: those with second derivatives."""
COMPARED = 4
"""Samples on which traced residuals and rows are compared with those of torch.func."""
ROUNDING = 3e-8
"""Largest difference between them, relative to the largest number, in float64."""
COARSE_ROUNDING = 1e-3
"""Largest difference that counts as rounding in float32."""
OUTSIDE = (
    "residuals depend on trained parameters that are not part of the model; make them part of it, e.g. "
    "model.viscosity = torch.nn.Parameter(...)"
)
NO_DERIVATIVES = (
    "torch.func cannot differentiate the residual of {name!r} by the weights ({problem}); Anderson needs no rows of "
    "its Jacobian"
)
RANDOM = "the residual of {name!r} is random, e.g. by dropout, which model.eval() ends"
COARSE = (
    "GaussNewton computes in {dtype} instead of float64, which limits the accuracy: a residual function fails in "
    "float64 ({problem}). Make its constants in the type of the sample, e.g. point.new_tensor([0.0, 1.0])."
)
NUMBERS = (
    "Jumps are slower, as a number that a residual reads changes from jump to jump. Make it a tensor that is written "
    "to, such as a buffer of the model."
)
ROUNDED = (
    "The residual of %r rounds numbers that are %s, which limits the accuracy. Make its constants in the type of the "
    "sample, e.g. constant.to(point)."
)

Given = Mapping[str, Samples]
"""Samples by the names of terms."""


def structure_of(objective: Objective, params: Sequence[Tensor]) -> tuple[Any, ...]:
    """What ``Residuals`` of an objective with these parameters trained are built for, to be compared."""
    module, trained = objective.module, {id(p) for p in params}
    forms = {name: (x.shape, x.dtype) for name, x in _constants(module, trained).items()}
    return objective, module, trained, list(objective.terms.items()), forms  # rows follow the order of terms


def _constants(module: nn.Module, trained: set[int]) -> dict[str, Tensor]:
    """The present parameters that are not trained, and buffers: code may replace them by other tensors."""
    fixed = {name: p for name, p in module.named_parameters() if id(p) not in trained}
    return fixed | dict(module.named_buffers())


class Signature(NamedTuple):
    """What traces depend on besides tensors and the structure."""

    shapes: dict[str, list[torch.Size]]
    """Shapes of single samples, by the names of terms."""
    numbers: list[Any]
    """Numbers outside of model and samples that the functions read."""


class Residuals:
    """All residuals of an objective as functions of ``n`` weights, in the order of the model's parameters.

    Args:
        objective: the residuals are those of its terms.
        params: the trained parameters; those of the model among them are the weights.
        ranks: the ranks that have residuals of their own; what one of them cannot evaluate, none can.
    """

    def __init__(self, objective: Objective, params: Sequence[Tensor], ranks: Ranks):
        self.objective, self.module, self.ranks = objective, objective.module, ranks
        self.structure = structure_of(objective, params)
        self.signature = Signature({}, [])
        """What the terms were prepared for."""
        self.trained = {id(p) for p in params}
        own = {name: p for name, p in self.module.named_parameters() if id(p) in self.trained}
        self.params = list(own.values())
        self.sizes = [p.numel() for p in self.params]
        self.n = sum(self.sizes)
        names = [*own], [*_constants(self.module, self.trained)]
        self.terms = {name: TermResiduals(objective, name, *names) for name in objective.terms}
        self.traces = True
        """Whether residuals are traced; not while their numbers change from jump to jump."""
        self.warned = False
        """Whether it was said that they do."""
        self.jumps = 0
        """Jumps since they were traced, or were found to need no trace."""
        self.dtype = torch.float64
        self.constants: list[Tensor] = []
        self.layout = self._layout([EXPECTED_USES if p.dim() == 2 else 0 for p in self.params])
        """How rows are stored: by the uses of parameters in the traces, or a guess before there are any."""

    def _layout(self, uses: Sequence[int]) -> Layout:
        layout = Layout.cheapest([p.shape for p in self.params], uses)
        return layout if self.ranks.size == 1 else layout.as_dense()  # which ranks can exchange

    # -------------------------------------------------------------------------------------------------- preparation

    def signature_of(self, samples: Given) -> Signature:
        """What traces for these samples depend on, at present."""
        functions = [term.function for term in self.objective.terms.values()]
        shapes = {name: [x.shape[1:] for x in tensors] for name, tensors in samples.items()}
        return Signature(shapes, numbers_of(functions, self.module))

    def check(self, samples: Given, params: Sequence[Tensor]) -> None:
        """Raise for what cannot be a residual, changes the weights, or depends on parameters outside the model."""
        ours, before = {id(p) for p in self.params}, self.read()
        others = [p for p in params if id(p) not in ours]
        loss = Closure(self.objective, samples).loss()
        if not torch.allclose(before, self.read(), rtol=0, atol=0, equal_nan=True):
            self.write(before)
            raise Unusable("outputs_wrote", "a residual changed the parameters; it must only evaluate the model")
        if others and any(x is not None for x in torch.autograd.grad(loss, others, allow_unused=True)):
            raise Unusable("outside_parameters", OUTSIDE)

    def prepare(
        self, weights: Tensor, samples: Given, counts: Mapping[str, int] | None = None, traces: bool = True
    ) -> None:
        """Trace all terms, for blocks of so many samples or as before; in the network's type if functions need that."""
        blocks = {name: min(counts[name], BLOCK) if counts else term.block for name, term in self.terms.items()}
        samples = {name: tuple(x[: blocks[name]] for x in tensors) for name, tensors in samples.items()}
        self.signature, self.traces, self.jumps = self.signature_of(samples), traces, 0
        try:
            self._prepare(weights, samples)
        except Exception as problem:
            own = self.params[0].dtype
            if own == self.dtype or (isinstance(problem, Unusable) and problem.cause != "no_rows"):
                raise
            self.dtype = own
            self._prepare(weights, samples)
            logger.warning(COARSE.format(dtype=own, problem=_one_line(problem)))

    def _prepare(self, weights: Tensor, samples: Given) -> None:
        self.read_constants()
        for name, term in self.terms.items():
            try:
                term.prepare(self._fixed(weights), self._converted(samples[name]), self.traces)
            except Exception as problem:
                problem.add_note(ADVICE.format(name=name))
                raise
        by_parameter = zip(*(term.uses for term in self.terms.values()), strict=True)
        self.layout = self._layout([0 if None in uses else max(uses) for uses in by_parameter])

    def retrace_if_needed(self, samples: Given) -> None:
        """Prepare the residuals again if on any rank samples have other shapes than before, or functions other numbers.

        Where numbers change again soon, a trace does not pay: residuals are evaluated without one for a while.
        """
        now = self.signature_of(samples)
        stale = torch.tensor([a != b for a, b in zip(now, self.signature, strict=True)], dtype=torch.float64)
        reshaped, renumbered = self.ranks.largest(stale).tolist()
        pays = not renumbered or self.jumps >= CHECK_PERIOD
        if not pays and not self.warned:
            logger.warning(NUMBERS)
            self.warned = True
        if reshaped or renumbered:
            with agreeing(self.ranks), torch.enable_grad():
                self.prepare(self.read(), samples, traces=pays)

    def retrace_if_wrong(self, weights: Tensor, samples: Given, outputs: Outputs) -> bool:
        """Count a jump; at every so many compare the traced outputs with plain ones, and trace again if they differ.

        Functions may depend on more than the signature has. Also traces residuals again that were not traced so far.
        """
        self.jumps += 1
        if self.jumps % CHECK_PERIOD:
            return False
        wrong = torch.tensor(float(self.changed(weights, samples, outputs)))
        if not self.ranks.largest(wrong) and self.traces:
            return False
        self.prepare(weights, samples)
        return True

    @torch.no_grad()
    def changed(self, weights: Tensor, samples: Given, outputs: Outputs) -> bool:
        """Whether traced outputs differ from those of the functions at a few samples."""
        fixed = self._fixed(weights)
        for name, term in self.terms.items():
            if term.traced is not None:
                few = self._converted(tuple(x[:COMPARED] for x in samples[name]))
                if not close(outputs[name][:COMPARED], term.plain(*fixed, None, *few)):
                    return True
        return False

    # ---------------------------------------------------------------------------------------------------- weights

    def read(self) -> Tensor:
        """The parameters as one vector."""
        return torch.cat([p.detach().reshape(-1).double() for p in self.params] or [torch.zeros(0)])

    @torch.no_grad()
    def write(self, weights: Tensor) -> None:
        """Set the parameters."""
        for p, part in zip(self.params, weights.split(self.sizes), strict=True):
            p.copy_(part.view(p.shape))

    def read_constants(self) -> None:
        """Copy parameters that are not trained, and buffers: what the next evaluations use."""
        constants = _constants(self.module, self.trained).values()
        self.constants = list(self._converted(tuple(x.detach().clone() for x in constants)))

    def _fixed(self, weights: Tensor) -> list[Tensor]:
        """The arguments that are the same for all samples: parameters and constants."""
        parts = weights.to(self.dtype).split(self.sizes)
        return [*(part.view(p.shape) for part, p in zip(parts, self.params, strict=True)), *self.constants]

    def _converted(self, samples: Samples) -> Samples:
        return tuple(x.to(self.dtype) if x.is_floating_point() else x for x in samples)

    # ------------------------------------------------------------------------------------------------- evaluations

    @torch.no_grad()
    def outputs(self, weights: Tensor, samples: Given) -> Outputs:
        """Outputs of all terms: residuals, or what the loss depends on. Raises on all ranks, or on none."""
        with agreeing(self.ranks):
            fixed = self._fixed(weights)
            return {name: term.outputs(fixed, self._converted(samples[name])) for name, term in self.terms.items()}

    @torch.no_grad()
    def rows(self, weights: Tensor, samples: Given, loss_roots: Outputs, out: Rows) -> None:
        """Write the rows of sums of outputs with weights (p', k, p) to ``out``, one term after the other."""
        fixed, done = self._fixed(weights), 0
        for name, term in self.terms.items():
            given = (*self._converted(samples[name]), loss_roots[name].to(self.dtype).movedim(1, 0))
            few = max(1, min(term.block, MOST_NUMBERS // (term.size * self.n)))
            for some, count in _blocks(given, term.block) if term.factors else _parts(given, few):
                parts = out.parts(slice(done, done + count * term.size))
                arguments = [*fixed, fixed[0].new_ones(len(some[0])), *some[:-1]]
                (term.factors or term.plain_rows)(arguments, some[-1].movedim(0, 1), parts)
                done += count * term.size

    @torch.no_grad()
    def batch(self, samples: dict[str, Samples], fitted: dict[str, int]) -> Batch:
        """Samples with their losses, of which so many are fitted."""
        fixed = self._fixed(self.read())
        losses = {name: term.losses(fixed, self._converted(samples[name])) for name, term in self.terms.items()}
        return Batch(samples, fitted, {name: term.term.weight for name, term in self.terms.items()}, losses)


class OneSample(nn.Module):
    """What a term's function returns at one sample, as a module around the model, whose parameters can be replaced.

    A function that uses parameters of the model directly, such as an unknown coefficient, sees the replaced ones.
    """

    def __init__(self, model: nn.Module, term: Term, name: str):
        super().__init__()
        self.model, self.term, self.name = model, term, name

    def forward(self, one: Tensor | None, *sample: Tensor) -> tuple[Tensor, ...]:
        """All outputs. ``one`` makes all inputs depend on the sample."""
        return self.term.outputs(self.name, self.model, sample, one)


class TermResiduals:
    """Outputs (k, p) of one term at k samples, and rows of their Jacobian.

    Arguments of functions are the trained parameters, the constants, a one for each sample or None, and the samples.
    """

    def __init__(self, objective: Objective, name: str, trained: Sequence[str], constant: Sequence[str]):
        self.name = name
        self.term = objective.terms[name]
        self.module = OneSample(objective.module, self.term, name)
        self.keys = [f"model.{key}" for key in (*trained, *constant)]
        self.trained = len(trained)
        self.block = 0
        """Samples in a block, for which functions are traced."""
        self.size = 0
        """p, outputs of a sample."""
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
            rows = self.some_rows(self.plain_rows, arguments)
        except Exception as problem:
            raise Unusable("no_rows", NO_DERIVATIVES.format(name=self.name, problem=_one_line(problem))) from problem
        if not traces:
            return
        try:
            module = trace(self.plain, arguments)
            if rounds(module, arguments[0].dtype):
                logger.warning(ROUNDED, self.name, arguments[0].dtype)
            if close(module(*arguments), plain):
                self.traced = module.forward
                factors = Factors(module, self.trained, self.block)
                if close(self.some_rows(factors, arguments), rows):
                    self.factors = factors
        except Exception as problem:  # tracing can fail in many ways
            self.untraced = _one_line(problem)
            logger.info("Jumps are slower, as the residual of %r could not be traced: %s", self.name, self.untraced)

    def some_rows(self, rows: Callable[..., None], arguments: Sequence[Tensor]) -> Tensor:
        """The rows of some samples to compare: of two sums of their outputs, as all might take much memory."""
        if rows == self.plain_rows:
            arguments = [*arguments[: len(self.keys)], *(x[:COMPARED] for x in arguments[len(self.keys) :])]
        sizes, count = [x.numel() for x in arguments[: self.trained]], len(arguments[-1])
        numbers = torch.arange(1.0, self.size + 1, dtype=arguments[0].dtype, device=arguments[0].device)
        sums = torch.stack([numbers.cos(), numbers.sin()])
        out = arguments[0].new_empty(min(count, COMPARED) * len(sums), sum(sizes))
        rows(arguments, sums.unsqueeze(1).expand(-1, count, -1), out.split(sizes, 1))
        return out

    @property
    def uses(self) -> list[int | None]:
        """Numbers of outer products in the rows of each parameter; None where rows are not sums of them."""
        factors = self.factors
        return [factors.count_uses(i) if factors else None for i in range(self.trained)]

    def outputs(self, fixed: Sequence[Tensor], samples: Samples) -> Tensor:
        """The outputs that the loss depends on, in float64."""
        parts = []
        for some, count in _blocks(samples, self.block):
            one = None if self.traced is None else fixed[0].new_ones(self.block)
            parts.append((self.traced or self.plain)(*fixed, one, *some)[:count])
        return torch.cat(parts).double()

    # ------------------------------------------------------------------------------------------------- the plain way

    def plain(self, *arguments: Tensor | None) -> Tensor:
        """Outputs of some samples."""
        return torch.vmap(self._one, self._dims(arguments), randomness="different")(*arguments)

    def plain_rows(self, arguments: Sequence[Tensor | None], sums: Tensor, out: Sequence[Tensor | Pair]) -> None:
        """Write the rows of weighted sums of outputs to ``out``, by differentiating the outputs of each sample."""

        def summed(weights: Tensor, *arguments: Tensor | None) -> Tensor:
            return weights @ self._one(*arguments)

        rows = jacrev(summed, argnums=tuple(range(1, self.trained + 1)))
        dims = (0, *self._dims(arguments))
        slopes = torch.vmap(rows, dims, randomness="different")(sums.movedim(1, 0), *arguments)
        for part, slope in zip(out, slopes, strict=True):
            assert isinstance(part, Tensor)  # there are no factors
            part.copy_(slope.detach().reshape(part.shape))

    def losses(self, fixed: Sequence[Tensor], samples: Samples) -> Squares | Convex:
        """The loss of single samples: if it is no square, with what the function returned besides the output."""
        if self.term.loss is None:
            return Squares()
        shapes: list[torch.Size] = []

        def besides(*arguments: Tensor | None) -> tuple[Tensor, ...]:
            output, *rest = self._returned(*arguments)
            shapes.append(output.shape)
            return tuple(rest)

        parts = []
        for some, _ in _parts(samples, max(self.block, 1)):
            arguments = (*fixed, None, *some)
            parts.append(torch.vmap(besides, self._dims(arguments), randomness="different")(*arguments))
        rest = tuple(torch.cat(x).detach() for x in zip(*parts, strict=True))
        return Convex(self.term.loss, shapes[0], rest)

    def _one(self, *arguments: Tensor | None) -> Tensor:
        """The outputs at one sample that the loss depends on, as one vector."""
        weights: Any = arguments[0]
        before = torch.get_default_dtype()
        torch.set_default_dtype(weights.dtype)  # of tensors that the function makes: ``jvp`` does not mix types
        try:
            return self.term.vector(self._returned(*arguments))
        finally:
            torch.set_default_dtype(before)

    def _returned(self, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        """What the term's function returns at one sample."""
        count = len(self.keys)
        weights: dict[str, Any] = dict(zip(self.keys, arguments[:count], strict=True))
        return functional_call(self.module, weights, tuple(arguments[count:]))  # type: ignore[no-any-return]

    def _dims(self, arguments: Sequence[Tensor | None]) -> tuple[int | None, ...]:
        count = len(self.keys)
        return (*[None] * count, *(None if x is None else 0 for x in arguments[count:]))


@contextmanager
def agreeing(ranks: Ranks) -> Iterator[None]:
    """Raise on all ranks, or on none: what one rank cannot use, no rank uses."""
    if ranks.size == 1:
        yield
        return
    problem: Exception | None = None
    try:
        yield
    except Exception as raised:
        problem = raised
    # Residuals that are not finite are less severe: they only show that these weights are no better; others may be.
    severity = 0.0 if problem is None else 1.0 if getattr(problem, "cause", "") == "nonfinite_outputs" else 2.0
    worst = float(ranks.largest(torch.tensor(severity)))
    if problem is not None and worst == severity:
        raise problem
    if worst:
        cause = "nonfinite_outputs" if worst == 1.0 else "other_rank"
        raise Unusable(cause, "residuals could not be used on another rank")


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


def close(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal up to rounding; not if some are not finite."""
    if one.shape != other.shape:
        return False
    tolerance = ROUNDING if one.dtype == torch.float64 and other.dtype == torch.float64 else COARSE_ROUNDING
    # Norms, as absolute values would be copies of rows that may be very long.
    one, other = one.detach(), other.detach()
    difference, size = float(torch.dist(one, other, inf)), float(torch.linalg.vector_norm(other, inf))
    return difference <= tolerance * size < inf


def _one_line(problem: BaseException, most: int = 200) -> str:
    """The first line of an error's message: torch may add pages about its dispatcher.

    >>> _one_line(ValueError("too long" + chr(10) + "a table"))
    'too long'
    """
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return lines[0] if len(lines[0]) <= most else f"{lines[0][:most]} ..."
