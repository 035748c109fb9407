"""The one least-squares problem over all blocks: putting it together, and forming the candidate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from math import fsum, isfinite, nan, sqrt
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .distributed import Ranks
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


def assemble(blocks: Sequence[Block], options: Options, ranks: Ranks) -> Problem | None:
    """The joint problem at the present learning rates, the same on all ranks; None if a number is not finite.

    Products of long rows are formed in their own type, at half the time, as long as that is good enough: errors of
    1e-7 change the least-squares residual by less than 1e-5 of it unless columns are nearly collinear, or span r.
    Several ranks share the work, and form exact products at once: finding out would take another message. So do rows
    that are rounded, which do not add up to the residual.
    """
    at_once = ranks.size > 1 or any(block.history.courier for block in blocks)
    if at_once and not blocks[0].system.exact:
        _multiply_anew(blocks)
    problem = _add_up(blocks, options, ranks)
    if problem is None or at_once or all(block.history.wide for block in blocks):
        return problem
    left = min(problem.solution.least_distance_sq / COLLINEAR, problem.left_sq / FITTED)
    if left < 1 and not blocks[0].system.exact:
        _multiply_anew(blocks)
        return _add_up(blocks, options, ranks)
    if left > DISTINCT / COLLINEAR:
        for block in blocks:
            block.system.exact = False
    return problem


def _multiply_anew(blocks: Sequence[Block]) -> None:
    """Let the next products be exact, and those of all rows."""
    for block in blocks:
        block.system, block.history.fresh = System(exact=True), block.history.rows


def _add_up(blocks: Sequence[Block], options: Options, ranks: Ranks) -> Problem | None:
    """Add up the blocks' systems. Rates are relative to the largest, so that a single block's is taken as it is."""
    largest = max(block.learning_rate for block in blocks) or 1.0
    weights = [(block.learning_rate / largest) ** 2 for block in blocks]
    squares, path = _update_systems(blocks, ranks)
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
        problem.solution = _solve_qr(blocks, largest, regularization, ranks)
    return problem


def _regularization(gram: Sequence[Sequence[float]], options: Options) -> float:
    """The one that is set, or by the noise that cycles show. Noisy steps are not extrapolated at all."""
    if not isinstance(options.regularization, str):
        return options.regularization
    noise = noise_share(gram) if options.residual == "cycle" else 0.0
    return LEAST_REGULARIZATION + NOISE_REGULARIZATION * noise


def _update_systems(blocks: Sequence[Block], ranks: Ranks) -> tuple[list[float], float]:
    """Bring the blocks' systems up to date, with one copy of all numbers from the device and one message. Returns
    |r / lr|^2 of each block and the length of the path."""
    newest_first = blocks[0].history.newest_first
    if ranks.size > 1:
        return _update_together(blocks, newest_first, ranks)
    parts: list[Tensor] = []
    for block in blocks:
        history, exact = block.history, block.system.exact
        slots = [*newest_first[: history.fresh], *([history.size] if exact else [])]  # and the residual itself
        parts += [*history.products(slots, exact), history.path_sq]
        history.fresh = 0
    numbers = _fetch(parts)
    for block, products in zip(blocks, numbers[::3], strict=True):
        block.system.update(newest_first, products)
    path_sq = numbers[2] if len(blocks) == 1 else map(sum, zip(*numbers[2::3], strict=True))
    return numbers[1::3], sum(map(sqrt, path_sq))


class Sums(NamedTuple):
    """What ranks add up of a block."""

    products: Tensor
    """Of new rows with all."""
    older: Tensor
    """Of rows that the moments lack besides; mostly empty."""
    residual_sq: Tensor
    """|r / lr|^2."""
    path_sq: Tensor


def _update_together(blocks: Sequence[Block], newest_first: list[int], ranks: Ranks) -> tuple[list[float], float]:
    """The same over several ranks, moments included: each rank multiplies its own columns, then they add up."""
    asked = [_rows_to_multiply(block, newest_first) for block in blocks]
    own = [_own_sums(block, *rows) for block, rows in zip(blocks, asked, strict=True)]
    found = _add_over_ranks(own, ranks)
    for block, rows, sums in zip(blocks, asked, found, strict=True):
        _take_over(block, newest_first, *rows, sums)
    path_sq = torch.stack([sums.path_sq for sums in found]).sum(0)
    return [float(sums.residual_sq) for sums in found], float(path_sq.sqrt().sum())


def _own_sums(block: Block, fresh: list[int], older: list[int]) -> Sums:
    """Over the columns that this rank multiplies; the path is known over all that it keeps."""
    products, residual_sq = block.history.products(fresh, maps=True, span=block.span)
    more = block.history.products(older, maps=True, span=block.span)[0] if older else products.new_zeros(0)
    weight, path_sq = block.span_weight, block.copy_weight * block.history.path_sq.to(products.device)
    return Sums(weight * products, weight * more, weight * residual_sq, path_sq)


def _take_over(block: Block, newest_first: list[int], fresh: list[int], older: list[int], sums: Sums) -> None:
    block.moments.update(fresh, sums.products)
    if older:
        block.moments.update(older, sums.older)
    new = block.history.fresh + 1  # columns of new rows, and behind them the residual's
    block.system.update(newest_first, sums.products[: block.history.size + 1, :new].tolist())
    block.history.fresh, block.moments.complete = 0, True


def path_sq(blocks: Sequence[Block], ranks: Ranks) -> list[float]:
    """Squared lengths of the steps of the path, by slot. Asks other ranks only if they have other columns."""
    if blocks[0].history.rows == 0 or not any(block.sharded for block in blocks):
        return sum(block.history.path_sq.cpu() for block in blocks).tolist()  # type: ignore[union-attr,return-value]
    return ranks.sum(sum(block.copy_weight * block.history.path_sq.cpu() for block in blocks)).tolist()  # type: ignore[arg-type]


def set_path_sq(block: Block, values: Sequence[float], ranks: Ranks) -> None:
    """The inverse: give them to one block, in equal parts to the ranks."""
    block.history.path_sq.copy_(torch.tensor(values, dtype=torch.float64) / (ranks.size * block.copy_weight))


def _rows_to_multiply(block: Block, newest_first: list[int]) -> tuple[list[int], list[int]]:
    """The rows of ``History.products`` that are new, and those that the moments lack besides."""
    fresh = block.history.fresh
    older = [] if block.moments.complete else newest_first[fresh:]
    return block.moments.rows(newest_first[:fresh]), block.moments.rows(older) if older else []


def _add_over_ranks(own: Sequence[Sums], ranks: Ranks) -> list[Sums]:
    """Over all ranks, in one message."""
    parts = [part for sums in own for part in sums]
    flat = torch.cat([part.flatten().to(parts[0].device) for part in parts])
    pieces = iter(ranks.sum(flat).cpu().split([part.numel() for part in parts]))
    return [Sums(*(next(pieces).view(part.shape) for part in sums)) for sums in own]


def _fetch(parts: Sequence[Tensor]) -> list[Any]:
    """The numbers of several tensors as nested lists, with one copy from the device."""
    if any(part.device.type != "cpu" for part in parts):
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


def _solve_qr(blocks: Sequence[Block], largest: float, regularization: float, ranks: Ranks) -> Coefficients:
    """From all rows; of several ranks, from the triangles that are left of their own."""
    newest_first = blocks[0].history.newest_first
    rows: list[Tensor] = []
    for block in blocks:
        history, (a, b) = block.history, block.span
        scale = block.learning_rate / largest * sqrt(block.span_weight)
        history.arrive()
        residual_diffs = columns(history.residual_diffs, a, b)
        last = columns(history.last_residual, a, b).to(residual_diffs.device)
        own = torch.cat([residual_diffs[newest_first].double(), last.double()[None]])
        rows.append((own * scale).to(blocks[0].device))
    matrix = torch.cat(rows, dim=1).T
    if ranks.size > 1:
        square = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        triangle = torch.linalg.qr(matrix, mode="r").R
        square[: len(triangle)] = triangle
        matrix = ranks.gather(square).flatten(0, 1)
    return solve_qr(matrix[:, :-1], matrix[:, -1], regularization)


def form_candidates(blocks: Sequence[Block], problem: Problem, options: Options, ranks: Ranks) -> tuple[float, float]:
    """Put the candidate u - e into each ``iterate``, whose weights are not needed any more.

    Returns the length of the jump r - e, and its inner product with r.
    """
    parts: list[list[Tensor]] = []
    weights = [_weights(block, problem, options) for block in blocks]
    for block, row_weights in zip(blocks, weights, strict=True):
        with full_precision(block.device):
            parts.append(_form_candidate(block, row_weights, measured=ranks.size == 1))
    if ranks.size > 1:
        slots = blocks[0].history.newest_first
        products = [block.moments.of_correction(w, slots) for block, w in zip(blocks, weights, strict=True)]
    else:
        numbers = iter(_fetch(list(chain.from_iterable(parts))))
        own = [list(islice(numbers, len(part))) for part in parts]
        products = [(fsum(found[::2]), fsum(found[1::2])) for found in own]
    e_times_r = sum(block.learning_rate * found[0] for block, found in zip(blocks, products, strict=True))
    e_sq = sum(found[1] for found in products)
    r_sq = problem.residual_norm**2
    length_sq = r_sq - 2 * e_times_r + e_sq
    return sqrt(max(length_sq, 0.0)) if isfinite(length_sq) else nan, r_sq - e_times_r


def _weights(block: Block, problem: Problem, options: Options) -> Weights[list[float]]:
    rates = block.history.learning_rates
    return mixing_weights(problem.solution.values, rates, options.mixing, options.relaxation)


def _form_candidate(block: Block, weights: Weights[list[float]], measured: bool) -> list[Tensor]:
    """Put a block's candidate into ``iterate``; returns e . r / lr and e . e, chunk by chunk, if they are wanted."""
    history = block.history
    residual_rows = block.by_slot(weights.residual_rows).clone() if weights.residual_rows else None
    on_device = Weights(block.by_slot(weights.map_rows), residual_rows, weights.residual)
    products = []
    history.arrive()
    for a, b in block.chunks():
        last_r = columns(history.last_residual, a, b)
        e = correction(on_device, columns(history.map_diffs, a, b), columns(history.residual_diffs, a, b), last_r)
        torch.sub(columns(history.last_map, a, b), e, out=columns(block.iterate, a, b))
        if measured:
            e = e.to(last_r.dtype)
            products += [torch.dot(e, last_r), torch.dot(e, e)]
    return products
