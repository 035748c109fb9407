"""Accuracy on the validation images: how often the right class is the first choice, or among the first five."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .augmentation import normalised
from .images import NO_LABEL
from .parallel import share_buffers, summed

TOP = 1, 5


def hits(scores: Tensor, labels: Tensor, choices: int) -> int:
    """Number of labels among the ``count`` best choices; all, if there are fewer classes than choices.

    >>> hits(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]]), torch.tensor([2, 0]), 1)
    1
    """
    best = scores.topk(min(choices, scores.shape[1]), dim=1).indices
    return int((best == labels.unsqueeze(1)).any(1).sum())


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[list[Tensor]], device: torch.device) -> dict[str, float]:
    """Top-1 and top-5 accuracy and cross-entropy over all processes, and how many files could not be read."""
    share_buffers(model)
    model.eval()
    total = dict.fromkeys(("images", "loss", "corrupt", *(f"top{k}" for k in TOP)), 0.0)
    for images, labels, skipped in batches:
        scores, labels = model(normalised(images.to(device))).float(), labels.to(device)
        known = labels != NO_LABEL
        scores, labels = scores[known], labels[known]
        total["images"] += len(labels)
        total["corrupt"] += int(skipped.sum())
        total["loss"] += nn.functional.cross_entropy(scores, labels, reduction="sum").item()
        for k in TOP:
            total[f"top{k}"] += hits(scores, labels, k)
    return shares(summed(total, device))


def shares(total: dict[str, float]) -> dict[str, float]:
    """Sums as numbers an image; the counts stay."""
    images = max(total["images"], 1)
    return {name: x if name in ("images", "corrupt") else x / images for name, x in total.items()}
