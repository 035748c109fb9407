"""Samples of the last evaluation, some of which stay for the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .term import Samples, Term


@dataclass
class Retained:
    """The samples of one term's last evaluation, and how large its residuals were."""

    term: Term
    samples: Samples
    sizes: Tensor
    """|r| of each sample."""

    def renew(self, fresh: Samples) -> Samples:
        """Put samples with |r| above the mean among fresh ones, at random places.

        Random places, since a sampler may order its samples by kind. Where fewer samples are wanted than would stay,
        a random half of them does: the others must be fresh, or all evaluations would have the same ones.
        """
        device, total = fresh[0].device, len(fresh[0])
        kept = (self.sizes > self.sizes.mean()).nonzero()[:, 0]
        if len(kept) > total:
            kept = kept[torch.randperm(len(kept))[: total // 2].to(device)]
        places = torch.randperm(total)[: len(kept)].to(device)
        return tuple(new.index_copy(0, places, old[kept]) for new, old in zip(fresh, self.samples, strict=True))

    def fits(self, fresh: Samples) -> bool:
        """Whether fresh samples have the same form."""
        alike = len(self.samples) == len(fresh) and all(map(_same_form, self.samples, fresh))
        return alike and bool(self.sizes.isfinite().all())

    def state_dict(self) -> dict[str, Any]:
        """All tensors, for a checkpoint."""
        return {"samples": list(self.samples), "sizes": self.sizes}


def _same_form(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike but for their numbers of samples."""
    return one.shape[1:] == other.shape[1:] and one.dtype == other.dtype and one.device == other.device
