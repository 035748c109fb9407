"""Samples that stay where the residual is large, while the others are drawn anew ("R3", Daw et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Samples = tuple[Tensor, ...]
"""Samples of one term: tensors whose first dimension counts them."""


@dataclass
class Retained:
    """The samples of one term's last evaluation, and how large its residuals were."""

    samples: Samples
    sizes: Tensor
    """|r| of each sample."""
    values: Tensor | None = None
    """The residuals (k, p), where they may be used again."""

    def renew(self, fresh: Samples) -> tuple[Samples, Tensor | None]:
        """Put samples with |r| above the mean among fresh ones, at random places; and their residuals, NaN elsewhere.

        Random places, since a sampler may order its samples by kind.
        """
        device, total = fresh[0].device, len(fresh[0])
        kept = (self.sizes > self.sizes.mean()).nonzero()[:, 0][:total]
        places = torch.randperm(total)[: len(kept)].to(device)
        renewed = tuple(new.index_copy(0, places, old[kept]) for new, old in zip(fresh, self.samples, strict=True))
        if self.values is None:
            return renewed, None
        values = self.values.new_full((total, self.values.shape[1]), torch.nan)
        return renewed, values.index_copy_(0, places, self.values[kept])

    def fits(self, fresh: Samples) -> bool:
        """Whether fresh samples have the same form."""
        pairs = zip(self.samples, fresh, strict=False)
        alike = all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype and a.device == b.device for a, b in pairs)
        return alike and len(self.samples) == len(fresh) and bool(self.sizes.isfinite().all())

    def state_dict(self) -> dict[str, Any]:
        """All tensors, for a checkpoint."""
        return {"samples": list(self.samples), "sizes": self.sizes, "values": self.values}

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any]) -> Retained:
        """Undo ``state_dict``."""
        return cls(tuple(saved["samples"]), saved["sizes"], saved["values"])


def shuffled(samples: Samples, values: Tensor | None) -> tuple[Samples, Tensor | None]:
    """Samples, and their residuals, in random order."""
    order = torch.randperm(len(samples[0])).to(samples[0].device)
    return tuple(x[order] for x in samples), None if values is None else values[order]
