"""Rows of the Jacobian, J: dense, or for large weight matrices as factors, without the rows themselves.

The row of a sample for a weight matrix is a sum of outer products b (x) a over the uses of the matrix. With A_u and B_u
the factors of all rows for use u,

    J J'  = sum over u, v of (B_u B_v') * (A_u A_v')      products of Gram matrices, entry by entry
    J w   = sum over u of the row sums of (B_u W) * A_u
    J' z  = sum over u of (z B_u)' A_u                    one product of matrices

which is cheaper than forming rows where matrices are large and have few uses.

The damped normal equations: S b = J'(J J' + damping)^-1 b, with one Cholesky factor for all b. On several ranks J has
the rows of all of them, divided by the square root of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod, sqrt

import torch
from torch import Tensor

from .._ranks.ranks import Ranks, all_gather
from .unusable import Unusable

STRIP = 96
"""Rows of a symmetric product that are computed at once, up to its diagonal: nearly half of the work is saved."""
LARGE = 20_000
"""Weights from which on matrices may be stored as factors: before, one product of dense rows is faster."""
FLOOR = 1e-14
"""Least damping, relative to the mean squared length of a row."""
TRIES = 40
"""Dampings, each ten times the last, before a matrix is given up."""


class Memory:
    """Large matrices that the next jump uses again: new memory would cost as much time as filling it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int, device: torch.device) -> Tensor:
        """A matrix in float64 with undefined entries."""
        found = self._kept.get(name)
        if found is None or found.shape != (rows, columns) or found.device != device:
            self._kept.pop(name, None)
            found = self._kept[name] = torch.empty(rows, columns, dtype=torch.float64, device=device)
        return found

    def keep(self, name: str, matrix: Tensor) -> None:
        """Use this matrix."""
        self._kept[name] = matrix


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


@dataclass(frozen=True)
class Layout:
    """How the rows of each parameter are stored, in the order of the parameters."""

    shapes: tuple[torch.Size, ...]
    uses: tuple[int, ...]
    """Uses of matrices that are stored as factors; 0 where rows are dense."""

    @classmethod
    def cheapest(cls, shapes: Sequence[torch.Size], uses: Sequence[int]) -> Layout:
        """Factors where they take fewer operations; ``uses`` is 0 for parameters that have none."""
        large = sum(map(prod, shapes)) >= LARGE
        pairs = zip(shapes, uses, strict=True)
        return cls(tuple(shapes), tuple(u if large and u and _cheap(shape, u) else 0 for shape, u in pairs))

    def as_dense(self) -> Layout:
        """The layout of these parameters with dense rows only."""
        return Layout(self.shapes, (0,) * len(self.shapes))

    @property
    def factored(self) -> bool:
        """Whether any rows are stored as factors."""
        return any(self.uses)

    @property
    def width(self) -> int:
        """How many numbers are stored for a row."""
        return sum(u * sum(s) if u else prod(s) for s, u in zip(self.shapes, self.uses, strict=True))

    @property
    def product(self) -> int:
        """Operations for the inner product of two rows, about."""
        return sum(_factored(s, u) if u else prod(s) for s, u in zip(self.shapes, self.uses, strict=True))

    @property
    def gradient(self) -> int:
        """Operations for the gradient of one sample, about: as many for each use of a matrix as it has entries."""
        return sum(max(u, 1) * prod(s) for s, u in zip(self.shapes, self.uses, strict=True))

    @property
    def dense(self) -> int:
        """Numbers of a row that is dense."""
        return sum(prod(s) for s, u in zip(self.shapes, self.uses, strict=True) if not u)


def _cheap(shape: torch.Size, uses: int) -> bool:
    """Whether products of Gram matrices take fewer operations than that of rows."""
    return _factored(shape, uses) < prod(shape)


