"""Where the history lives, and how much of it fits."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

logger = logging.getLogger("torch_anderson")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where the history lives; by default with the parameters, and as they lie on the ranks.

    Args:
        device: of the rows, two for each column of the history. ``"cpu"``: in pinned memory of the host, to which rows
            are copied while training goes on.
        dtype: of the rows: ``None``, that of the parameters but at least float32; or ``torch.bfloat16``, half of it.
        shard: keep 1/N of the history of a parameter that is whole on each of N ranks (DDP). A jump is then written
            back with one all-gather. Parameters that are sharded (FSDP2, tensor parallel) need no option.
        process_group: the ranks that train this model together; ``None`` for all there are.
        budget: bytes that a rank may use for the history on the parameters' device. Type, device and, at last, depth
            of the history are chosen so that it fits.

    >>> Storage(dtype=torch.float16)
    Traceback (most recent call last):
    ValueError: Invalid dtype: torch.float16. Allowed: None or torch.bfloat16.
    """

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    shard: bool = False
    process_group: Any = None
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.bfloat16):
            raise ValueError(f"Invalid dtype: {self.dtype!r}. Allowed: None or torch.bfloat16.")
        if self.device is not None:
            object.__setattr__(self, "device", _device(self.device))
        if not isinstance(self.shard, bool):
            raise ValueError(f"Invalid shard: {self.shard!r}. Allowed: True or False.")
        if not hasattr(self.process_group, "rank") and self.process_group is not None:
            raise ValueError(
                f"Invalid process_group: {self.process_group!r}. Allowed: None or a process group of torch."
            )
        if self.budget is not None and (not isinstance(self.budget, int) or self.budget <= 0):
            raise ValueError(f"Invalid budget: {self.budget!r}. Allowed: None or a number of bytes above 0.")

    def __deepcopy__(self, _: Any) -> "Storage":
        return self  # frozen, and a process group cannot be copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "A Storage with a process_group cannot be pickled, as the group belongs to this process. "
                "Save optimizer.state_dict(), and build Anderson anew."
            )
        return vars(self)

    def row_device(self, device: torch.device) -> torch.device:
        """Of the rows of parameters on ``device``; one without a number is theirs if it is of the same kind."""
        if self.device is None or torch.device(self.device) == torch.device(device.type):
            return device
        return torch.device(self.device)

    @property
    def default_rows(self) -> bool:
        """Whether rows live with the parameters, in their type."""
        return self.device is None and self.dtype is None and self.budget is None


def _device(given: torch.device | str) -> torch.device:
    try:
        return torch.device(given)
    except RuntimeError as problem:
        raise ValueError(f"Invalid device: {given!r}. Allowed: None or a torch device such as 'cpu'.") from problem


@dataclass(frozen=True)
class Piece:
    """A parameter, as far as the fullest rank keeps it."""

    numbers: int
    device: torch.device
    itemsize: int
    wide: bool = False
    """Whether residuals are kept in float64."""

    @property
    def residual_itemsize(self) -> int:
        """Of the last residual, and of residual differences if not said otherwise."""
        return 8 if self.wide else self.itemsize

    def bytes(self, storage: Storage, history_size: int, window: int) -> int:
        """On the parameter's own device."""
        in_full = (2 + window) * self.itemsize + self.residual_itemsize  # iterate, last map, window; last residual
        row_pair = 2 * storage.dtype.itemsize if storage.dtype else self.itemsize + self.residual_itemsize
        rows_here = storage.row_device(self.device) == self.device
        return self.numbers * (in_full + rows_here * history_size * row_pair)


def fit(storage: Storage, pieces: Sequence[Piece], history_size: int, window: int) -> tuple[Storage, int]:
    """A storage without a budget, and a history size, that keep to the budget on the parameters' device.

    Tried in this order: as it is, in bfloat16, on the host, and shorter in bfloat16.

    >>> piece = Piece(1000, torch.device("cpu"), 4)
    >>> found, depth = fit(Storage(budget=60_000), [piece], history_size=20, window=0)
    >>> found.dtype, depth
    (torch.bfloat16, 12)
    """
    if storage.budget is None:
        return storage, history_size
    for choice, depth in _choices(storage, pieces, history_size, window):
        if history_bytes(choice, pieces, depth, window) <= storage.budget:
            _say(choice, depth, history_bytes(choice, pieces, depth, window), storage.budget)
            return choice, depth
    least = min(history_bytes(choice, pieces, depth, window) for choice, depth in _choices(storage, pieces, 1, window))
    raise ValueError(f"Invalid budget: {storage.budget} bytes. Allowed: at least {least} for this model.")


def _choices(
    storage: Storage, pieces: Sequence[Piece], history_size: int, window: int
) -> Iterator[tuple[Storage, int]]:
    as_it_is = replace(storage, budget=None)
    narrow = replace(as_it_is, dtype=torch.bfloat16)
    yield as_it_is, history_size
    yield narrow, history_size
    if any(piece.device.type != "cpu" for piece in pieces):
        yield replace(as_it_is, device=torch.device("cpu")), history_size
    for depth in range(history_size - 1, 0, -1):
        yield narrow, depth


def history_bytes(storage: Storage, pieces: Sequence[Piece], history_size: int, window: int) -> int:
    """Bytes on the parameters' devices."""
    return sum(piece.bytes(storage, history_size, window) for piece in pieces)


def _say(storage: Storage, depth: int, needed: int, budget: int) -> None:
    place = "with the parameters" if storage.device is None else f"on {storage.device}"
    kind = "in the parameters' type" if storage.dtype is None else f"in {str(storage.dtype).removeprefix('torch.')}"
    logger.info(
        "History of %d columns %s, %s: %d of %d bytes on the parameters' device.", depth, place, kind, needed, budget
    )
