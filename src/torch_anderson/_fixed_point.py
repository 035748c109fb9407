"""Anderson acceleration of any tensor map, without an optimizer.

Each problem is one row of n numbers in float64, whatever the type and shape of the tensors that the map works on:

    x           the iterate, representable in the type that the map is handed
    u, r        g(x), and the residual u - x
    U, R        differences of successive u and r, each pair divided by |difference of r|
    c           argmin |r - R'c|
    anderson    the next iterate is x - (U - R)'c + beta (r - R'c)
    paper       the next iterate is x + beta (r - U'c)

The division changes no iterate, as c makes up for it. It gives the columns of the least-squares problem unit length:
regularization and rank are relative to them, and products neither overflow nor underflow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._options import choice, integer, real

RANK_TOLERANCE = 1e-14
"""Directions in which the unit columns have a squared length below this are left out: they are rounding errors."""


@dataclass(frozen=True)
class Solution:
    """The result of ``fixed_point``. With ``batched=True``, the norms have one entry per problem."""

    x: Tensor
    """The iterate with the smallest residual, among those at which g was evaluated."""
    residual_norm: Tensor
    """|g(x) - x|, measured at exactly this x, in float64; infinite if g(x0) - x0 was not finite."""
    iterations: int
    """Number of evaluations of g."""
    converged: Tensor
    """Whether |g(x) - x| <= tol * max(1, |x|) at this x."""
    trace: Tensor
    """|g(x) - x| at every iteration (first dimension)."""
    predicted: Tensor
    """|r - R'c| at every iteration: the residual norm that acceleration leaves if g is affine and beta is 1."""


def fixed_point(
    g: Callable[[Tensor], Tensor],
    x0: Tensor,
    *,
    history_size: int = 5,
    relaxation: float = 1.0,
    mixing: str = "anderson",
    regularization: float = 1e-12,
    tol: float = 1e-6,
    max_iterations: int = 100,
    batched: bool = False,
) -> Solution:
    """Solve x = g(x) by Anderson acceleration.

    Failure to converge raises no error: look at ``converged``. A problem whose values are no longer finite ends at its
    best iterate. The result carries no graph: differentiate a converged solution implicitly, as deep equilibrium
    layers do. ``g`` runs in the caller's grad mode and may use autograd; if not, ``torch.no_grad()`` saves memory.

    Args:
        g: the map, from a copy of the iterate, which it may overwrite, to a tensor of the same shape and device. If
            the result has another dtype, it is used as it is, unless it is complex and ``x0`` is not; iterates keep
            the dtype of ``x0``.
        x0: the first iterate, a floating-point or complex tensor.
        history_size: m, the largest number of differences in use.
        relaxation: beta, above 0 and at most 1.
        mixing: ``"anderson"`` damps the extrapolated residual; ``"paper"`` the whole jump, as :class:`Anderson` does.
        regularization: added to the diagonal of the Gram matrix, relative to its entries.
        tol: iteration ends where |g(x) - x| <= tol * max(1, |x|); out of reach if below the dtype's rounding error.
        max_iterations: the largest number of evaluations of g.
        batched: whether the first dimension counts independent problems.

    Example:
        >>> solution = fixed_point(torch.cos, torch.ones(1, dtype=torch.float64), tol=1e-12)
        >>> bool(solution.converged), solution.iterations, round(float(solution.x), 9)
        (True, 9, 0.739085133)
    """
    options = Options(
        integer("history_size", history_size, least=1),
        real("relaxation", relaxation, lambda v: 0 < v <= 1, "a number above 0 and at most 1"),
        choice("mixing", mixing, ("anderson", "paper")),
        real("regularization", regularization, lambda v: 0 <= v < torch.inf, "a finite number from 0"),
        real("tol", tol, lambda v: 0 <= v < torch.inf, "a finite number from 0"),
        integer("max_iterations", max_iterations, least=1),
    )
    _check_start(x0, batched)
    return _iterate(g, x0, batched, options)


class Options(NamedTuple):
    """Options of ``fixed_point`` that have been checked."""

    history_size: int
    relaxation: float
    mixing: str
    regularization: float
    tol: float
    max_iterations: int


def _iterate(g: Callable[[Tensor], Tensor], x0: Tensor, batched: bool, options: Options) -> Solution:
    """Evaluate g and extrapolate until all problems have converged or are no longer finite."""
    x = _rows(x0, x0, batched)
    progress = _start(x)
    history = History(x, min(options.history_size, options.max_iterations))
    trace: list[tuple[Tensor, Tensor]] = []
    for _ in range(options.max_iterations):
        u = _rows(_evaluate(g, _tensor(x, x0)), x0, batched)
        history.store(u, u - x)
        norm = _norm(history.pair[1])
        progress = _judge(progress, x, norm, options.tol)
        candidate, left = _accelerate(history, options)
        x = torch.where(progress.going, _round(candidate, u, x0.dtype), progress.best)
        trace.append((norm, _norm(left)))
        if not progress.going.any():
            break
    columns = (progress.norm, progress.converged, *map(torch.stack, zip(*trace, strict=True)))
    norm, converged, norms, predicted = (v.squeeze(-1) if batched else v[..., 0, 0] for v in columns)
    return Solution(_tensor(progress.best, x0), norm, len(trace), converged, norms, predicted)