def _factored(shape: torch.Size, uses: int) -> int:
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

    def __init__(self, layout: Layout, count: int, device: torch.device, memory: Memory):
        self.layout, self.sizes = layout, [prod(shape) for shape in layout.shapes]
        self.shape = (count, sum(self.sizes))
        self.dense = memory.matrix("rows", count, layout.dense, device)
        self.pairs: list[Pair | None] = [
            self._pair(place, shape, uses, memory) if uses else None
            for place, (shape, uses) in enumerate(zip(layout.shapes, layout.uses, strict=True))
        ]

    @classmethod
    def of(cls, dense: Tensor) -> Rows:
        """Rows that are known."""
        memory = Memory()
        memory.keep("rows", dense)
        return cls(Layout((dense.shape[1:],), (0,)), len(dense), dense.device, memory)

    def _pair(self, place: int, shape: torch.Size, uses: int, memory: Memory) -> Pair:
        count, device = len(self.dense), self.dense.device
        parts = [
            memory.matrix(f"{side}{place}", uses * count, size, device) for side, size in zip("ab", shape, strict=True)
        ]
        return Pair(*(part.view(uses, count, -1) for part in parts))

    def __len__(self) -> int:
        return self.shape[0]

    def parts(self, some: slice) -> list[Tensor | Pair]:
        """Where the rows of some samples are written, for each parameter."""
        sizes = [0 if pair else size for pair, size in zip(self.pairs, self.sizes, strict=True)]
        dense = self.dense[some].split(sizes, 1)
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
        if not any(self.pairs):
            return self.dense @ vector
        parts = vector.split(self.sizes)
        small = [part for part, pair in zip(parts, self.pairs, strict=True) if not pair]
        found = self.dense @ torch.cat([vector[:0], *small])
        for part, pair, shape in zip(parts, self.pairs, self.layout.shapes, strict=True):
            if pair:
                found += pair.times(part.view(shape))
        return found

    def transposed_times(self, z: Tensor) -> Tensor:
        """J' z."""
        if not any(self.pairs):
            return self.dense.T @ z
        sizes = [0 if pair else size for pair, size in zip(self.pairs, self.sizes, strict=True)]
        dense = (self.dense.T @ z).split(sizes)
        pairs = zip(self.pairs, dense, strict=True)
        return torch.cat([pair.transposed_times(z).reshape(-1) if pair else part for pair, part in pairs])


class Normal:
    """The map S: in the dual form if there are at most as many rows as weights, on all ranks together, or factors."""

    def __init__(self, rows: Rows, damping: float, ranks: Ranks, memory: Memory):
        self.ranks, self.alone = ranks, ranks.size == 1
        self.most = len(rows) if self.alone else int(ranks.largest(torch.tensor(float(len(rows)))))
        self.dual = self.most * ranks.size <= rows.shape[1] or rows.layout.factored
        self.rows = rows if self.alone else Rows.of(self._shared(rows.dense))
        side = len(self.rows) if self.dual else rows.shape[1]
        matrix = memory.matrix("products", side, side, rows.dense.device)
        if self.dual:
            self.rows.products(matrix)
        else:
            symmetric_product(self.rows.dense.T, matrix)
            matrix = matrix if self.alone else ranks.sum(matrix.tril_())
        diagonal = matrix.diagonal().clone()
        mean = float(diagonal.sum()) / (self.most * ranks.size)
        if not mean < inf:
            raise Unusable("nonfinite_outputs", "derivatives of the residuals by the weights are not finite")
        self.damping = max(damping, FLOOR * mean, 1e-300)
        self.factor = self._factor(matrix, diagonal)

    def _shared(self, rows: Tensor) -> Tensor:
        """The rows of all ranks in the dual form, and this rank's part in the other."""
        return self._gathered(rows) if self.dual else rows / sqrt(self.ranks.size)

    def _gathered(self, right: Tensor) -> Tensor:
        """Rows, or numbers that belong to them, of all ranks; filled up with zeros where a rank has fewer."""
        padded = right.new_zeros(self.most, *right.shape[1:])
        padded[: len(right)] = right
        found = all_gather(padded.reshape(-1), self.ranks.size, self.ranks.group)
        return found.reshape(-1, *right.shape[1:]) / sqrt(self.ranks.size)

    def _factor(self, matrix: Tensor, diagonal: Tensor) -> Tensor:
        """The Cholesky factor; with ten times the damping while rounding makes the matrix singular."""
        for _ in range(TRIES):
            matrix.diagonal().copy_(diagonal + self.damping)
            factor, failed = torch.linalg.cholesky_ex(matrix)
            if not failed:
                break
            self.damping *= 10
        return factor

    def solve(self, right: Tensor) -> Tensor:
        """S b, bit for bit the same on all ranks, for the b of this rank's rows."""
        back = self.rows.transposed_times
        if self.alone:
            return back(self._inverse(right)) if self.dual else self._inverse(back(right))
        if self.dual:
            found = back(self._inverse(self._gathered(right)))
        else:
            found = self._inverse(self.ranks.sum(back(right / sqrt(self.ranks.size))))
        # Processors may round differently: all ranks take the numbers of the first.
        return self.ranks.sum(found if self.ranks.index == 0 else 0 * found)

    def _inverse(self, right: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self.factor, right[:, None], upper=False)  # faster than cholesky_solve
        return torch.linalg.solve_triangular(self.factor.mT, half, upper=True)[:, 0]
