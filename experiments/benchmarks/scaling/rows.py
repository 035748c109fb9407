"""The table that is published as CSV: all costs of a model in a layout on N ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import costs
from .checks import FULL, LEAN, RANKS, Check
from .costs import LAYOUTS, Setting
from .models import MODELS, Model

SETTINGS = {"m = 20, float32": FULL, "m = 5, bfloat16": LEAN}
Row = Mapping[str, Any]


def all_rows(checks: Sequence[Check] = ()) -> Iterator[Row]:
    """All rows, with the bytes that the library keeps on the first and the last rank, if simulated."""
    found = {(c.model, c.layout, c.history_size, c.ranks, c.rank): c.found for c in checks if c.what == "bytes kept"}
    for name, model in MODELS.items():
        for setting in SETTINGS.values():
            for layout in LAYOUTS:
                for ranks in RANKS:
                    place = (name, layout, setting.history_size, ranks)
                    simulated = {f"simulated_rank_{r}": found.get((*place, n), "") for r, n in _ends(ranks).items()}
                    yield row(name, model, setting, layout, ranks) | simulated


def _ends(ranks: int) -> Mapping[str, int]:
    return {"first": 0, "last": ranks - 1}


def row(name: str, model: Model, setting: Setting, layout: str, ranks: int) -> dict[str, Any]:
    """Costs by the model, in bytes and flops, on the fullest rank."""
    shapes, lies = model.shapes, LAYOUTS[layout]
    sharing = lies.sharing(ranks)
    return {
        "model": name,
        "parameters": model.count,
        "layout": layout,
        "history_size": setting.history_size,
        "row_itemsize": setting.row_itemsize,
        "ranks": ranks,
        "sharing": sharing,
        "kept": costs.kept_bytes(shapes, lies, ranks, setting),
        "kept_on_last": costs.kept_bytes(shapes, lies, ranks, setting, ranks - 1),
        "kept_if_even": costs.bytes_a_number(setting) * model.count // sharing,
    } | (_together(model, setting, layout, ranks) if ranks > 1 else {})


def _together(model: Model, setting: Setting, layout: str, ranks: int) -> dict[str, str | int]:
    """Costs of an acceleration on several ranks."""
    shapes, lies = model.shapes, LAYOUTS[layout]
    sharing = lies.sharing(ranks)
    columns = costs.columns_multiplied(shapes, lies, ranks, ranks - 1 if sharing == 1 else 0)
    kept = costs.numbers_kept(shapes, sharing)
    return {
        "workspace": costs.workspace_bytes(columns, setting),
        "buffer": costs.buffer_bytes(shapes, lies, ranks, setting),
        "collectives": costs.collectives(lies, ranks),
        "all_reduce": costs.summed_bytes(setting),
        "all_gather": costs.message_bytes(shapes, lies, ranks, setting) * sharing,
        "product_flops": costs.product_flops(columns, setting),
        "candidate_flops": costs.candidate_flops(kept, setting),
        "store_flops": costs.store_flops(kept, setting),
    }
