"""Ring buffers of differences of (iterate, residual) pairs.

Notation (the paper's symbols): an iterate ``w``, the map's value ``u = w + r``, the residual ``r``.

    map_diffs       rows of  W + R:   u_i - u_{i-1}
    residual_diffs  rows of  R / lr:  r_i / lr_i - r_{i-1} / lr_{i-1}

Pairs are measured, differences are stored: a residual is never derived from stored iterates, which would be
wrong after any jump or average. Residuals are kept divided by the learning rate that made them, so that a
schedule changes the small system by a factor and not the rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .courier import Courier

ReadMap = Callable[[int, int], Tensor]


CHUNK = 1 << 16
"""Columns handled at once on a CPU: few enough that a chunk of some vectors stays in a cache."""

PRODUCT_CHUNK = 1 << 15
"""The same where a chunk has all rows, in float64."""

NARROW_CHUNK = 1 << 17
"""The same where rows are multiplied as they are: no cache is needed, and sums in float32 are still good to 2e-7."""

LAUNCHES = 16
"""How many times longer a chunk is elsewhere, to hide the launches."""


def chunks(n: int, device: torch.device, length: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Column ranges ``(start, stop)`` that cover ``n``; an empty one for none."""
    if device.type != "cpu":
        length *= LAUNCHES
    return ((start, min(start + length, n)) for start in range(0, max(n, 1), length))


def columns(vectors: Tensor, start: int, stop: int) -> Tensor:
    """A range of columns of one vector or several; no view is made of the whole range."""
    return vectors if stop - start == vectors.shape[-1] else vectors[..., start:stop]


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Keeps autocast, within which a step may be called, away from our products."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


SHORT = 1 << 14
"""Residuals of up to this many numbers are kept in float64: converting them for each product would take as long as
the product. Longer ones are limited by memory, which float32 halves."""


