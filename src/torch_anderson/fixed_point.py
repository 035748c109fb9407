"""Anderson acceleration of any tensor map, without an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .extrapolation import Weights, correction, mixing_factors
from .flat import columns_of, working_dtype
from .history import History, full_precision
from .least_squares import solve_gram_batch
from .options import CHOICES, is_integer


@dataclass(frozen=True)
class Solution:
    """What ``fixed_point`` found. With ``batched=True`` the numbers are tensors with one entry per problem."""

    x: Tensor
    """The best iterate seen: the one with the smallest residual."""
    residual_norm: Tensor
    """|g(x) - x| there."""
    iterations: int
    """Evaluations of g."""
    converged: Tensor
    """Whether |g(x) - x| <= tol * max(1, |x|)."""
    trace: Tensor
    """|g(x) - x| at every iteration (first dimension)."""
    predicted: Tensor
    """|r - R g| at every iteration: what acceleration leaves of the residual if g is linear."""


@torch.no_grad()
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

    Never raises for not converging: look at ``converged``. Non-finite values end a problem where it was best. No
    graph is kept: differentiate a converged solution implicitly, as in a deep equilibrium layer.

    Args:
        g: the map, from a tensor to one of the same shape.
        x0: where to begin.
        history_size: m, most differences used.
        relaxation: beta.
        mixing: ``"anderson"`` (the usual damping) or ``"paper"``, see :class:`Anderson`.
        regularization: relative, see :class:`Anderson`.
        tol: stop where |g(x) - x| <= tol * max(1, |x|).
        max_iterations: most evaluations of g.
        batched: the first dimension counts independent problems, solved side by side.

    Example:
        >>> solution = fixed_point(torch.cos, torch.ones(1, dtype=torch.float64), tol=1e-12)
        >>> bool(solution.converged), solution.iterations, round(float(solution.x), 9)
        (True, 9, 0.739085133)
    """
    _check(history_size, relaxation, mixing, regularization, tol, max_iterations)
    x = _flat(x0, batched).to(working_dtype(x0.dtype), copy=True)
    history = History(history_size, x.shape[-1], device=x.device, dtype=x.dtype, batch=tuple(x.shape[:-1]))
    best, best_norm = x.clone(), torch.full_like(x[..., 0], torch.inf)
    converged = torch.zeros_like(best_norm, dtype=torch.bool)
    going = ~converged
    trace: list[Tensor] = []
    predicted: list[Tensor] = []
    while len(trace) < max_iterations and going.any():
        u = _flat(g(_shaped(x, x0)), batched).to(x.dtype)
        norm = torch.linalg.vector_norm(u - x, dim=-1)
        better = going & (norm < best_norm)
        best, best_norm = _where(better, x, best), torch.where(better, norm, best_norm)
        converged |= better & (norm <= tol * torch.linalg.vector_norm(x, dim=-1).clamp_min(1.0))
        going &= ~converged & norm.isfinite()
        history.store(x, columns_of(_where(going, u, x)))  # a problem at rest leaves zeros in its history
        trace.append(norm)
        with full_precision(x.device):
            x, left = _next_iterate(history, relaxation, mixing, regularization)
        predicted.append(left)
    return Solution(
        x=_shaped(best, x0),
        residual_norm=best_norm,
        iterations=len(trace),
        converged=converged,
        trace=torch.stack(trace),
        predicted=torch.stack(predicted),
    )


def _next_iterate(history: History, relaxation: float, mixing: str, regularization: float) -> tuple[Tensor, Tensor]:
    """The accelerated iterate, and the residual norm predicted there."""
    products, residual_sq = history.products(range(history.size))
    gram, rhs = products[..., :-1, :], products[..., -1, :]
    values, fitted_sq = solve_gram_batch(gram, rhs, regularization)
    a, b, residual = mixing_factors(mixing, relaxation, rate=1.0)
    weights = Weights(a * values, b * values if b else None, residual)
    e = correction(weights, history.map_diffs, history.residual_diffs, history.last_residual)
    return history.last_map - e, (residual_sq - fitted_sq).clamp_min(0.0).sqrt()


def _flat(x: Tensor, batched: bool) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.reshape(x.shape[0], -1) if batched else x.reshape(-1)


def _shaped(x: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(x.reshape(*like.shape, 2)).to(like.dtype)
    return x.reshape(like.shape).to(like.dtype)


def _where(condition: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return torch.where(condition.unsqueeze(-1), x, other)


def _check(
    history_size: int, relaxation: float, mixing: str, regularization: float, tol: float, max_iterations: int
) -> None:
    rules = [
        ("history_size", history_size, is_integer(history_size) and history_size >= 1, "an integer of at least 1"),
        ("relaxation", relaxation, 0 < relaxation <= 1, "a number above 0 and at most 1"),
        ("mixing", mixing, mixing in CHOICES["mixing"], "'paper' or 'anderson'"),
        ("regularization", regularization, regularization >= 0, "a number of at least 0"),
        ("tol", tol, tol >= 0, "a number of at least 0"),
        (
            "max_iterations",
            max_iterations,
            is_integer(max_iterations) and max_iterations >= 1,
            "an integer of at least 1",
        ),
    ]
    for name, value, allowed, described in rules:
        if not allowed:
            raise ValueError(f"Invalid {name}: {value!r}. Allowed: {described}.")
