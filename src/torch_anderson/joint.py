"""The one least-squares problem over all blocks: putting it together, and forming the candidate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from math import fsum, isfinite, nan, sqrt
from operator import mul
from typing import Any

import torch
from torch import Tensor

from .extrapolation import Weights, correction, mixing_weights
from .history import columns, full_precision
from .least_squares import Coefficients, System, solve_gram, solve_qr
from .noise import noise_share
from .options import Options
from .parameters import Block


@dataclass(eq=False)
class Problem:
    """The joint problem, solved when its solution is asked for: a jump may be refused without it."""

    gram: list[list[float]]
    """Lower triangle of R'R / rate^2, newest column first."""
    rate: float
    """The largest learning rate."""
    residual_sq: float
    """|r / rate|^2"""
    normalized_norm: float
    """|r / lr|, each entry divided by its own learning rate."""
    path: float
    """Length of the path through the stored iterates."""
    solve: Callable[[], Coefficients]

    @cached_property
    def solution(self) -> Coefficients:
        """g, newest column first."""
        return self.solve()

    @property
    def residual_norm(self) -> float:
        """|r|"""
        return self.rate * sqrt(self.residual_sq)

    @property
    def left_sq(self) -> float:
        """|r - R g|^2 / |r|^2"""
        return max(1 - self.solution.fitted_sq / self.residual_sq, 0.0) if self.residual_sq else 0.0

    @property
    def predicted_residual_norm(self) -> float:
        """|r - R g|"""
        return self.residual_norm * self.gain

    @property
    def gain(self) -> float:
        """Predicted over present residual norm."""
        return sqrt(self.left_sq)


COLLINEAR, DISTINCT = 1e-2, 1e-1
"""Squared distances of a column from the span of the others: below the first, products have to be exact; above the
second, they need not be any more."""
FITTED = 1e-2
"""The same for the share of |r|^2 that is left."""

LEAST_REGULARIZATION = 1e-12
"""Without noise."""
NOISE_REGULARIZATION = 0.1
"""Where residual differences are nothing but noise."""


def assemble(blocks: Sequence[Block], options: Options) -> Problem | None:
    """The joint problem at the present learning rates; None if a number is not finite.

    Products of long rows are formed in their own type, at half the time, as long as that is good enough: errors of
    1e-7 change the least-squares residual by less than 1e-5 of it unless columns are nearly collinear, or span r.
    """
    problem = _add_up(blocks, options)
    if problem is None or all(block.history.wide for block in blocks):
        return problem
    left = min(problem.solution.least_distance_sq / COLLINEAR, problem.left_sq / FITTED)
    if left < 1 and not blocks[0].system.exact:
        for block in blocks:
            block.system, block.history.fresh = System(exact=True), block.history.rows
        return _add_up(blocks, options)
    if left > DISTINCT / COLLINEAR:
        for block in blocks:
            block.system.exact = False
    return problem


def _add_up(blocks: Sequence[Block], options: Options) -> Problem | None:
    """Add up the blocks' systems. Rates are relative to the largest, so that a single block's is taken as it is."""
    largest = max(block.learning_rate for block in blocks) or 1.0
    weights = [(block.learning_rate / largest) ** 2 for block in blocks]
    squares, path = _update_systems(blocks)
    residual_sq = sum(map(mul, weights, squares))
    gram, rhs = _weighted_sum([block.system for block in blocks], weights)
    diagonal = [row[-1] for row in gram]  # bounds all of R'R
    if not isfinite(residual_sq + path + sum(diagonal) + sum(rhs)):
        return None
    regularization = _regularization(gram, options)
    problem = Problem(
        gram=gram,
        rate=largest,
        residual_sq=residual_sq,
        normalized_norm=sqrt(sum(squares)),
        path=path,
        solve=partial(solve_gram, gram, rhs, regularization),
    )
    if options.solver == "qr":  # from the rows, which will not stay
        problem.solution = _solve_qr(blocks, largest, regularization)
    return problem


def _regularization(gram: Sequence[Sequence[float]], options: Options) -> float:
    """The one that is set, or by the noise that cycles show. Noisy steps are not extrapolated at all."""
    if not isinstance(options.regularization, str):
        return options.regularization
    noise = noise_share(gram) if options.residual == "cycle" else 0.0
    return LEAST_REGULARIZATION + NOISE_REGULARIZATION * noise