class History:
    """The last u and r of all problems (``pair``), and U and R, which are rings of rows (``differences``)."""

    def __init__(self, x: Tensor, size: int):
        self.pair = x.new_zeros(2, *x.shape)
        self.differences = x.new_zeros(2, len(x), size, x.shape[-1])
        self.stored = 0

    def store(self, u: Tensor, r: Tensor) -> None:
        """Store u and r, and their differences to the last ones in place of the oldest differences."""
        last_pair, self.pair = self.pair, torch.stack([u, r])
        if self.stored > 0:
            oldest = (self.stored - 1) % self.differences.shape[2]
            _divided_difference(self.pair, last_pair, out=self.differences[:, :, oldest])
        self.stored += 1


def _divided_difference(pair: Tensor, last_pair: Tensor, out: Tensor) -> None:
    """The differences of u and r, divided by the length of the latter; zeros where that is 0 or not finite."""
    torch.sub(pair, last_pair, out=out)
    length = _norm(out[1])
    out.div_(length).masked_fill_((length == 0) | ~length.isfinite(), 0.0)


class Progress(NamedTuple):
    """The state of all problems, one row each: the iterate with the smallest residual, and the residual norm there."""

    best: Tensor
    norm: Tensor
    converged: Tensor
    going: Tensor


def _start(x: Tensor) -> Progress:
    """The progress before the first evaluation."""
    going = x.new_ones(len(x), 1, dtype=torch.bool)
    return Progress(best=x, norm=x.new_full(going.shape, torch.inf), converged=~going, going=going)


def _judge(progress: Progress, x: Tensor, norm: Tensor, tol: float) -> Progress:
    """The progress once the residual norm at x is known."""
    going = progress.going & norm.isfinite()
    better = going & (norm < progress.norm)
    arrived = better & (norm <= tol * _norm(x).clamp_min(1.0))
    best, norm = torch.where(better, x, progress.best), torch.where(better, norm, progress.norm)
    return Progress(best, norm, progress.converged | arrived, going & ~arrived)


def _accelerate(history: History, options: Options) -> tuple[Tensor, Tensor]:
    """The next iterate, and the residual r - R'c predicted for the extrapolated point."""
    (u, r), (_, R), beta = history.pair, history.differences, options.relaxation
    c = _solve(R @ R.mT, R @ r.unsqueeze(-1), options.regularization)
    map_part, residual_part = (c.mT @ history.differences).squeeze(-2)
    left = r - residual_part
    if options.mixing == "paper":
        return u - beta * map_part - (1 - beta) * r, left
    return torch.sub(u - map_part, left, alpha=1 - beta), left


def _round(candidate: Tensor, plain: Tensor, dtype: torch.dtype) -> Tensor:
    """The candidate, or the plain step where extrapolation has left the range of ``dtype``, in its precision."""
    in_range = (candidate.abs() <= torch.finfo(dtype).max).all(-1, keepdim=True)
    return torch.where(in_range, candidate, plain).to(dtype.to_real()).double()


def _solve(gram: Tensor, rhs: Tensor, regularization: float) -> Tensor:
    """Solve a batch of least-squares problems from the Gram matrices of their unit columns.

    >>> _solve(torch.eye(2)[None], torch.tensor([[[8.0], [3.0]]]), regularization=1.0).flatten().tolist()
    [4.0, 1.5]
    """
    eigenvalues, vectors = torch.linalg.eigh(gram)
    inverse = torch.where(eigenvalues > RANK_TOLERANCE, 1 / (eigenvalues + regularization), 0.0)
    return vectors @ (inverse.unsqueeze(-1) * (vectors.mT @ rhs))


def _norm(rows: Tensor) -> Tensor:
    """Euclidean norms of rows, whose squares may overflow or underflow; NaN, not infinity, for a row out of range."""
    scale = torch.linalg.vector_norm(rows, ord=1, dim=-1, keepdim=True)
    scale = scale.where(scale != 0, 1.0)
    return scale * torch.linalg.vector_norm(rows / scale, dim=-1, keepdim=True)


def _rows(tensor: Tensor, x0: Tensor, batched: bool) -> Tensor:
    """A float64 copy of the numbers in a tensor, one row per problem."""
    tensor = tensor.detach() if batched else tensor.detach().unsqueeze(0)
    if x0.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
    return tensor.to(torch.float64, copy=True).unsqueeze(-1).flatten(1)


def _tensor(rows: Tensor, x0: Tensor) -> Tensor:
    """A copy of ``rows`` with the shape and dtype of ``x0``; the inverse of ``_rows``."""
    if x0.is_complex():
        return torch.view_as_complex(rows.reshape(*x0.shape, 2)).to(x0.dtype, copy=True)
    return rows.reshape(x0.shape).to(x0.dtype, copy=True)


def _evaluate(g: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    shape, dtype, device = x.shape, x.dtype, x.device  # before g, which may change x itself
    u = g(x)
    if not isinstance(u, Tensor):
        raise TypeError(f"g must return a tensor, not {type(u).__name__}.")
    if u.shape != shape:
        raise ValueError(f"g returned shape {tuple(u.shape)} for an x of shape {tuple(shape)}: they must be equal.")
    if u.device != device:
        raise ValueError(f"g returned a tensor on {u.device} for an x on {device}: they must be on one device.")
    if not torch.can_cast(u.dtype, dtype):
        raise TypeError(f"g returned {u.dtype} for an x of {dtype}: start from a complex x0.")
    return u


def _check_start(x0: Tensor, batched: bool) -> None:
    if not isinstance(x0, Tensor):
        raise TypeError(f"x0 must be a tensor, not {type(x0).__name__}.")
    if not (x0.is_floating_point() or x0.is_complex()):
        raise TypeError(f"x0 has dtype {x0.dtype}, which cannot hold the iterates: pass x0.double() or x0.float().")
    if batched and x0.dim() == 0:
        raise ValueError("x0 has no dimensions, but batched=True needs a first one that counts the problems.")
