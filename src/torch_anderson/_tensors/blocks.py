"""Parameters as flat vectors: one block for all that share device, type and placement, whatever their groups.

Half-precision parameters are handled in float32, complex ones as pairs of real numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._ranks.placement import Parcel, Placement, Sliced, Whole, exchange, placement_of
from .._ranks.ranks import Ranks, world_size
from .members import Group, flat_view, members, real_numbers, refuse_sparse, shaped_like, working_dtype

SAFE = 1e8
"""Displacements so many times shorter than the largest number of a type do not lead beyond it."""

Vector = list[Tensor]
"""One flat tensor for each block: weights, or anything with as many numbers."""


class Block:
    """Parameters that share device, type and placement, read and written as one flat vector."""

    def __init__(self, params: Sequence[Tensor], placements: Sequence[Placement], company: Sequence[Tensor] = ()):
        self.params = list(params)
        self.placements = list(placements)
        self.device = params[0].device
        self.dtype = working_dtype(params[0].dtype)
        self.views = [flat_view(part) for part in self._locals()]
        self._pointers = pointers(params)
        self.sizes = [view.numel() for view in self.views]
        self.offsets = [0, *accumulate(self.sizes)]
        self.n = self.offsets[-1]
        self._company = company or self.params
        """All parameters of the base."""
        self._without_gradient: list[int] = []
        self._had_gradients = False
        self._unseen = list(params)
        """Parameters whose gradient was never seen, to be refused if it is sparse."""
        self._pieces: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}
        """Vectors and their pieces, by identity, which belongs to a vector only as long as it is kept here."""
        self._shapes: dict[int, list[Tensor]] = {}
        first = placements[0]
        self.sharded = first.sharded
        self._as_they_are = isinstance(first, Whole) and not params[0].is_complex()
        """Whether gradients are copied, not a part or a real view of them."""
        self.copy_weight = 1 / first.copies
        """Weight of sums over all columns that this rank keeps, so that the sum over ranks counts each copy once."""
        # Ranks that keep the same columns share the work of multiplying them.
        self.span = (0, self.n)
        self.span_weight = self.copy_weight
        if first.copy is not None:
            self.span = (self.n * first.copy // first.copies, self.n * (first.copy + 1) // first.copies)
            self.span_weight = 1.0

    def vector(self, dtype: torch.dtype | None = None) -> Tensor:
        """A new vector of zeros, whose pieces are known."""
        vector = torch.zeros(self.n, device=self.device, dtype=dtype or self.dtype)
        self.remember(vector)
        return vector

    def remember(self, vector: Tensor) -> None:
        """Make the pieces of a vector known: it is read or written again and again."""
        self._pieces[id(vector)] = vector, vector.split(self.sizes)

    def refresh(self) -> None:
        """Follow parameters whose memory was swapped (``p.data = ...``)."""
        now = pointers(self.params)
        if now != self._pointers:
            self._pointers, self.views = now, [flat_view(part) for part in self._locals()]
            self._shapes.clear()

    def moved_away(self) -> bool:
        """Whether a parameter has other memory than when last looked at."""
        return pointers(self.params) != self._pointers

    def _locals(self) -> list[Tensor]:
        """This rank's parts of the parameters."""
        return [place.local(p) for place, p in zip(self.placements, self.params, strict=True)]

    def read(self, vector: Tensor) -> None:
        """Copy the parameters to a vector."""
        if self.views[0].dtype == vector.dtype:
            torch.cat(self.views, out=vector)
        else:  # a conversion makes `cat` four times slower than these
            torch._foreach_copy_(self.pieces(vector), self.views)

    def read_gradients(self, vector: Tensor) -> None:
        """Copy the gradients to a vector; a parameter without one counts as 0."""
        targets, found = self.shaped(vector), [p.grad for p in self.params]
        if not self._as_they_are:
            found = [None if part is None else self._local_gradient(i, part) for i, part in enumerate(found)]
        if missing := [piece for piece, part in zip(targets, found, strict=True) if part is None]:
            torch._foreach_zero_(missing)
            targets = [piece for piece, part in zip(targets, found, strict=True) if part is not None]
        if targets:
            torch._foreach_copy_(targets, [part for part in found if part is not None])

    def _local_gradient(self, i: int, gradient: Tensor) -> Tensor:
        gradient = self.placements[i].local(gradient)
        return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient

    def shaped(self, vector: Tensor) -> list[Tensor]:
        """The vector as one tensor for each parameter, in the parameter's shape; complex numbers as pairs."""
        known = self._shapes.get(id(vector))
        if known is None:
            pairs = zip(self.pieces(vector), self._locals(), strict=True)
            known = [shaped_like(piece, local) for piece, local in pairs]
            if id(vector) in self._pieces:  # which keeps the vector, and so its identity
                self._shapes[id(vector)] = known
        return known

    def write(self, vector: Tensor, everything: bool) -> None:
        """Set the parameters to a vector, except those that the base leaves alone because they have no gradient."""
        targets, sources = self.views, self.pieces(vector)
        if not everything and not all(written := self._written()):
            targets, sources = list(compress(targets, written)), tuple(compress(sources, written))
        if targets:
            torch._foreach_copy_(targets, sources)

    def parcels(self, vector: Tensor, everything: bool) -> Iterator[Parcel]:
        """What to exchange with the other ranks for the same purpose, where each has the values of some rows.

        The message does not depend on gradients, which one rank may have and another may not.
        """
        written = self._written()
        for i, (param, place, values) in enumerate(zip(self.params, self.placements, self.pieces(vector), strict=True)):
            assert isinstance(place, Sliced)
            yield Parcel(place, flat_view(param), values, wanted=everything or written[i])

    def note_gradients(self) -> None:
        """Remember which parameters have no gradient before a base step, which may set others to None."""
        self._without_gradient = [i for i, p in enumerate(self.params) if p.grad is None]
        self._had_gradients = any(p.grad is not None for p in self._company)
        if self._unseen:
            refuse_sparse(self._unseen)
            self._unseen = [p for p in self._unseen if p.grad is None]

    def _written(self) -> list[bool]:
        """Parameters that train and have a gradient; if none of the base's has after its step, which may set them to
        None, those that had one before; all if none had, as with a base that consumes gradients inside its closure."""
        if any(p.grad is not None for p in self._company):
            return [p.requires_grad and p.grad is not None for p in self.params]
        left = set(self._without_gradient) if self._had_gradients else ()
        return [p.requires_grad and i not in left for i, p in enumerate(self.params)]

    def pieces(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The vector as one tensor for each parameter."""
        known = self._pieces.get(id(vector))
        return known[1] if known else vector.split(self.sizes)

    def held(self) -> list[Tensor]:
        """All that this rank holds of the parameters, which may be more than it keeps a history of, as flat views."""
        return [flat_view(p) for p in self.params] if isinstance(self.placements[0], Sliced) else self.views


class Space:
    """All parameters that take part, as blocks. A ``Vector`` has one tensor for each of them."""

    def __init__(self, groups: Sequence[Group], group: Any, shard: bool = False):
        self.ranks = Ranks(group)
        self.shard = shard
        self.params = members(groups)
        self._seen = _look(groups)
        self.layout = _layout(self.params, self.ranks.size)
        alike: dict[Any, list[tuple[Tensor, Placement]]] = {}
        for param in self.params:
            place = placement_of(param, self.ranks, shard)
            alike.setdefault((param.dtype, param.device, place.key), []).append((param, place))
        self._company = [p for each in groups for p in each["params"]]
        pairs = (zip(*found, strict=True) for found in alike.values())
        self.blocks = [Block(params, placements, self._company) for params, placements in pairs]
        self.total = sum(map(real_numbers, self.params))
        """Numbers on all ranks, copies counted once."""
        self.settled = bool(self.blocks) and all(b.device.type == "cpu" and not b.sharded for b in self.blocks)
        """Whether it costs nothing to see that the weights have not moved."""
        self.ranks.home = self.blocks[0].device if self.blocks else None

    def if_changed(self, groups: Sequence[Group]) -> Space | None:
        """A new space if parameters came, went, were frozen or moved, or if ranks came; None if this is still valid."""
        if self._seen == (seen := _look(groups)):
            return None
        self._seen = seen
        if self.layout != _layout(members(groups), world_size(self.ranks.group)):
            return Space(groups, self.ranks.group, self.shard)
        self._company[:] = [p for each in groups for p in each["params"]]
        self.refresh()
        return None

    def vector(self, dtype: torch.dtype | None = None) -> Vector:
        """A new vector of zeros, in the type of the parameters or another one."""
        return [block.vector(dtype) for block in self.blocks]

    def rows(self, count: int) -> list[Tensor]:
        """New matrices of zeros with ``count`` rows, one for each block."""
        return [torch.zeros(count, block.n, device=block.device, dtype=block.dtype) for block in self.blocks]

    def gather(self, vector: Vector, params: Sequence[Tensor]) -> Tensor:
        """The numbers of these parameters in a vector, one after the other, each in its own order (not in memory's)."""
        parts = self._shaped(vector)
        return torch.cat([parts[p].reshape(-1) for p in params])

    def scatter(self, flat: Tensor, vector: Vector, params: Sequence[Tensor]) -> None:
        """Undo ``gather``."""
        parts = self._shaped(vector)
        for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            parts[p].copy_(part.view(p.shape))

    def _shaped(self, vector: Vector) -> dict[Tensor, Tensor]:
        pairs = zip(self.blocks, vector, strict=True)
        return {p: x for block, part in pairs for p, x in zip(block.params, block.shaped(part), strict=True)}

    def refresh(self) -> None:
        """Follow parameters whose memory was swapped."""
        for block in self.blocks:
            block.refresh()

    def read(self, vector: Vector) -> None:
        """Copy the weights to a vector."""
        for block, part in zip(self.blocks, vector, strict=True):
            block.read(part)

    def write(self, vector: Vector, everything: bool = False) -> None:
        """Set the weights on all ranks; by default except those that have no gradient."""
        parcels: list[Parcel] = []
        for block, part in zip(self.blocks, vector, strict=True):
            if isinstance(block.placements[0], Sliced):
                parcels += block.parcels(part, everything)
            else:
                block.write(part, everything)
        if parcels:
            exchange(parcels)

    def note_gradients(self) -> None:
        """Remember, before a base step, which parameters it will leave alone."""
        for block in self.blocks:
            block.note_gradients()

    def version(self) -> int:
        """A number that changes when anybody writes to the parameters."""
        return sum(p._version for p in self.params)

    def touched(self, version: int) -> bool:
        """Whether anybody wrote to the parameters, or gave them other memory, since they had this version."""
        return self.version() != version or any(block.moved_away() for block in self.blocks)

    def overflows(self, vector: Vector, length: float) -> bool:
        """Whether weights that are this far from the present ones are not finite in their own type, on any rank."""
        limits = [torch.finfo(block.views[0].dtype).max for block in self.blocks]
        if length * SAFE < min(limits):
            return False
        pairs = zip(vector, limits, strict=True)
        bad = any(len(part) and not bool(part.abs().amax() <= limit) for part, limit in pairs)
        return float(self.ranks.sum(torch.tensor(float(bad), dtype=torch.float64))) > 0

    def add_up(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum numbers over blocks, each over the columns that this rank keeps, and over ranks; on the host."""
        weighted = [block.copy_weight * part.double().cpu() for block, part in zip(self.blocks, parts, strict=True)]
        total = torch.stack(weighted).sum(0)
        return self.ranks.sum(total) if self.ranks.size > 1 else total


def pointers(params: Sequence[Any]) -> list[int]:
    """Memory addresses of the parameters; of a DTensor, its local shard."""
    return [getattr(p, "_local_tensor", p).data_ptr() for p in params]


def _look(groups: Sequence[Group]) -> list[Any]:
    """What tells, at little cost, that the layout is unchanged: another device or type means other memory."""
    by_group = [group["params"] for group in groups]
    params = list(chain.from_iterable(by_group))
    return [
        dist.is_available() and dist.is_initialized(),
        list(map(len, by_group)),
        [i for i, group in enumerate(groups) if "anderson" in group and not group["anderson"]],
        list(map(id, params)),
        [p.requires_grad for p in params],
        pointers(params),
    ]


def _layout(params: Sequence[Tensor], ranks: int) -> tuple[Any, ...]:
    """What the blocks depend on: ranks, members, and their places."""
    return ranks, [id(p) for p in params], [(p.device, p.dtype) for p in params]
