"""Where the history is kept, and how rows get there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._options import invalid


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where the history is kept; by default with the parameters, placed on the ranks as they are.

    Args:
        device: device of the rows, two for each column of the history. ``"cpu"``: in pinned memory of the host, to
            which rows are copied while training goes on.
        dtype: type of the rows. ``None``: that of the parameters but at least float32; ``torch.bfloat16``: half of it.
        shard: keep 1/N of the history of a parameter that is whole on each of N ranks (DDP). A jump is then written
            back with one all-gather. Parameters that are sharded (FSDP2, tensor parallel) need no option.

    >>> Storage(dtype=torch.float16)
    Traceback (most recent call last):
    ValueError: Invalid dtype: torch.float16. Allowed: None or torch.bfloat16.
    """

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    shard: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.bfloat16):
            raise invalid("dtype", self.dtype, "None or torch.bfloat16")
        if self.device is not None:
            try:
                object.__setattr__(self, "device", torch.device(self.device))
            except (RuntimeError, TypeError) as problem:
                raise invalid("device", self.device, "None or a torch device such as 'cpu'") from problem
        if not isinstance(self.shard, bool):
            raise invalid("shard", self.shard, "True or False")

    def row_device(self, device: torch.device) -> torch.device:
        """Device of the rows of parameters on ``device``; one without an index is theirs if types agree."""
        if self.device is None or torch.device(self.device) == torch.device(device.type):
            return device
        return torch.device(self.device)


class Courier:
    """Copies rows to another device or type, from a GPU to pinned memory on a separate stream.

    The forward and backward passes that follow need not wait for the copies.
    """

    def __init__(self, source: torch.device, target: torch.device):
        self.target = target
        self._pinned = source.type == "cuda" and target.type == "cpu"
        self._stream: Any = torch.cuda.Stream(source) if self._pinned else None

    def rows(self, count: int, n: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory for rows."""
        return torch.zeros(count, n, dtype=dtype, device=self.target, pin_memory=self._pinned)

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy each source to its target; the copies are complete when ``wait`` returns."""
        if self._stream is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(sources[0].device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                narrow = source.to(target.dtype)  # half the bytes to move
                target.copy_(narrow, non_blocking=True)
                source.record_stream(self._stream)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()
