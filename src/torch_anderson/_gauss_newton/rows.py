"""Rows of the Jacobian, J: dense, or for large weight matrices as factors, without the rows themselves.

The row of a sample for a weight matrix is a sum of outer products b (x) a over the uses of the matrix. With A_u and B_u
the factors of all rows for use u,

    J J'  = sum over u, v of (B_u B_v') * (A_u A_v')      products of Gram matrices, entry by entry
    J w   = sum over u of the row sums of (B_u W) * A_u
    J' z  = sum over u of (z B_u)' A_u                    one product of matrices

which is cheaper than forming rows where matrices are large and have few uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

STRIP = 96
"""Rows of a symmetric product that are computed at once, up to its diagonal: nearly half of the work is saved."""
LARGE = 20_000
"""Weights from which on matrices may be stored as factors: before, one product of dense rows is faster."""


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
        found = self.dense @ torch.cat([part for part, pair in zip(parts, self.pairs, strict=True) if not pair])
        for part, pair, shape in zip(parts, self.pairs, self.layout.shapes, strict=True):
            if pair:
                found += pair.times(part.view(shape))
        return found

    def transposed_times(self, z: Tensor) -> Tensor:
        """J' z."""
        if not any(self.pairs):
            return self.dense.T @ z
        dense = iter((self.dense.T @ z).split([s for s, pair in zip(self.sizes, self.pairs, strict=True) if not pair]))
        return torch.cat([pair.transposed_times(z).reshape(-1) if pair else next(dense) for pair in self.pairs])
