"""The Jacobian J of the fitted samples' residuals, and the damped normal equations.

J has one row for each residual of a fitted sample. Rows are stored dense, or for large weight matrices as factors: the
row of a sample for a weight matrix is a sum of outer products b (x) a over the uses of the matrix. With A_u and B_u the
factors of all rows for use u,

    J J'  = sum over u, v of (B_u B_v') * (A_u A_v')      products of Gram matrices, entry by entry
    J w   = sum over u of the row sums of (B_u W) * A_u
    J' z  = sum over u of (z B_u)' A_u                    one product of matrices

which is cheaper than forming rows where matrices are large and have few uses.

    S v   = J'(J J' + damping)^-1 v                       one Cholesky factor for all v (``Normal``)

On several ranks J has the rows of all of them, divided by the square root of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod, sqrt

import torch
from torch import Tensor

from .._ranks.ranks import Ranks, all_gather
from .objective import Unusable

STRIP = 96
"""Rows of a symmetric product that are computed at once, up to its diagonal: nearly half of the work is saved."""
FACTORS_FROM = 20_000
"""Least number of weights for which matrices may be stored as factors: below, one product of dense rows is faster."""
LEAST_DAMPING = 1e-14
"""Least damping, relative to the mean squared length of a row: below it Cholesky's factors are mostly rounding."""
MOST_DAMPINGS = 40
"""Dampings, each ten times the last, that are tried before a matrix is given up."""


class Memory:
    """Large matrices that the next jump uses again: new memory would cost as much time as filling it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int, device: torch.device) -> Tensor:
        """A matrix in float64 with undefined entries."""
        kept = self._kept.get(name)
        if kept is None or kept.shape != (rows, columns) or kept.device != device:
            self._kept.pop(name, None)
            kept = self._kept[name] = torch.empty(rows, columns, dtype=torch.float64, device=device)
        return kept


class Layout:
    """How the rows of each parameter are stored: as many factors as the matrix has ``uses``, or dense if that is 0."""

    def __init__(self, shapes: Sequence[torch.Size], uses: Sequence[int]):
        self.shapes, self.uses = tuple(shapes), tuple(uses)
        self.sizes = [prod(shape) for shape in self.shapes]
        self.dense_sizes = [0 if u else size for size, u in zip(self.sizes, self.uses, strict=True)]
        self.factored = any(self.uses)
        factors = [(shape, u) for shape, u in zip(self.shapes, self.uses, strict=True) if u]
        dense = sum(self.dense_sizes)
        self.stored = dense + sum(u * sum(shape) for shape, u in factors)
        """Numbers that are stored for a row."""
        self.product_cost = dense + sum(_gram_cost(shape, u) for shape, u in factors)
        """Operations for the inner product of two rows, about."""
        self.gradient_cost = dense + sum(u * prod(shape) for shape, u in factors)
        """Operations for the gradient of one sample, about: as many for each use of a matrix as it has entries."""

    @classmethod
    def cheapest(cls, shapes: Sequence[torch.Size], uses: Sequence[int]) -> Layout:
        """Factors where they take fewer operations; ``uses`` is 0 for parameters whose rows are not sums of them."""
        large = sum(map(prod, shapes)) >= FACTORS_FROM
        pairs = zip(shapes, uses, strict=True)
        return cls(shapes, [u if large and u and _gram_cost(shape, u) < prod(shape) else 0 for shape, u in pairs])

    def as_dense(self) -> Layout:
        """The layout of these parameters with dense rows only."""
        return Layout(self.shapes, (0,) * len(self.shapes))


def _gram_cost(shape: torch.Size, uses: int) -> int:
    """Operations for the inner product of two rows of a weight matrix, by products of Gram matrices."""
    return uses * (uses + 1) * sum(shape)


@dataclass
class Pair:
    """Factors of the rows for one weight matrix: B (uses, rows, outputs) and A (uses, rows, inputs)."""

    left: Tensor
    right: Tensor

    def __getitem__(self, some: slice) -> Pair:
        return Pair(self.left[:, some], self.right[:, some])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and numbers of the weight matrix."""
        return self.left.shape[1], self.left.shape[2] * self.right.shape[2]

    def zero_(self) -> None:
        """Make all rows 0."""
        self.left.zero_()
        self.right.zero_()

    def write(self, left: Tensor, right: Tensor) -> None:
        """Set the factors from (rows, uses, numbers); further uses are 0."""
        for own, given in ((self.left, left), (self.right, right)):
            own[: given.shape[1]] = given.movedim(1, 0)
            own[given.shape[1] :] = 0

    def add_products(self, out: Tensor) -> None:
        """Add J J'."""
        for u in range(len(self.left)):
            for v in range(u + 1):
                product = (self.left[u] @ self.left[v].T).mul_(self.right[u] @ self.right[v].T)
                out += product if u == v else product.add_(product.T.clone())

    def squares(self) -> Tensor:
        """The sum of squared lengths of rows."""
        left, right = (torch.einsum("uri,vri->uvr", x, x) for x in (self.left, self.right))
        return (left * right).sum()

    def times(self, matrix: Tensor) -> Tensor:
        """J w."""
        return ((self.left @ matrix) * self.right).sum((0, 2))

    def transposed_times(self, z: Tensor) -> Tensor:
        """J' z."""
        weighed = (self.left * z[:, None]).flatten(0, 1)
        return weighed.T @ self.right.flatten(0, 1)


