"""The tables of the page, and the one that is published as CSV."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.text import in_percent, in_seconds, scaled, table

from . import costs, estimates
from .checks import FULL, LEAN, RANKS, Check
from .costs import LAYOUTS, Layout, Setting
from .estimates import Machine
from .models import MODELS, Model

SETTINGS = {"m = 20, float32": FULL, "m = 5, bfloat16": LEAN}
SHARING = (8, 16, 32, 64, 128, 256, 512, 1536)
SHOWN = ("ddp", "ddp-sharded", "fsdp2")


def memory(name: str) -> str:
    """Bytes kept on the fullest rank, for each N."""
    model = MODELS[name]
    rows = []
    for title, setting in SETTINGS.items():
        for layout in LAYOUTS.values():
            kept = [scaled(costs.kept_bytes(model.shapes, layout, ranks, setting)) for ranks in RANKS]
            rows.append([f"{layout.title}; {title}", *kept])
        even = [scaled(costs.bytes_a_number(setting) * model.count / ranks) for ranks in RANKS]
        rows.append([f"1/N of all; {title}", *even])
    return table(rows, ["layout", *(f"N = {ranks:,}" for ranks in RANKS)])


def expected_figures() -> str:
    """The figures expected for ResNet-50, which count only the rows, with what is kept."""
    model, sizes = MODELS["resnet50"], {"rows": 2 * FULL.history_size * FULL.row_itemsize}
    sizes["everything kept"] = costs.bytes_a_number(FULL)
    rows = []
    for ranks in (1, 384, 1536):
        shares = (ranks, LAYOUTS["ddp-sharded"].sharing(ranks))
        numbers = [model.count / ranks, *(costs.numbers_kept(model.shapes, share) for share in shares)]
        rows += [[f"N = {ranks:,}, {what}", *(scaled(size * n) for n in numbers)] for what, size in sizes.items()]
    return table(rows, ["ResNet-50, m = 20", "1/N of all", "first dimension cut in N, fullest", "cut in 64, fullest"])


def group_sizes(name: str, machine: Machine, ranks: int) -> str:
    """The cost of sharing a history among more or fewer ranks."""
    model, rows = MODELS[name], []
    for sharing in SHARING:
        layout = Layout("", lambda _, sharing=sharing: sharing, whole=True)  # type: ignore[misc]
        kept = costs.kept_bytes(model.shapes, layout, ranks, FULL)
        message = costs.message_bytes(model.shapes, layout, ranks, FULL)
        padding = in_percent(sharing * message / (FULL.itemsize * model.count) - 1)
        took = in_seconds(estimates.all_gather(message, sharing, machine))
        rows.append([f"{sharing:,}", scaled(kept), scaled(sharing * message), padding, took])
    return table(rows, ["ranks that share", "history per rank", "all-gather, received", "padding", "time"])


def acceleration(name: str, setting: Setting, ranks: int) -> str:
    """Messages and arithmetic of one acceleration on the fullest rank."""
    rows = []
    for layout in LAYOUTS.values():
        collectives, summed = costs.collectives(layout, ranks), scaled(costs.summed_bytes(setting))
        flops = [scaled(each, "flop") for each in arithmetic(MODELS[name], layout, setting, ranks).values()]
        rows.append([layout.title, collectives, summed, scaled(received(MODELS[name], layout, ranks, setting)), *flops])
    columns = ["layout", "collectives", "all-reduce", "all-gather, received", "products", "candidate", "pairs"]
    return table(rows, columns)


def received(model: Model, layout: Layout, ranks: int, setting: Setting) -> int:
    """Bytes received in the all-gather of a jump."""
    return layout.sharing(ranks) * costs.message_bytes(model.shapes, layout, ranks, setting)


def multiplied(model: Model, layout: Layout, ranks: int) -> int:
    """Columns that the fullest rank multiplies."""
    return costs.columns_multiplied(model.shapes, layout, ranks, ranks - 1 if layout.sharing(ranks) == 1 else 0)


def arithmetic(model: Model, layout: Layout, setting: Setting, ranks: int) -> Counter[str]:
    """Flops of the fullest rank for an acceleration, by purpose."""
    kept = costs.numbers_kept(model.shapes, layout.sharing(ranks))
    return Counter(
        product=costs.product_flops(multiplied(model, layout, ranks), setting),
        candidate=costs.candidate_flops(kept, setting),
        store=costs.store_flops(kept, setting),
    )


def machines(given: Sequence[Machine]) -> str:
    """The assumed machines."""
    rows = []
    for each in given:
        flops = [scaled(each.training, "flop/s"), scaled(each.single, "flop/s")]
        rows.append(
            [each.title, scaled(each.bandwidth, "B/s"), in_seconds(each.latency), scaled(each.memory, "B/s"), *flops]
        )
    return table(rows, ["each rank", "sends", "latency", "memory", "training", "float32"])


def times(name: str, machine: Machine, setting: Setting = FULL) -> str:
    """Times of an acceleration, also relative to those of training."""
    model, rows = MODELS[name], []
    work = setting.period * model.flops / machine.training
    for ranks in RANKS[1:]:
        for layout in (LAYOUTS[name] for name in SHOWN):
            took = estimates.acceleration(model.shapes, layout, ranks, setting, machine)
            messages = setting.period * estimates.gradients(model.count, layout, ranks, machine)
            shares = [in_percent((took.sum + took.gather) / messages), in_percent(took.total / work)]
            rows.append([layout.title, f"{ranks:,}", *map(in_seconds, (took.work, took.sum, took.gather)), *shares])
    shares = ["share of messages in p steps", "share of work in p steps"]
    return table(rows, ["layout", "N", "work", "all-reduce", "all-gather", *shares])


def checked(checks: Sequence[Check]) -> str:
    """Number of figures that were compared, by kind and model."""
    kinds = Counter((MODELS[check.model].title, check.what) for check in checks)
    held = Counter((MODELS[check.model].title, check.what) for check in checks if check.holds)
    rows = [[what, title, count, held[title, what]] for (title, what), count in kinds.items()]
    return table(rows, ["figure", "model", "compared", "equal"])


def kept_bytes(checks: Sequence[Check]) -> dict[tuple[str, str, int, int, int], int]:
    """Model, layout, history_size, ranks and rank -> bytes that the library keeps, as simulated."""
    return {(c.model, c.layout, c.history_size, c.ranks, c.rank): c.found for c in checks if c.what == "bytes kept"}


def ends(checks: Sequence[Check]) -> str:
    """Bytes kept on the fullest and the emptiest rank, as simulated."""
    found = kept_bytes(checks)
    rows = []
    for (model, layout, size, ranks, rank), first in found.items():
        if size == FULL.history_size and rank == 0 and ranks in (384, 1536) and layout != "ddp":
            last = found[model, layout, size, ranks, ranks - 1]
            rows.append([f"{MODELS[model].title}; {LAYOUTS[layout].title}", f"{ranks:,}", f"{first:,}", f"{last:,}"])
    return table(rows, ["bytes kept", "N", "first rank", "last rank"])


# The published table


def all_rows(checks: Sequence[Check] = ()) -> Iterator[Mapping[str, Any]]:
    """All costs of each model in each layout on N ranks, with the bytes that the library keeps on the first and the
    last rank, if simulated."""
    found = kept_bytes(checks)
    for name, model in MODELS.items():
        for setting in SETTINGS.values():
            for layout in LAYOUTS:
                for ranks in RANKS:
                    place = (name, layout, setting.history_size, ranks)
                    first, last = (found.get((*place, rank), "") for rank in (0, ranks - 1))
                    simulated = {"simulated_rank_first": first, "simulated_rank_last": last}
                    yield row(name, model, setting, layout, ranks) | simulated


def row(name: str, model: Model, setting: Setting, layout: str, ranks: int) -> dict[str, Any]:
    """Costs by the model, in bytes and flops, on the fullest rank; those of messages on several ranks alone."""
    shapes, lies = model.shapes, LAYOUTS[layout]
    sharing = lies.sharing(ranks)
    alone = {
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
    }
    if ranks == 1:
        return alone
    return alone | {
        "workspace": costs.workspace_bytes(multiplied(model, lies, ranks), setting),
        "buffer": costs.buffer_bytes(shapes, lies, ranks, setting),
        "collectives": costs.collectives(lies, ranks),
        "all_reduce": costs.summed_bytes(setting),
        "all_gather": received(model, lies, ranks, setting),
        **{f"{purpose}_flops": flops for purpose, flops in arithmetic(model, lies, setting, ranks).items()},
    }