def _update_systems(blocks: Sequence[Block]) -> tuple[list[float], float]:
    """Bring the blocks' systems up to date, with one copy of all numbers from the device. Returns |r / lr|^2 of
    each block and the length of the path."""
    newest_first = blocks[0].history.newest_first
    parts: list[Tensor] = []
    for block in blocks:
        history, exact = block.history, block.system.exact
        slots = [*newest_first[: history.fresh], *([history.size] if exact else [])]  # and the residual itself
        parts += [*history.products(slots, exact), history.path_sq]
        block.history.fresh = 0
    numbers = _fetch(parts)
    for block, products in zip(blocks, numbers[::3], strict=True):
        block.system.update(newest_first, products)
    path_sq = numbers[2] if len(blocks) == 1 else map(sum, zip(*numbers[2::3], strict=True))
    return numbers[1::3], sum(map(sqrt, path_sq))


def _fetch(parts: Sequence[Tensor]) -> list[Any]:
    """The numbers of several tensors as nested lists, with one copy from the device."""
    if parts[0].device.type != "cpu":
        flat = torch.cat([part.flatten().to(parts[0].device) for part in parts]).cpu()
        pieces = flat.split([part.numel() for part in parts])
        parts = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
    return [part.tolist() for part in parts]


def _weighted_sum(systems: Sequence[System], weights: Sequence[float]) -> tuple[list[list[float]], list[float]]:
    if len(systems) == 1:
        return systems[0].gram, systems[0].rhs
    gram = [_weighted_rows(rows, weights) for rows in zip(*(system.gram for system in systems), strict=True)]
    return gram, _weighted_rows([system.rhs for system in systems], weights)


def _weighted_rows(rows: Sequence[list[float]], weights: Sequence[float]) -> list[float]:
    return [sum(map(mul, weights, entries)) for entries in zip(*rows, strict=True)]


def _solve_qr(blocks: Sequence[Block], largest: float, regularization: float) -> Coefficients:
    newest_first = blocks[0].history.newest_first
    rows, residuals = [], []
    for block in blocks:
        history, rate = block.history, block.learning_rate / largest
        rows.append((history.residual_diffs[newest_first].double() * rate).to(blocks[0].device))
        residuals.append((history.last_residual.double() * rate).to(blocks[0].device))
    return solve_qr(torch.cat(rows, dim=1).T, torch.cat(residuals), regularization)


def form_candidates(blocks: Sequence[Block], problem: Problem, options: Options) -> tuple[float, float]:
    """Put the candidate u - e into each ``iterate``, whose weights are not needed any more.

    Returns the length of the jump r - e, and its inner product with r.
    """
    parts = []
    for block in blocks:
        with full_precision(block.device):
            parts.append(_form_candidate(block, problem.solution.values, options))
    numbers = iter(_fetch(list(chain.from_iterable(parts))))
    e_times_r = e_sq = 0.0
    for block, part in zip(blocks, parts, strict=True):
        products = list(islice(numbers, len(part)))
        e_times_r += block.learning_rate * fsum(products[::2])
        e_sq += fsum(products[1::2])
    r_sq = problem.residual_norm**2
    length_sq = r_sq - 2 * e_times_r + e_sq
    return sqrt(max(length_sq, 0.0)) if isfinite(length_sq) else nan, r_sq - e_times_r


def _form_candidate(block: Block, coefficients: Sequence[float], options: Options) -> list[Tensor]:
    """Put a block's candidate into ``iterate``; returns e . r / lr and e . e, chunk by chunk."""
    history = block.history
    weights = mixing_weights(coefficients, history.learning_rates, options.mixing, options.relaxation)
    residual_rows = block.by_slot(weights.residual_rows).clone() if weights.residual_rows else None
    on_device = Weights(block.by_slot(weights.map_rows), residual_rows, weights.residual)
    products = []
    for a, b in block.chunks():
        last_r = columns(history.last_residual, a, b)
        e = correction(on_device, columns(history.map_diffs, a, b), columns(history.residual_diffs, a, b), last_r)
        torch.sub(columns(history.last_map, a, b), e, out=columns(block.iterate, a, b))
        e = e.to(last_r.dtype)
        products += [torch.dot(e, last_r), torch.dot(e, e)]
    return products
