"""The residuals of an objective as functions of one flat vector of weights, and the rows of their Jacobian.

Weights, samples and buffers are converted to float64, whatever the network's type. Nothing is written to the model: its
parameters and buffers are replaced for the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from .objective import ADVICE, Objective, Samples, at_point
from .outputs import Unusable
from .trace import Factors, Weigh, trace

BLOCK = 500
"""Most samples that are evaluated at once."""
SEEN = 4
"""Samples on which traced residuals and rows are compared with those of torch.func."""
CLOSE = 3e-8
"""Largest difference, relative to the largest number, in float64."""

Values = dict[str, Tensor]
"""Residuals (samples, p) by the names of terms."""
Given = Mapping[str, Samples]
"""Samples by the names of terms."""


class OneSample(nn.Module):
    """A term's residuals at one sample, as a module around the model, whose parameters can be replaced for a call.

    A function that uses parameters of the model directly, such as an unknown coefficient, sees the replaced ones.
    """

    def __init__(self, objective: Objective, name: str):
        super().__init__()
        self.model = objective.module
        self.term = objective.terms[name]
        self.name = name

    def forward(self, one: Tensor | None, *sample: Tensor) -> Tensor:
        """All residuals as one vector. ``one`` makes every input of the model depend on the sample."""

        def u(*point: Tensor) -> Tensor:
            if one is not None:
                point = tuple(x * one if x.is_floating_point() else x for x in point)
            return at_point(self.model, *point)

        return torch.cat([x.reshape(-1) for x in self.term.residuals(self.name, u, sample)])


class TermResiduals:
    """Residuals (k, p) of one term at k samples, and rows of their Jacobian, in blocks."""

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

    def prepare(self, fixed: Sequence[Tensor], samples: Samples) -> None:
        """Trace the residuals for a block of as many samples."""
        self.block = len(samples[0])
        self.traced = self.factors = None
        plain = self.plain(*fixed, None, *samples)
        if not torch.equal(self.plain(*fixed, None, *samples), plain):
            raise Unusable("random_outputs", f"the residual of {self.name!r} is random, e.g. for dropout. {HISTORY}")
        self.size = plain.shape[1]
        arguments = [*fixed, samples[0].new_ones(self.block, dtype=fixed[0].dtype), *samples]
        try:
            self._trace(arguments, plain)
        except Exception as problem:  # tracing depends on much; the plain way is always there
            self.untraced = str(problem)

    def _trace(self, arguments: Sequence[Tensor], plain: Tensor) -> None:
        """Use the trace if it gives what the plain way gives."""
        module = trace(self.plain, arguments)
        if close(module(*arguments), plain):
            self.traced = module.forward
            factors = Factors(module, self.trained, self.block)
            if close(self._seen(factors, arguments), self._seen(self.plain_rows, arguments)):
                self.factors = factors

    def _seen(self, rows: Callable[..., Tensor], arguments: Sequence[Tensor]) -> Tensor:
        """The rows of some samples."""
        if rows == self.plain_rows:
            arguments = [*arguments[: len(self.keys)], *(x[:SEEN] for x in arguments[len(self.keys) :])]
        sizes = [x.numel() for x in arguments[: self.trained]]
        out = arguments[0].new_empty(len(arguments[-1]), self.size, sum(sizes))
        rows(arguments, unweighted, out.split(sizes, -1))
        return out[:SEEN]

    # ------------------------------------------------------------------------------------------------- the plain way

    def plain(self, *arguments: Tensor | None) -> Tensor:
        """Residuals of some samples; the arguments are weights, constants, a one for each sample, and the samples."""
        return torch.vmap(self._one, self._dims(arguments), randomness="different")(*arguments)

    def plain_rows(self, arguments: Sequence[Tensor | None], weigh: Weigh, out: Sequence[Tensor]) -> Tensor:
        """Residuals, and rows of their weighted sums, by differentiating the residuals of each sample."""

        def twice(*arguments: Tensor | None) -> tuple[Tensor, Tensor]:
            found = self._one(*arguments)
            return found, found

        rows = jacrev(twice, argnums=tuple(range(self.trained)), has_aux=True)
        slopes, values = torch.vmap(rows, self._dims(arguments), randomness="different")(*arguments)
        weights = weigh(values.detach())
        for part, slope in zip(out, slopes, strict=True):
            part.copy_(torch.einsum("jkp,kpn->kjn", weights, slope.detach().reshape(*values.shape, -1)))
        return values.detach()

    def _one(self, *arguments: Tensor | None) -> Tensor:
        count = len(self.keys)
        weights = dict(zip(self.keys, arguments[:count], strict=True))
        return functional_call(self.module, weights, tuple(arguments[count:]))  # type: ignore[arg-type, no-any-return]

    def _dims(self, arguments: Sequence[Tensor | None]) -> tuple[int | None, ...]:
        count = len(self.keys)
        return (*[None] * count, *(None if x is None else 0 for x in arguments[count:]))

    # -------------------------------------------------------------------------------------------------------- in blocks

    def values(self, fixed: Sequence[Tensor], samples: Samples) -> Tensor:
        """Residuals (k, p)."""
        found = []
        for some, count in self._blocks(samples):
            if self.traced is None:
                found.append(self.plain(*fixed, None, *some)[:count])
            else:
                found.append(self.traced(*fixed, some[0].new_ones(self.block, dtype=fixed[0].dtype), *some)[:count])
        return torch.cat(found) if found else fixed[0].new_empty(0, self.size)

    def rows(self, fixed: Sequence[Tensor], samples: Samples, weigh: Weigh, out: Tensor) -> Tensor:
        """Residuals (k, p); rows of their weighted sums are written to ``out``, (k, rows, n)."""
        sizes = [x.numel() for x in fixed[: self.trained]]
        found, done = [], 0
        for some, count in self._blocks(samples):
            whole = count == self.block
            part = out[done : done + count] if whole else out.new_empty(self.block, *out.shape[1:])
            one = some[0].new_ones(self.block, dtype=fixed[0].dtype)
            rows = self.factors or self.plain_rows
            found.append(rows([*fixed, one, *some], weigh, part.split(sizes, -1))[:count])
            if not whole:
                out[done : done + count] = part[:count]
            done += count
        return torch.cat(found)

    def _blocks(self, samples: Samples) -> Iterator[tuple[Samples, int]]:
        """Blocks of constant length; the last one is filled up with its first sample."""
        for start in range(0, len(samples[0]), self.block):
            some = tuple(x[start : start + self.block] for x in samples)
            count = len(some[0])
            if count < self.block:
                some = tuple(torch.cat([x, x[:1].expand(self.block - count, *x.shape[1:])]) for x in some)
            yield some, count


class Residuals:
    """All residuals of an objective at any weights; ``n`` of them are trained, in the order of the model's."""

    def __init__(self, objective: Objective, params: Sequence[Tensor]):
        trained = {id(p) for p in params}
        found = dict(objective.module.named_parameters())
        names = [name for name, p in found.items() if id(p) in trained]
        self.objective = objective
        self.params = [found[name] for name in names]
        self.constants = {name: p for name, p in found.items() if id(p) not in trained}
        self.constants |= dict(objective.module.named_buffers())
        self.sizes = [p.numel() for p in self.params]
        self.n = sum(self.sizes)
        self.terms = {name: TermResiduals(objective, name, names, list(self.constants)) for name in objective.terms}
        self.dtype = torch.float64
        self.prepared = False
        self._constants: list[Tensor] = []

    def prepare(self, weights: Tensor, samples: Given) -> None:
        """Trace all terms, for blocks of these samples. In the network's type if its function needs that."""
        kept = weights.clone()
        self.refresh()
        try:
            self._prepare(weights, samples)
        except Exception as problem:
            own = self.params[0].dtype
            if own == self.dtype or isinstance(problem, Unusable):
                raise
            self.dtype = own
            self.refresh()
            self._prepare(weights, samples)
        if not torch.equal(kept, weights):
            raise Unusable("outputs_wrote", "a residual changed the parameters; it must only evaluate the model")
        self.prepared = True

    def _prepare(self, weights: Tensor, samples: Given) -> None:
        for name, term in self.terms.items():
            try:
                term.prepare(self._fixed(weights), self._converted(tuple(x[:BLOCK] for x in samples[name])))
            except Exception as problem:
                problem.add_note(ADVICE.format(name=name))
                raise

    def read(self) -> Tensor:
        """The parameters as one vector."""
        return torch.cat([p.detach().reshape(-1).double() for p in self.params])

    @torch.no_grad()
    def write(self, weights: Tensor) -> None:
        """Set the parameters."""
        for p, part in zip(self.params, weights.split(self.sizes), strict=True):
            p.copy_(part.view(p.shape))

    def rounded(self, weights: Tensor) -> Tensor:
        """The vector that ``read`` gives after ``write``."""
        parts = weights.split(self.sizes)
        return torch.cat([part.to(p.dtype).double() for part, p in zip(parts, self.params, strict=True)])

    def refresh(self) -> None:
        """Look at frozen parameters and buffers, which somebody may have changed."""
        self._constants = [self._cast(x.detach().clone()) for x in self.constants.values()]

    @torch.no_grad()
    def values(self, weights: Tensor, samples: Given) -> Values:
        """Residuals of all terms."""
        fixed = self._fixed(weights)
        return {name: term.values(fixed, self._converted(samples[name])).double() for name, term in self.terms.items()}

    @torch.no_grad()
    def rows(self, weights: Tensor, samples: Given, weigh: Mapping[str, Weigh], out: Tensor) -> Values:
        """Residuals of all terms; rows of their weighted sums are written to ``out``, one term after the other."""
        fixed, values, done = self._fixed(weights), {}, 0
        for name, term in self.terms.items():
            count = len(samples[name][0])
            part = out[done : done + count * term.size]
            direct = part if self.dtype == out.dtype else part.to(self.dtype)
            found = term.rows(fixed, self._converted(samples[name]), weigh[name], direct.view(count, term.size, self.n))
            if direct is not part:
                part.copy_(direct)
            values[name] = found.double()
            done += count * term.size
        return values

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


HISTORY = "Evaluate in model.eval(), or build GaussNewton(..., directions='history')"


def unweighted(values: Tensor) -> Tensor:
    """Weights of the sums that are the residuals themselves."""
    count, size = values.shape
    return torch.eye(size, dtype=values.dtype, device=values.device).unsqueeze(1).expand(size, count, size)


def close(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal up to rounding; not if some are not finite."""
    tolerance = CLOSE if one.dtype == torch.float64 and other.dtype == torch.float64 else 1e-3
    return one.shape == other.shape and bool((one - other).abs().max() <= tolerance * other.abs().max())
