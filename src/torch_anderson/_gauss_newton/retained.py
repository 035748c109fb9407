"""Samples of the last evaluation, some of which stay for the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .term import Samples, Term


@dataclass
class Retained:
    """The samples of one term's last evaluation, and how large its residuals were; fixed ones in their own order."""

    term: Term
    samples: Samples
    sizes: Tensor
    """|r| of each sample."""
    values: Tensor | None = None
    """The residuals (k, p), where they may be used again."""

    def renew(self, fresh: Samples) -> tuple[Samples, Tensor | None]:
        """Put samples with |r| above the mean among fresh ones, at random places; and their residuals, NaN elsewhere.

        Random places, since a sampler may order its samples by kind. Where fewer samples are wanted than would stay,
        a random half of them does: the others must be fresh, or all evaluations would have the same ones.
        """
        device, total = fresh[0].device, len(fresh[0])
        kept = (self.sizes > self.sizes.mean()).nonzero()[:, 0]
        if len(kept) > total:
            kept = kept[torch.randperm(len(kept))[: total // 2].to(device)]
        places = torch.randperm(total)[: len(kept)].to(device)
        renewed = tuple(new.index_copy(0, places, old[kept]) for new, old in zip(fresh, self.samples, strict=True))
        if self.values is None:
            return renewed, None
        values = self.values.new_full((total, self.values.shape[1]), torch.nan)
        return renewed, values.index_copy_(0, places, self.values[kept])

    def fits(self, fresh: Samples) -> bool:
        """Whether fresh samples have the same form."""
        alike = len(self.samples) == len(fresh) and all(map(same_form, self.samples, fresh))
        return alike and bool(self.sizes.isfinite().all())

    def holds(self, term: Term) -> bool:
        """Whether the residuals are still those of a term with fixed samples, to which somebody may have written."""
        now: Any = term.samples
        alike = self.term is term and len(now) == len(self.samples) and len(now[0]) == len(self.samples[0])
        return alike and all(same_form(a, b) and torch.equal(a, b) for a, b in zip(self.samples, now, strict=True))

    def state_dict(self, term: Term) -> dict[str, Any]:
        """All tensors, for a checkpoint; without residuals if the term has been replaced by another one."""
        values = self.values if self.term is term else None
        return {"samples": list(self.samples), "sizes": self.sizes, "values": values}

    @classmethod
    def from_state_dict(cls, term: Term, saved: dict[str, Any], device: torch.device) -> Retained:
        """Undo ``state_dict``; the tensors may have been saved on another device."""
        samples, values = tuple(x.to(device) for x in saved["samples"]), saved["values"]
        return cls(term, samples, saved["sizes"].to(device), None if values is None else values.to(device))


def same_form(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike but for their numbers of samples."""
    return one.shape[1:] == other.shape[1:] and one.dtype == other.dtype and one.device == other.device
