"""Bringing rows to where they live, if that is not with the parameters: to another device, or to another type."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Courier:
    """Copies beside the computation: from a GPU to pinned memory on a stream of their own, so that the forward and
    backward passes that follow need not wait for them."""

    def __init__(self, source: torch.device, target: torch.device):
        self.target = target
        self._pinned = source.type == "cuda" and target.type == "cpu"
        self._stream = torch.cuda.Stream(source) if self._pinned else None

    def rows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for rows."""
        return torch.zeros(*shape, dtype=dtype, device=self.target, pin_memory=self._pinned)

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy each source to its target; they arrive before ``wait`` returns."""
        if self._stream is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(sources[0].device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                narrow = source.to(target.dtype)  # half the way is half the bytes
                target.copy_(narrow, non_blocking=True)
                source.record_stream(self._stream)

    def wait(self) -> None:
        """Until all has arrived."""
        if self._stream is not None:
            self._stream.synchronize()
