"""Ring buffers of differences of pairs (point, residual).

    point      where the map leads, u = w + r, if residuals are base steps; the weights w if they are gradients
    residual   r, divided by the largest learning rate of its pair, so that a schedule changes a factor and not the
               rows; or the gradient

Pairs are measured, differences are stored: a residual is never derived from stored points, which would be wrong after
any jump or average. Differences are taken as previous minus present. The sign does not matter for candidates:
coefficients of the least-squares problem change theirs with it.

The rows of a block form one matrix Z: residual differences, the last residual, point differences. Inner products of
these rows are all that the small problem, the length of a jump and its direction need.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._tensors.blocks import Block, Space, Vector
from .storage import Courier, Storage

SHORT = 1 << 14
"""Rows, points and residuals of up to this many numbers are kept in float64: conversion for each product would take as
long as the product. Longer ones are limited by memory, which float32 halves."""

CHUNK = 1 << 15
"""Columns that are converted at once on the CPU: few enough to stay in a cache."""
LAUNCHES = 16
"""Chunks are this many times longer on other devices, to hide kernel launches, and if nothing is converted."""
PIECE = 1 << 13
"""Columns that are multiplied at once on the CPU, by one thread: sums in float32 that are good to 1e-6."""


class Rows:
    """The rows of one block."""

    def __init__(self, block: Block, size: int, dtype: torch.dtype, storage: Storage):
        self.block = block
        self.size = size
        where = storage.row_device(block.device)
        apart = storage.dtype is not None or where != block.device
        self.courier = Courier(block.device, where) if apart else None
        if self.courier:
            self.residual_diffs = self.courier.rows(size, block.n, storage.dtype or dtype)
            self.point_diffs = self.courier.rows(size, block.n, storage.dtype or dtype)
            self.last_residual = torch.zeros(block.n, device=block.device, dtype=dtype)
        else:
            self.z = torch.zeros(2 * size + 1, block.n, device=block.device, dtype=dtype)
            self.residual_diffs, self.last_residual = self.z[:size], self.z[size]
            self.point_diffs = self.z[size + 1 :]
            self._z_rows = self.z.unbind()
        self.exact = dtype == torch.float64
        """Whether every product is formed in float64 anyway."""
        self._slots = list(zip(self.point_diffs.unbind(), self.residual_diffs.unbind(), strict=True))

    def store(self, slot: int | None, last_point: Tensor, point: Tensor, residual: Tensor, scale: float) -> None:
        """Put the differences from the last pair into a slot, and keep the residual times ``scale`` as the last one."""
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

    def products(self, wanted: Sequence[int], exact: bool, alone: bool) -> Tensor:
        """Inner products of the ``wanted`` rows of Z with all, over the columns that this rank multiplies.

        ``alone``: with each other.

        Exact products are formed in float64: nearly collinear columns need it (in float32 the least-squares residual
        was up to 13 times the optimum at condition 1e6). Others are formed in the rows' type, chunk by chunk, and
        added in float64: their error is below 1e-6 of the lengths, and they take half the time.
        """
        everything = len(wanted) == 2 * self.size + 1
        total: Tensor | None = None
        chosen: Tensor | None = None
        for z in self._chunks(exact):
            with full_precision(z.device):
                chosen = z if everything else self._chosen(z, wanted, chosen)
                part = products(chosen, chosen if alone else z)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total if self.block.span_weight == 1 else total.mul_(self.block.span_weight)

    def _chosen(self, z: Tensor, wanted: Sequence[int], before: Tensor | None) -> Tensor:
        """Some rows of a chunk, in the memory of those before if that fits: new memory takes longer than the copy."""
        rows = self._z_rows if self.courier is None and z is self.z else z
        fits = before is not None and before.shape[1] == z.shape[1]
        return torch.stack([rows[i] for i in wanted], out=before if fits else None)

    def _chunks(self, exact: bool) -> Iterator[Tensor]:
        self.arrive()
        where, dtype = self.residual_diffs.device, torch.float64 if exact else self.block.dtype
        as_it_is = self.courier is None and self.z.dtype == dtype
        workspace: Tensor | None = None
        for a, b in chunks(*self.block.span, CHUNK if where.type == "cpu" and not as_it_is else CHUNK * LAUNCHES):
            if as_it_is:
                yield self.z if b - a == self.block.n else self.z[:, a:b]
                continue
            if workspace is None:
                workspace = torch.empty(2 * self.size + 1, b - a, dtype=dtype, device=where)
            z = workspace if b - a == workspace.shape[1] else torch.empty_like(workspace[:, : b - a])
            if self.courier is None:
                z.copy_(self.z[:, a:b])
            else:
                z[: self.size].copy_(self.residual_diffs[:, a:b])
                z[self.size].copy_(self.last_residual[a:b])
                z[self.size + 1 :].copy_(self.point_diffs[:, a:b])
            yield z

    def subtract(self, weights: Sequence[float], last_point: Tensor, target: Tensor) -> None:
        """Put last_point - Z'weights into the target.

        The jump is formed before it is subtracted, so that rounding errors are relative to it and not to the point.
        """
        self.arrive()
        by_residual, own, by_point = weights[: self.size], weights[self.size], weights[self.size + 1 :]
        with full_precision(self.block.device):
            jump = self._place_for_jump(target)
            combine(self.point_diffs, by_point, jump, beta=0)
            if any(by_residual):
                combine(self.residual_diffs, by_residual, jump, beta=1)
            jump = jump.to(target.device)
            if own:
                jump.add_(self.last_residual, alpha=own)
            torch.sub(last_point, jump, out=target)

    def _place_for_jump(self, target: Tensor) -> Tensor:
        """The target, if the jump can be formed there; otherwise new memory where the rows are."""
        rows = self.point_diffs
        dtype = target.dtype if rows.dtype == torch.bfloat16 else rows.dtype  # rows are only kept in bfloat16
        fits = rows.device == target.device and dtype == target.dtype
        return target if fits else torch.empty(len(target), dtype=dtype, device=rows.device)

    def arrive(self) -> None:
        """Wait for rows that are still being copied."""
        if self.courier:
            self.courier.wait()


class History:
    """The last ``size`` differences of pairs, over all blocks. The slot of the oldest row is written next."""

    def __init__(self, space: Space, size: int, storage: Storage):
        self.size = size
        self.space = space
        self.dtype = torch.float64 if space.total <= SHORT else None
        """Type of rows, points and residuals; None: that of each block."""
        self.rows = [Rows(block, size, self.dtype or block.dtype, storage) for block in space.blocks]
        self.exact = all(rows.exact for rows in self.rows)
        """Whether every product is formed in float64 anyway."""
        self.fine = self.exact and storage.dtype is None
        """Whether rows are kept in float64, too."""
        self.last_point = self.vector()
        self.pairs = 0
        self.fresh = 0
        """Rows whose products were not computed yet."""
        self.rates: list[float] = []
        """Largest learning rate of each pair that the rows span, oldest first."""

    def vector(self) -> Vector:
        """A new vector for a point or a residual: operations on several types would take twice as long."""
        return self.space.vector(self.dtype)

    @property
    def held(self) -> int:
        """Number of differences."""
        return min(max(self.pairs - 1, 0), self.size)

    @property
    def newest_first(self) -> list[int]:
        """Slots of the rows that hold differences."""
        return [(self.pairs - 2 - age) % self.size for age in range(self.held)]

    def store(self, point: Vector, residual: Vector, rate: float = 1.0) -> Vector:
        """Add a pair, whose residual is proportional to ``rate``.

        The history keeps ``point``; returns the vector that it replaces, free for other use.
        """
        slot = (self.pairs - 1) % self.size if self.pairs else None
        scale = 1 / rate if rate else 0.0
        for i, rows in enumerate(self.rows):
            rows.store(slot, self.last_point[i], point[i], residual[i], scale)
        self.fresh = min(self.fresh + (self.pairs > 0), self.size)
        self.pairs += 1
        self.rates = [*self.rates[-self.size :], rate]
        free, self.last_point = self.last_point, point
        return free

    def clear(self, zero: bool = True) -> None:
        """Forget every pair. Rows that hold nothing but finite numbers need not be zeroed: 0 times them is 0."""
        self.pairs = self.fresh = 0
        self.rates = []
        if zero:
            for rows in self.rows:
                rows.clear()

    def new_products(self, exact: bool) -> tuple[list[int], Tensor]:
        """Inner products of new rows, fresh differences and the last residual, with all rows of Z.

        Returns the positions of the new rows in Z, and one row of products for each: sums over this rank's columns of
        all blocks. If no other rows are in use, there are no products with others.
        """
        fresh = self.newest_first[: self.fresh]
        wanted = [*fresh, self.size, *(self.size + 1 + slot for slot in fresh)]
        if len(fresh) == self.size:
            wanted.sort()  # all rows, as they are
        alone = len(fresh) == self.held
        parts = [rows.products(wanted, exact or rows.exact, alone) for rows in self.rows]
        self.fresh = 0
        total = parts[0] if len(parts) == 1 else torch.stack([part.to(parts[0].device) for part in parts]).sum(0)
        return wanted, total

    def subtract(self, weights: Sequence[float], target: Vector) -> None:
        """Put the candidate, last point - Z'weights, into the target."""
        for rows, last_point, part in zip(self.rows, self.last_point, target, strict=True):
            rows.subtract(weights, last_point, part)


def chunks(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """Column ranges that cover ``start`` to ``stop``; an empty one for none."""
    return ((a, min(a + length, stop)) for a in range(start, max(stop, start + 1), length))


def products(rows: Tensor, others: Tensor) -> Tensor:
    """Inner products of rows with others, in float64. Few rows and many others take less time than the reverse."""
    if not in_pieces(rows):
        return (rows @ others.t()).double()
    (pieces, rest), (other_pieces, other_rest) = cut(rows), cut(others)
    found = torch.bmm(pieces, other_pieces.transpose(1, 2)).sum(0, dtype=torch.float64)
    return found + (rest @ other_rest.t()).double() if rest.shape[1] else found


def combine(rows: Tensor, weights: Sequence[float], out: Tensor, beta: int) -> None:
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
