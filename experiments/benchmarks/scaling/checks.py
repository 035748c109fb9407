"""The model against the library, in simulated worlds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from . import costs, simulation
from .costs import LAYOUTS, Setting, Shapes
from .models import MODELS

RANKS = (1, 6, 64, 384, 1536)
FULL = Setting(history_size=20, period=5, store_period=5)
"""The paper's setting for ResNet-50."""
LEAN = Setting(history_size=5, period=5, store_period=5, row_itemsize=2)
"""A short history with rows in bfloat16."""
TRAINED = [
    ("ddp", 384, Setting(history_size=2, period=5, store_period=5)),  # all on this rank; 4 GB with 20 columns
    ("ddp-sharded", 6, FULL),
    ("ddp-sharded", 384, FULL),
    ("ddp-sharded", 1536, FULL),
    ("ddp-sharded-by-all", 1536, FULL),
    ("fsdp2", 6, FULL),
    ("fsdp2", 1536, FULL),
]
"""Worlds in which ResNet-50 is trained with random gradients."""


class Check(NamedTuple):
    """A number of the model, and the one found with the library."""

    model: str
    layout: str
    history_size: int
    ranks: int
    rank: int
    what: str
    paper: int
    found: int

    @property
    def holds(self) -> bool:
        """Whether they are equal."""
        return self.paper == self.found


def memory_checks(models: Sequence[str], ranks: Sequence[int], setting: Setting) -> Iterator[Check]:
    """Bytes kept on the first and the last rank, which are the fullest and the emptiest."""
    for model in models:
        for size in ranks:
            for rank in sorted({0, size - 1}):
                with simulation.world(size, rank):
                    for name, layout in LAYOUTS.items():
                        shapes = MODELS[model].shapes
                        paper = costs.kept_bytes(shapes, layout, size, setting, rank)
                        found = simulation.kept_bytes(simulation.build(shapes, name, setting))
                        yield Check(model, name, setting.history_size, size, rank, "bytes kept", paper, found)


def acceleration_checks(model: str, layout: str, ranks: int, setting: Setting) -> list[Check]:
    """Checks of the messages and products of one acceleration on the first rank of a world."""
    shapes = MODELS[model].shapes
    with simulation.world(ranks):
        torch.manual_seed(0)
        counting = simulation.counted_acceleration(simulation.build(shapes, layout, setting, device="cpu"))
    paper, found = acceleration_on_paper(shapes, layout, ranks, setting), counting.as_dict()
    place = model, layout, setting.history_size, ranks, 0
    return [Check(*place, what, paper[what], found[what]) for what in paper]


def acceleration_on_paper(
    shapes: Shapes, layout: str, ranks: int, setting: Setting, rank: int = 0
) -> Mapping[str, int]:
    """The figures of ``Counting.as_dict``, by the model."""
    lies, sharing = LAYOUTS[layout], LAYOUTS[layout].sharing(ranks)
    gathers = int(lies.whole and sharing > 1)
    columns, kept = (
        costs.columns_multiplied(shapes, lies, ranks, rank),
        costs.numbers_kept(shapes, sharing, rank % sharing),
    )
    products, candidate = costs.product_flops(columns, setting), costs.candidate_flops(kept, setting)
    return {
        "all-reduces": costs.collectives(lies, ranks) - gathers,
        "bytes given to the all-reduce": costs.summed_bytes(setting),
        "all-gathers": gathers,
        "bytes given to the all-gather": costs.message_bytes(shapes, lies, ranks, setting),
        "other collectives": 0,
        "flops in float64": 0,
        "flops in float32": products + candidate,
    }
