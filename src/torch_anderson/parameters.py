"""The one place that sees tensors and groups: parameters as flat blocks of numbers.

A block gathers the parameters of one group that share a device and a type and lie alike on the ranks, so that it has
one learning rate and one flat row per vector: of what this rank keeps of them. Half-precision parameters are
accelerated in float32, complex ones as pairs of real numbers.
"""

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, compress, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from .averaging import Window, largest
from .distributed import Ranks
from .exchange import Parcel, exchange
from .flat import flat_view, working_dtype
from .history import SHORT, History, ReadMap, chunks, columns
from .layout import Group, accelerated, group_sizes, pointers
from .least_squares import System
from .moments import Moments
from .options import Options
from .shards import Part, Sliced, part_of, real_numbers
from .storage import Piece, Storage, fit

V = TypeVar("V", bound="Views")


class Views(ABC):
    """Parameters that share group, device and type, read and written as one vector. What a driver keeps is added."""

    def __init__(self, group: int, params: Sequence[Tensor], parts: Sequence[Part], ranks: Ranks, group_numbers: int):
        self.group = group
        self.group_numbers = group_numbers  # numbers of this type in the whole group, on all ranks
        self.params = list(params)
        self.parts = list(parts)
        self.device = params[0].device
        self.dtype = working_dtype(params[0].dtype)
        self._views = self._flat_views()
        self._pointers = pointers(params)
        self.sizes = [view.numel() for view in self._views]
        self.offsets = [0, *accumulate(self.sizes)]
        self.n = self.offsets[-1]
        self.total = sum(map(real_numbers, params))  # on all ranks, copies once
        self.sharded = parts[0].sharded
        copies, copy = parts[0].copies, parts[0].copy
        self.copy_weight = 1 / copies  # of sums over all columns that this rank keeps, so that ranks add up to one copy
        # Ranks that have the same columns share the work of multiplying them.
        self.span = (0, self.n) if copy is None else (self.n * copy // copies, self.n * (copy + 1) // copies)
        self.span_weight = self.copy_weight if copy is None else 1.0  # of sums over the span
        self.iterate = torch.zeros(self.n, device=self.device, dtype=self.dtype)
        self._iterate_pieces = self.iterate.split(self.sizes)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of columns to work on, one after the other."""
        return chunks(self.n, self.device)

    def refresh(self) -> None:
        """Look at the parameters anew where their memory was swapped (``p.data = ...``), by the base or others."""
        now = pointers(self.params)
        if now != self._pointers:
            self._pointers, self._views = now, self._flat_views()

    def _flat_views(self) -> list[Tensor]:
        return [flat_view(part.local(param)) for part, param in zip(self.parts, self.params, strict=True)]

    def read(self, start: int, stop: int) -> Tensor:
        """The present parameters, for a range of columns, in the working type."""
        if stop - start == self.n:
            return torch.cat(self._views).to(self.dtype)
        first = bisect_right(self.offsets, start) - 1
        last = bisect_right(self.offsets, stop - 1)
        pieces = self._views[first:last]
        if start > self.offsets[first] or stop < self.offsets[last]:
            spans = zip(pieces, self.offsets[first:last], strict=True)
            pieces = [view[max(start - offset, 0) : stop - offset] for view, offset in spans]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(self.dtype)

    def keep_iterate(self) -> None:
        """Copy the parameters to ``iterate``, before a base step that is measured."""
        self.copy_to(self.iterate)

    def copy_to(self, vector: Tensor) -> None:
        """Copy the present parameters to a vector."""
        if self._views[0].dtype == vector.dtype:
            torch.cat(self._views, out=vector)
        else:  # converting makes ``cat`` four times slower than these
            torch._foreach_copy_(vector.split(self.sizes), self._views)

    def write(self, vector: Tensor, everything: bool = False) -> None:
        """Set the parameters, by default except those that the base leaves alone because they have no gradient."""
        targets, sources = self._views, self._iterate_pieces if vector is self.iterate else vector.split(self.sizes)
        written = [everything or param.grad is not None for param in self.params]
        if not all(written):
            targets, sources = list(compress(targets, written)), list(compress(sources, written))
        if targets:
            torch._foreach_copy_(targets, sources)

    def parcels(self, vector: Tensor, everything: bool) -> Iterator[Parcel]:
        """The same for parameters of which other ranks have the rest: what to exchange with them. What is sent does not
        depend on gradients, which one rank may have and another not."""
        for param, part, values in zip(self.params, self.parts, vector.split(self.sizes), strict=True):
            assert isinstance(part, Sliced)
            yield Parcel(part, flat_view(param), values, wanted=everything or param.grad is not None)

    def present(self) -> list[Tensor]:
        """A copy of all that this rank holds of the parameters now, be it more than it keeps a history of."""
        return [view.clone() for view in self._held()]

    def put_back(self, values: list[Tensor]) -> None:
        """Set the parameters to such a copy."""
        torch._foreach_copy_(self._held(), values)

    def _held(self) -> list[Tensor]:
        sliced = isinstance(self.parts[0], Sliced)
        return [flat_view(param) for param in self.params] if sliced else self._views

    def moved(self) -> bool:
        """Whether the base step changed anything since ``keep_iterate``.

        Off the CPU the answer would stop the device, on sharded parameters it would take all ranks: there it is taken
        to be yes, and a step of exactly zero shows at the next acceleration.
        """
        if self.device.type != "cpu" or self.sharded:
            return True
        pairs = zip(self._views, self._iterate_pieces, strict=True)
        return not all(torch.equal(view.to(self.dtype), before) for view, before in pairs)

    @property
    def bytes(self) -> int:
        """Memory kept for the block."""
        return sum(tensor.nbytes for tensor in self.vectors().values())

    def vectors(self) -> dict[str, Tensor]:
        """What is kept of the length of the parameters, by name: vectors and matrices of rows."""
        return {"iterate": self.iterate}

    def after_adoption(self) -> None:  # noqa: B027  # most have nothing to do
        """When all vectors have come from a checkpoint: work out what follows from them."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all that was measured."""

    @abstractmethod
    def take_progress(self, other: Any) -> None:
        """Stand where another block stands, with nothing but zeros behind."""


class Block(Views):
    """The memory of the residual driver: pairs, their small system, and the window of the moving average."""

    def __init__(
        self,
        *place: Any,
        history_size: int,
        window: int,
        criterion: str,
        storage: Storage,
    ):
        super().__init__(*place)
        self.history = History(
            history_size,
            self.n,
            device=self.device,
            dtype=self.dtype,
            wide=self.group_numbers <= SHORT,
            row_device=storage.row_device(self.device),
            row_dtype=storage.dtype,
        )
        self.moments = Moments(history_size)
        self.system = System()
        self.window = Window(window, self.n, criterion, device=self.device, dtype=self.dtype) if window else None
        self.learning_rate = 1.0  # of the pair being measured; summed over a cycle
        self.stored_rate: float | None = None  # the group's own, when the last pair was stored
        # Weights of rows. Python writes to the memory of a tensor, which takes a tenth of the time of making one.
        self._numbers = array("d" if self.dtype == torch.float64 else "f", [0.0] * history_size)
        self._weights = torch.frombuffer(self._numbers, dtype=self.dtype)

    def by_slot(self, newest_first: Iterable[float]) -> Tensor:
        """Weights of rows as a vector in the order of the slots, 0 for empty ones; valid until the next call."""
        weights = [0.0] * self.history.size
        for slot, weight in zip(self.history.newest_first, newest_first, strict=True):
            weights[slot] = weight
        self._numbers[:] = array(self._numbers.typecode, weights)
        return self._weights.to(self.device)

    def residual_max(self, stored: bool) -> Tensor:
        """|r| in the maximum norm, on the device; ``stored``: r is in the history."""
        if not self.n:
            return torch.zeros((), device=self.device, dtype=self.dtype)
        if stored:
            return self.history.last_residual.abs().amax().mul_(self.learning_rate).to(self.dtype)
        parts = [(self.read(a, b) - columns(self.iterate, a, b)).abs_().amax() for a, b in self.chunks()]
        return largest(parts)

    def normalized_residual_sq(self) -> float:
        """This rank's part of |r / lr| squared, of the step just made."""
        rate = self.learning_rate or float("inf")
        parts = [(self.read(a, b) - columns(self.iterate, a, b)).double().div_(rate) for a, b in self.chunks()]
        return self.copy_weight * float(sum(torch.dot(r, r) for r in parts))

    def vectors(self) -> dict[str, Tensor]:
        """Pairs and window."""
        history = self.history
        history.arrive()
        kept = {
            "map_diffs": history.map_diffs,
            "residual_diffs": history.residual_diffs,
            "last_map": history.last_map,
            "last_residual": history.last_residual,
        }
        return kept | super().vectors() | ({"window": self.window.points} if self.window else {})

    def reset(self) -> None:
        """Forget every pair."""
        self.history.reset()
        self.moments.reset()
        self.system = System()

    def take_progress(self, other: "Block") -> None:
        """Stand where another block stands, with nothing but zero residuals behind."""
        self.history.pairs, self.history.fresh = other.history.pairs, other.history.fresh
        self.history.learning_rates = list(other.history.learning_rates)
        self.system = other.system.empty()
        self.learning_rate, self.stored_rate = other.learning_rate, other.stored_rate
        if self.window and other.window:
            self.window.count = other.window.count

    def numbers(self) -> list[float]:
        """All that is not a vector."""
        history, window, m = self.history, self.window, self.history.size
        rates = [*history.learning_rates, *[-1.0] * (m + 1 - len(history.learning_rates))]
        pair = [self.learning_rate, -1.0 if self.stored_rate is None else self.stored_rate]
        progress = [history.pairs, history.fresh, window.count if window else 0]
        return [*progress, *pair, *rates]

    def set_numbers(self, rest: Iterator[float]) -> None:
        """The inverse of ``numbers``."""
        history, m = self.history, self.history.size
        history.pairs, history.fresh, window_count = (int(x) for x in islice(rest, 3))
        if self.window:
            self.window.count = window_count
        self.learning_rate, stored_rate = islice(rest, 2)
        self.stored_rate = None if stored_rate < 0 else stored_rate
        history.learning_rates = list(islice(rest, m + 1))[: min(history.pairs, m + 1)]
        self.moments.reset()

    # An in-cycle mean needs one vector, not a window: the sum of the displacements from the anchor.

    def add_displacement(self, first: bool) -> None:
        """Add present parameters - anchor to the sum."""
        for a, b in self.chunks():
            moved = self.read(a, b) - self.iterate[a:b]
            total = self._sum[a:b]
            total.copy_(moved) if first else total.add_(moved)

    def read_mean(self, count: int) -> ReadMap:
        """Reads the mean of the ``count`` iterates that were added."""
        return lambda a, b: torch.add(self.iterate[a:b], self._sum[a:b], alpha=1 / count)

    @property
    def _sum(self) -> Tensor:
        assert self.window is not None
        return self.window.points[0]


def write(blocks: Sequence[Views], vectors: Sequence[Tensor], everything: bool = False) -> None:
    """Set the parameters of all blocks, each by its vector, on all ranks alike."""
    parcels: list[Parcel] = []
    for block, vector in zip(blocks, vectors, strict=True):
        if isinstance(block.parts[0], Sliced):
            parcels += block.parcels(vector, everything)
        else:
            block.write(vector, everything)
    if parcels:
        exchange(parcels)


def build_blocks(groups: Sequence[Group], kind: type[V], ranks: Ranks, shard: bool, **kept: Any) -> list[V]:
    """Blocks of a kind for the parameters as they are now; ``kept`` says what each keeps for them."""
    members: dict[Any, list[tuple[Tensor, Part]]] = {}
    sizes = group_sizes(accelerated(groups))
    for index, param in accelerated(groups):
        part = part_of(param, ranks, shard)
        members.setdefault((index, param.dtype, param.device, part.key), []).append((param, part))
    blocks = []
    for (index, dtype, *_), found in members.items():
        params, parts = [param for param, _ in found], [part for _, part in found]
        blocks.append(kind(index, params, parts, ranks, sizes[index, dtype], **kept))
    return blocks


def fitted(options: Options, groups: Sequence[Group]) -> Options:
    """Options whose storage keeps to its budget."""
    storage = options.storage
    if storage is None or storage.budget is None:
        return options
    ranks = Ranks(storage.process_group)
    members = accelerated(groups)
    sizes = group_sizes(members)
    pieces = [
        Piece(
            part_of(param, ranks, storage.shard).fullest(),
            param.device,
            working_dtype(param.dtype).itemsize,
            wide=sizes[index, param.dtype] <= SHORT,
        )
        for index, param in members
    ]
    storage, depth = fit(storage, pieces, options.history_size, options.window_rows)
    return replace(options, storage=storage, history_size=depth)