class Rows:
    """J, for all parameters: ``dense`` rows of some, and ``pairs`` of factors for the others."""

    def __init__(self, layout: Layout, dense: Tensor, pairs: Sequence[Pair | None]):
        self.layout, self.dense, self.pairs = layout, dense, pairs
        self.shape = (len(dense), sum(layout.sizes))

    @classmethod
    def empty(cls, layout: Layout, count: int, device: torch.device, memory: Memory) -> Rows:
        """As many rows with undefined entries."""
        pairs: list[Pair | None] = []
        for place, (shape, uses) in enumerate(zip(layout.shapes, layout.uses, strict=True)):
            sides = [
                memory.matrix(f"{side}{place}", uses * count, size, device).view(uses, count, size)
                for side, size in zip("ba", shape if uses else (), strict=False)
            ]
            pairs.append(Pair(*sides) if uses else None)
        return cls(layout, memory.matrix("rows", count, sum(layout.dense_sizes), device), pairs)

    @classmethod
    def of(cls, dense: Tensor) -> Rows:
        """Rows that are known."""
        return cls(Layout([dense.shape[1:]], [0]), dense, [None])

    def parts(self, some: slice) -> list[Tensor | Pair]:
        """Where the rows of some samples are written, for each parameter."""
        dense = self.dense[some].split(self.layout.dense_sizes, 1)
        return [pair[some] if pair else part for pair, part in zip(self.pairs, dense, strict=True)]

    def squares(self) -> Tensor:
        """The sum of squared lengths of rows: the trace of J J'."""
        dense = torch.linalg.vector_norm(self.dense).square()
        return sum((pair.squares() for pair in self.pairs if pair), dense)

    def products(self, out: Tensor) -> Tensor:
        """The lower triangle of J J'; what is above it is not defined."""
        symmetric_product(self.dense, out)
        for pair in filter(None, self.pairs):
            pair.add_products(out)
        return out

    def __matmul__(self, vector: Tensor) -> Tensor:
        """J w."""
        if not self.layout.factored:
            return self.dense @ vector
        parts = vector.split(self.layout.sizes)
        small = [part for part, pair in zip(parts, self.pairs, strict=True) if not pair]
        product = self.dense @ torch.cat([vector[:0], *small])
        for part, pair, shape in zip(parts, self.pairs, self.layout.shapes, strict=True):
            if pair:
                product += pair.times(part.view(shape))
        return product

    def transposed_times(self, z: Tensor) -> Tensor:
        """J' z."""
        if not self.layout.factored:
            return self.dense.T @ z
        dense = (self.dense.T @ z).split(self.layout.dense_sizes)
        pairs = zip(self.pairs, dense, strict=True)
        return torch.cat([pair.transposed_times(z).reshape(-1) if pair else part for pair, part in pairs])