class History:
    """The last ``size`` differences of pairs of ``n`` numbers; ``batch`` independent histories if given.

    Rows lie in a ring: the slot of the oldest is written next.
    """

    def __init__(
        self,
        size: int,
        n: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch: tuple[int, ...] = (),
        wide: bool | None = None,
        row_device: torch.device | None = None,
        row_dtype: torch.dtype | None = None,
    ):
        self.size = size
        self.n = n
        residual_dtype = torch.float64 if (n <= SHORT if wide is None else wide) else dtype
        self.last_map = torch.zeros(*batch, n, device=device, dtype=dtype)
        apart = row_dtype is not None or row_device not in (None, device)
        self.courier = Courier(device, row_device or device) if apart else None
        if self.courier:
            rows = partial(self.courier.rows, (*batch, size, n))
            self.map_diffs, self.residual_diffs = rows(row_dtype or dtype), rows(row_dtype or residual_dtype)
            self.last_residual = torch.zeros(*batch, n, device=device, dtype=residual_dtype)
        else:
            self.map_diffs = torch.zeros(*batch, size, n, device=device, dtype=dtype)
            # The last residual lies behind the differences, so that one product serves both.
            self._residuals = torch.zeros(*batch, size + 1, n, device=device, dtype=residual_dtype)
            self.residual_diffs = self._residuals.narrow(-2, 0, size)
            self.last_residual = self._residuals.select(-2, size)
        self.path_sq = torch.zeros(*batch, size, device=device, dtype=torch.float64)  # |w_i - w_{i-1}|^2
        self.pairs = 0
        self.fresh = 0  # rows stored since ``fresh`` was last set to 0 by who reads their products
        self.learning_rates: list[float] = []  # of the pairs that the rows span, oldest first
        self._map_rows = self.map_diffs.unbind(-2)
        self._residual_rows = self.residual_diffs.unbind(-2)
        self._path_sq = self.path_sq.unbind(-1)

    @property
    def rows(self) -> int:
        """Number of differences held."""
        return min(max(self.pairs - 1, 0), self.size)

    @property
    def newest_first(self) -> list[int]:
        """Slots of the held rows."""
        return [(self.pairs - 2 - age) % self.size for age in range(self.rows)]

    def reset(self) -> None:
        """Forget every pair. Rows are zeroed: an empty slot adds nothing to a product."""
        self.arrive()
        self.pairs = self.fresh = 0
        self.learning_rates = []
        for buffer in (self.map_diffs, self.residual_diffs, self.path_sq):
            buffer.zero_()

    def store(self, iterate: Tensor, read_map: ReadMap, learning_rate: float = 1.0) -> None:
        """Add the pair of ``iterate`` and ``read_map``, which returns the columns of u it is asked for."""
        slot = (self.pairs - 1) % self.size
        path_sq: Any = None
        for start, stop in chunks(self.n, iterate.device):
            w, u = columns(iterate, start, stop), read_map(start, stop)
            last_u, last_r = columns(self.last_map, start, stop), columns(self.last_residual, start, stop)
            rows = columns(self._map_rows[slot], start, stop), columns(self._residual_rows[slot], start, stop)
            du, dr = (torch.empty_like(last_u), torch.empty_like(last_r)) if self.courier else rows
            if self.pairs:
                torch.sub(u, last_u, out=du)
                torch.neg(last_r, out=dr)
            last_u.copy_(u)
            r = torch.sub(u, w, out=last_r)
            r.mul_(1 / learning_rate if learning_rate else 0.0)  # dividing takes three times as long
            if self.pairs:
                part = squares(self._iterate_diff(du, dr.add_(r), r, learning_rate))
                path_sq = part if path_sq is None else path_sq.add_(part)
                if self.courier:
                    self.courier.send((du, dr), rows)
        if self.pairs:
            self._path_sq[slot].copy_(path_sq)
            self.fresh = min(self.fresh + 1, self.size)
        self.pairs += 1
        self.learning_rates = [*self.learning_rates[-self.size :], learning_rate]

    def _iterate_diff(self, du: Tensor, dr: Tensor, r: Tensor, learning_rate: float) -> Tensor:
        """w_i - w_{i-1}, from the differences of u = w + lr r: they are in a cache, w_{i-1} is not even kept."""
        before = self.learning_rates[-1]
        dw = torch.sub(du, dr, alpha=before)
        return dw if learning_rate == before else dw.sub_(r, alpha=learning_rate - before)

    @property
    def wide(self) -> bool:
        """Whether residuals are kept in float64, so that all products are exact."""
        return self.residual_diffs.dtype == torch.float64

    def products(
        self, rows: Sequence[int], exact: bool = True, maps: bool = False, span: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Products of all rows Z with those in ``rows``, one column each, and |r / lr|^2 of the last pair; over all
        columns, or a ``span`` of them.

        Z has the residual differences in the order of their slots, the last residual and, with ``maps``, the map
        differences. Exact products are formed in float64: nearly collinear columns need it (in float32 the
        least-squares residual was up to 13 times the optimum at condition 1e6). Others are formed in the rows' type,
        chunk by chunk, and summed in float64: their error is about 1e-7 of the lengths, and they take half the time.
        The rows are read once.
        """
        products: Any = None
        residual_sq: Any = None
        span = span or (0, self.n)
        for z in self._wide_rows(span, maps) if exact else self._narrow_rows(span):
            with full_precision(z.device):
                part, part_sq = product(z, rows).double(), squares(z.select(-2, self.size)).double()
            products = part if products is None else products.add_(part)
            residual_sq = part_sq if residual_sq is None else residual_sq.add_(part_sq)
        return products, residual_sq

    def _narrow_rows(self, span: tuple[int, int]) -> Iterator[Tensor]:
        return (columns(self._residuals, a, b) for a, b in self._ranges(span, NARROW_CHUNK))

    def _wide_rows(self, span: tuple[int, int], maps: bool) -> Iterator[Tensor]:
        """Z in float64, chunk by chunk, converted in one workspace that stays in a cache."""
        workspace: Tensor | None = None
        for a, b in self._ranges(span, PRODUCT_CHUNK):
            if not maps and not self.courier and self.wide:
                yield columns(self._residuals, a, b)
                continue
            if workspace is None:
                shape = (*self.map_diffs.shape[:-2], self.size * (1 + maps) + 1, b - a)
                workspace = torch.empty(shape, dtype=torch.float64, device=self.map_diffs.device)
            z = workspace.narrow(-1, 0, b - a)
            if self.courier:
                z.narrow(-2, 0, self.size).copy_(columns(self.residual_diffs, a, b))
                z.select(-2, self.size).copy_(columns(self.last_residual, a, b))
            else:
                z.narrow(-2, 0, self.size + 1).copy_(columns(self._residuals, a, b))
            if maps:
                z.narrow(-2, self.size + 1, self.size).copy_(columns(self.map_diffs, a, b))
            yield z

    def _ranges(self, span: tuple[int, int], length: int) -> Iterator[tuple[int, int]]:
        """Column ranges that cover the span; rows that are on their way there have arrived."""
        self.arrive()
        start, stop = span
        return ((start + a, start + b) for a, b in chunks(stop - start, self.map_diffs.device, length))

    def arrive(self) -> None:
        """Wait for rows that are on their way."""
        if self.courier:
            self.courier.wait()


def product(rows: Tensor, slots: Sequence[int]) -> Tensor:
    """Products of all rows with some of them, one column each."""
    if len(slots) == 1 and rows.dim() == 2:
        return torch.mv(rows, rows.select(0, slots[0])).unsqueeze(-1)
    return rows @ rows[..., slots, :].mT


def squares(x: Tensor) -> Tensor:
    """|x|^2 over the last dimension."""
    return torch.dot(x, x) if x.dim() == 1 else x.square().sum(-1)
