"""The last pairs of a point and the residual there, as rows of differences, and the inner products of all rows.

    u, r    a point and its residual: the end of a base step, and the step divided by its learning rate, so that a
            schedule changes a factor and not the rows; or the weights and their gradient
    U, R    differences of points and residuals, each pair minus the next (S and Y where r is a gradient)
    Z       all rows: R, the last r, U; one matrix for each block of parameters
    Z Z'    the Gram matrix over all blocks and ranks, updated by the products of new rows

Residuals are measured, never derived from stored points, which would be wrong after any jump or average. Every
candidate is the last point plus a combination of rows, so that the Gram matrix tells its length and direction before it
is formed. All ranks have the same matrix: each multiplies its columns, and one small message adds the products up.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import sqrt
from operator import mul
from typing import Any

import torch
from torch import Tensor

from .._tensors.blocks import Block, Space, Vector
from .._tensors.checkpoint import Entries, Vectors, padded, unpadded
from .storage import Courier, Storage

FLOAT64_NUMBERS = 1 << 14
"""Models of up to this many numbers keep rows, points and residuals in float64: converting them for each product would
take as long as the product. For larger ones memory counts, which float32 halves."""
CHUNK = 1 << 15
"""Columns that are converted at once on the CPU: few enough to stay in a cache."""
LAUNCHES = 16
"""Chunks are this many times longer on other devices, to hide kernel launches, and if nothing is converted."""
PIECE = 1 << 13
"""Columns that are multiplied at once on the CPU, by one thread: sums in float32 that are good to 1e-6."""


class Rows:
    """The rows Z of one block."""

    def __init__(self, block: Block, size: int, dtype: torch.dtype, storage: Storage):
        self.block = block
        self.size = size
        self.float64 = dtype == torch.float64
        """Whether products are formed in float64 without a conversion."""
        where = storage.row_device(block.device)
        self.courier: Courier | None = None
        """Brings rows to another device or type; without it, all rows are views of one matrix ``z``."""
        if storage.dtype is not None or where != block.device:
            self.courier = Courier(block.device, where)
            self.residual_diffs = self.courier.rows(size, block.n, storage.dtype or dtype)
            self.point_diffs = self.courier.rows(size, block.n, storage.dtype or dtype)
            self.last_residual = torch.zeros(block.n, device=block.device, dtype=dtype)
        else:
            self.z = torch.zeros(2 * size + 1, block.n, device=block.device, dtype=dtype)
            self.residual_diffs, self.last_residual = self.z[:size], self.z[size]
            self.point_diffs = self.z[size + 1 :]
            self._z_rows = self.z.unbind()
        self._slots = list(zip(self.point_diffs.unbind(), self.residual_diffs.unbind(), strict=True))

    def store(self, slot: int | None, last_point: Tensor, point: Tensor, residual: Tensor, scale: float) -> None:
        """Put the differences to the last pair into a slot, and keep the residual times ``scale`` as the last one."""
        if slot is not None:
            rows = self._slots[slot]
            if self.courier:
                new = last_point - point, torch.sub(self.last_residual, residual, alpha=scale)
                self.courier.send(new, rows)
            else:
                torch.sub(last_point, point, out=rows[0])
                torch.sub(self.last_residual, residual, alpha=scale, out=rows[1])
        torch.mul(residual, scale, out=self.last_residual)

    def clear(self) -> None:
        """Zero the rows: an empty slot adds nothing to a product."""
        self.arrive()
        self.residual_diffs.zero_()
        self.point_diffs.zero_()

    def products(self, wanted: Sequence[int], precise: bool, alone: bool) -> Tensor:
        """Inner products of the ``wanted`` rows with all (``alone``: with each other), over this rank's columns.

        Precise products are formed in float64: nearly collinear columns need it (in float32 the least-squares residual
        was up to 13 times the optimum at condition 1e6). Others are formed in the rows' type, chunk by chunk, and
        added in float64: their error is below 1e-6 of the lengths, and they take between a third and half of the time.
        """
        everything = len(wanted) == 2 * self.size + 1
        chosen: Tensor | None = None
        total: Tensor | None = None
        for z in self._chunks(precise):
            if everything:
                chosen = z
            else:  # in the same memory as before if that fits: new memory takes longer than the copy
                fits = chosen is not None and chosen.shape[1] == z.shape[1]
                rows = self._z_rows if self.courier is None and z is self.z else z
                chosen = torch.stack([rows[i] for i in wanted], out=chosen if fits else None)
            with full_precision(z.device):
                part = products(chosen, chosen if alone else z)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total if self.block.span_weight == 1 else total.mul_(self.block.span_weight)

    def _chunks(self, precise: bool) -> Iterator[Tensor]:
        """Z in chunks of columns, converted where that is needed."""
        self.arrive()
        where, dtype = self.residual_diffs.device, torch.float64 if precise else self.block.dtype
        as_it_is = self.courier is None and self.z.dtype == dtype
        workspace: Tensor | None = None
        for a, b in chunks(*self.block.span, CHUNK if where.type == "cpu" and not as_it_is else CHUNK * LAUNCHES):
            if as_it_is:
                yield self.z if b - a == self.block.n else self.z[:, a:b]
                continue
            if workspace is None:
                workspace = torch.empty(2 * self.size + 1, b - a, dtype=dtype, device=where)
            z = workspace if b - a == workspace.shape[1] else torch.empty_like(workspace[:, : b - a])
            z[: self.size].copy_(self.residual_diffs[:, a:b])
            z[self.size].copy_(self.last_residual[a:b])
            z[self.size + 1 :].copy_(self.point_diffs[:, a:b])
            yield z

    def combine(self, weights: Sequence[float], last_point: Tensor, target: Tensor) -> None:
        """Put last_point + Z'weights into the target.

        The displacement is formed before it is added, so that rounding errors are relative to it and not to the point.
        """
        self.arrive()
        rows = self.point_diffs
        dtype = target.dtype if rows.dtype == torch.bfloat16 else rows.dtype  # rows are only kept in bfloat16
        fits = rows.device == target.device and dtype == target.dtype
        move = target if fits else torch.empty(len(target), dtype=dtype, device=rows.device)
        by_residual, own, by_point = weights[: self.size], weights[self.size], weights[self.size + 1 :]
        with full_precision(self.block.device):
            add_rows(rows, by_point, move, beta=0)
            if any(by_residual):
                add_rows(self.residual_diffs, by_residual, move, beta=1)
            move = move.to(target.device)
            if own:
                move.add_(self.last_residual, alpha=own)
            torch.add(last_point, move, out=target)

    def arrive(self) -> None:
        """Wait for rows that are still being copied."""
        if self.courier:
            self.courier.wait()


class Pairs:
    """The last ``size`` differences of pairs over all blocks, in a ring, and their Gram matrix."""

    def __init__(self, space: Space, size: int, storage: Storage):
        self.size = size
        self.space = space
        self.dtype = torch.float64 if space.total <= FLOAT64_NUMBERS else None
        """Type of rows, points and residuals; None: that of each block."""
        self.rows = [Rows(block, size, self.dtype or block.dtype, storage) for block in space.blocks]
        self.float64 = all(rows.float64 for rows in self.rows)
        """Whether products are formed in float64 without a conversion."""
        self.rounded = not self.float64 or storage.dtype is not None
        """Whether the Gram matrix is good to about 1e-6 only, by its products or by the type of the rows."""
        self.last_point = self.vector()
        self.count = 0
        """Pairs stored since the history was cleared."""
        self.fresh = 0
        """Differences whose products are not in the Gram matrix yet."""
        self.precise = False
        """Whether products are formed in float64 although rows are not."""
        self.matrix = [[0.0] * (2 * size + 1) for _ in range(2 * size + 1)]
        """Z Z' by slot: R in rows 0 to size - 1, the last r in row ``size``, U behind it."""
        self.rates: list[float] = []
        """Learning rate of each pair that the rows span, oldest first."""

    def vector(self) -> Vector:
        """A new vector for a point or a residual: operations on several types would take twice as long."""
        return self.space.vector(self.dtype)

    @property
    def held(self) -> int:
        """Number of differences."""
        return min(max(self.count - 1, 0), self.size)

    @property
    def newest_first(self) -> list[int]:
        """Slots of the differences."""
        return [(self.count - 2 - age) % self.size for age in range(self.held)]

    def store(self, point: Vector, residual: Vector, rate: float = 1.0) -> Vector:
        """Add a pair whose residual is proportional to ``rate``, by which it is divided.

        The history keeps ``point``; returns the vector that it replaces, free for other use.
        """
        slot = (self.count - 1) % self.size if self.count else None
        for i, rows in enumerate(self.rows):
            rows.store(slot, self.last_point[i], point[i], residual[i], 1 / rate if rate else 0.0)
        self.fresh = min(self.fresh + (self.count > 0), self.size)
        self.count += 1
        self.rates = [*self.rates[-self.size :], rate]
        free, self.last_point = self.last_point, point
        return free

    def clear(self, zero: bool = True) -> None:
        """Forget every pair. Rows that hold nothing but finite numbers need not be zeroed: 0 times them is 0."""
        self.count = self.fresh = 0
        self.precise, self.rates = False, []
        self.matrix = [[0.0] * len(self.matrix) for _ in self.matrix]
        if zero:
            for rows in self.rows:
                rows.clear()

    def update(self) -> None:
        """Add the products of fresh differences and the last residual to the Gram matrix, over all ranks."""
        fresh = self.newest_first[: self.fresh]
        wanted = [*fresh, self.size, *(self.size + 1 + slot for slot in fresh)]
        if len(fresh) == self.size:
            wanted.sort()  # all rows, as they are
        alone = len(fresh) == self.held  # no other rows are in use
        parts = [rows.products(wanted, self.precise or rows.float64, alone) for rows in self.rows]
        total = parts[0] if len(parts) == 1 else torch.stack([part.to(parts[0].device) for part in parts]).sum(0)
        total = self.space.ranks.sum(total) if self.space.ranks.size > 1 else total
        for i, row in zip(wanted, total.tolist(), strict=True):
            for j, product in zip(wanted if alone else range(len(self.matrix)), row, strict=True):
                self.matrix[i][j] = self.matrix[j][i] = product
        self.fresh = 0

    def length(self, weights: Sequence[float]) -> float:
        """|Z'weights|; NaN if products are not finite."""
        used = [(i, weight) for i, weight in enumerate(weights) if weight]
        square = sum(weight * sum(map(mul, self.matrix[i], weights)) for i, weight in used)
        return sqrt(max(square, 0.0)) if square == square else square

    @property
    def path(self) -> float:
        """Length of the path through the stored points."""
        rows = [self.size + 1 + slot for slot in self.newest_first]
        return sum([sqrt(max(self.matrix[i][i], 0.0)) for i in rows])

    def combine(self, weights: Sequence[float], target: Vector) -> None:
        """Put the last point + Z'weights into the target."""
        for rows, last_point, part in zip(self.rows, self.last_point, target, strict=True):
            rows.combine(weights, last_point, part)

    # -------------------------------------------------------------------------------------------------- checkpoints

    def vectors(self) -> Vectors:
        """What a checkpoint holds in the length of the parameters."""
        for rows in self.rows:
            rows.arrive()
        return {
            "point_diffs": [rows.point_diffs for rows in self.rows],
            "residual_diffs": [rows.residual_diffs for rows in self.rows],
            "last_residual": [rows.last_residual for rows in self.rows],
            "last_point": self.last_point,
        }

    def numbers(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides."""
        counts = [float(self.count), float(self.fresh), float(self.precise)]
        return {
            "gram": torch.tensor(self.matrix, dtype=torch.float64),
            "pairs": torch.tensor(counts, dtype=torch.float64),
            "rates": padded(self.rates, self.size + 1),
        }

    def load_numbers(self, entries: Entries) -> None:
        """Undo ``numbers``."""
        self.count, self.fresh, precise = map(int, entries["pairs"].tolist())
        self.precise, self.matrix = bool(precise), entries["gram"].tolist()
        self.rates = unpadded(entries["rates"])


def chunks(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """Column ranges that cover ``start`` to ``stop``; an empty one for none."""
    return ((a, min(a + length, stop)) for a in range(start, max(stop, start + 1), length))


def products(rows: Tensor, others: Tensor) -> Tensor:
    """Inner products of rows with others, in float64. Few rows and many others take less time than the reverse."""
    if not in_pieces(rows):
        return (rows @ others.t()).double()
    (pieces, rest), (other_pieces, other_rest) = cut(rows), cut(others)
    total = torch.bmm(pieces, other_pieces.transpose(1, 2)).sum(0, dtype=torch.float64)
    return total + (rest @ other_rest.t()).double() if rest.shape[1] else total


def add_rows(rows: Tensor, weights: Sequence[float], out: Tensor, beta: int) -> None:
    """Put rows'weights into ``out``, or add them to it with ``beta`` 1."""
    rows, w = rows.to(out.dtype), torch.tensor(weights, dtype=out.dtype).to(rows.device)
    if not in_pieces(rows):
        torch.addmv(out, rows.t(), w, beta=beta, out=out)
        return
    (pieces, rest), (outs, out_rest) = cut(rows), cut(out[None])
    torch.baddbmm(outs, w.expand(len(pieces), 1, len(w)), pieces, beta=beta, out=outs)
    torch.addmv(out_rest[0], rest.t(), w, beta=beta, out=out_rest[0])


def in_pieces(rows: Tensor) -> bool:
    """Whether rows are so long that they are cut in pieces, which threads of the CPU share."""
    return rows.device.type == "cpu" and rows.shape[1] >= 2 * PIECE


def cut(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as a batch of pieces, and the columns that are left."""
    end = rows.shape[1] // PIECE * PIECE
    return rows[:, :end].unflatten(1, (-1, PIECE)).transpose(0, 1), rows[:, end:]


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast, within which ``step`` may be called, for products of rows."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