def symmetric_product(rows: Tensor, out: Tensor) -> Tensor:
    """The lower triangle of ``rows @ rows.T``; what is above it is not defined.

    >>> symmetric_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(2, 2)).tril()
    tensor([[ 5.,  0.],
            [11., 25.]])
    """
    for start in range(0, len(rows), STRIP):
        stop = start + STRIP
        torch.mm(rows[start:stop], rows[:stop].T, out=out[start:stop, :stop])
    return out


class Normal:
    """The map S, with one Cholesky factor for all right-hand sides.

    In the dual form, with the matrix J J' + damping, if there are at most as many rows as weights, on all ranks
    together, or factors; otherwise in the primal form, with J'J + damping.
    """

    def __init__(self, rows: Rows, damping: float, ranks: Ranks, memory: Memory):
        count, weights = rows.shape
        self.ranks = ranks
        self.most = count if ranks.size == 1 else int(ranks.largest(torch.tensor(float(count))))
        """Rows of the rank that has the most."""
        self.dual = self.most * ranks.size <= weights or rows.layout.factored
        if ranks.size > 1:
            rows = Rows.of(self._gathered(rows.dense) if self.dual else rows.dense / sqrt(ranks.size))
        self.rows = rows
        side = rows.shape[0] if self.dual else weights
        matrix = memory.matrix("products", side, side, rows.dense.device)
        if self.dual:
            rows.products(matrix)
        else:
            symmetric_product(rows.dense.T, matrix)
            matrix = matrix if ranks.size == 1 else ranks.sum(matrix.tril_())
        diagonal = matrix.diagonal().clone()
        mean = float(diagonal.sum()) / (self.most * ranks.size)
        if not mean < inf:
            raise Unusable("nonfinite_outputs", "derivatives of the residuals by the weights are not finite")
        self.damping = max(damping, LEAST_DAMPING * mean, 1e-300)  # rows may be 0
        for _ in range(MOST_DAMPINGS):  # rounding may make the matrix singular
            matrix.diagonal().copy_(diagonal + self.damping)
            self.factor, failed = torch.linalg.cholesky_ex(matrix)
            if not failed:
                break
            self.damping *= 10

    def solve(self, rhs: Tensor) -> Tensor:
        """S v, bit for bit the same on all ranks, for the v of this rank's rows."""
        back, ranks = self.rows.transposed_times, self.ranks
        if ranks.size == 1:
            return back(self._inverse(rhs)) if self.dual else self._inverse(back(rhs))
        if self.dual:
            solution = back(self._inverse(self._gathered(rhs)))
        else:
            solution = self._inverse(ranks.sum(back(rhs / sqrt(ranks.size))))
        # Processors may round differently: all ranks take the numbers of the first.
        return ranks.sum(solution if ranks.index == 0 else 0 * solution)

    def _inverse(self, rhs: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self.factor, rhs[:, None], upper=False)  # faster than cholesky_solve
        return torch.linalg.solve_triangular(self.factor.mT, half, upper=True)[:, 0]

    def _gathered(self, mine: Tensor) -> Tensor:
        """Rows, or numbers that belong to them, of all ranks; filled up with zeros where a rank has fewer."""
        padded = mine.new_zeros(self.most, *mine.shape[1:])
        padded[: len(mine)] = mine
        gathered = all_gather(padded.reshape(-1), self.ranks.size, self.ranks.group)
        return gathered.reshape(-1, *mine.shape[1:]) / sqrt(self.ranks.size)
