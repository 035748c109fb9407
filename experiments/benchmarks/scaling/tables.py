"""The tables of the page."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

from experiments.benchmarks.report import table

from . import costs, estimates
from .checks import FULL, RANKS, Check
from .costs import LAYOUTS, Layout, Setting
from .estimates import Machine
from .models import MODELS, Model
from .rows import SETTINGS
from .units import in_bytes, in_percent, in_seconds, scaled

SHARING = (8, 16, 32, 64, 128, 256, 512, 1536)
SHOWN = ("ddp", "ddp-sharded", "fsdp2")


def memory(name: str) -> str:
    """Bytes kept on the fullest rank, for each N."""
    model = MODELS[name]
    rows = []
    for title, setting in SETTINGS.items():
        for layout in LAYOUTS.values():
            kept = [in_bytes(costs.kept_bytes(model.shapes, layout, ranks, setting)) for ranks in RANKS]
            rows.append([f"{layout.title}; {title}", *kept])
        even = [in_bytes(costs.bytes_a_number(setting) * model.count / ranks) for ranks in RANKS]
        rows.append([f"1/N of all; {title}", *even])
    return table(rows, ["layout", *(f"N = {ranks:,}" for ranks in RANKS)])


def expected_figures() -> str:
    """The figures expected for ResNet-50, which count only the rows, with what is kept."""
    model, rows = MODELS["resnet50"], 2 * FULL.history_size * FULL.row_itemsize
    lines = []
    for ranks in (1, 384, 1536):
        even = model.count / ranks
        by_all = costs.numbers_kept(model.shapes, ranks)
        groups = costs.numbers_kept(model.shapes, LAYOUTS["ddp-sharded"].sharing(ranks))
        numbers = (even, by_all, groups)
        lines.append([f"N = {ranks:,}, rows", *(in_bytes(rows * count) for count in numbers)])
        lines.append([f"N = {ranks:,}, everything kept", *(in_bytes(costs.bytes_a_number(FULL) * c) for c in numbers)])
    return table(lines, ["ResNet-50, m = 20", "1/N of all", "first dimension cut in N, fullest", "cut in 64, fullest"])


def _always(sharing: int, ranks: int) -> int:
    return sharing


def group_sizes(name: str, machine: Machine, ranks: int) -> str:
    """The cost of sharing a history among more or fewer ranks."""
    model, rows = MODELS[name], []
    for sharing in SHARING:
        layout = Layout("", partial(_always, sharing), whole=True)
        kept = costs.kept_bytes(model.shapes, layout, ranks, FULL)
        message = costs.message_bytes(model.shapes, layout, ranks, FULL)
        padding = sharing * message / (FULL.itemsize * model.count) - 1
        took = estimates.all_gather(message, sharing, machine)
        rows.append(
            [f"{sharing:,}", in_bytes(kept), in_bytes(sharing * message), in_percent(padding), in_seconds(took)]
        )
    return table(rows, ["ranks that share", "history per rank", "all-gather, received", "padding", "time"])


def acceleration(name: str, setting: Setting, ranks: int) -> str:
    """Messages and arithmetic of one acceleration on the fullest rank."""
    rows = [
        [
            layout.title,
            costs.collectives(layout, ranks),
            in_bytes(costs.summed_bytes(setting)),
            in_bytes(received(MODELS[name], layout, ranks, setting)),
            *(scaled(flops, "flop") for flops in arithmetic(MODELS[name], layout, setting, ranks).values()),
        ]
        for layout in LAYOUTS.values()
    ]
    return table(
        rows, ["layout", "collectives", "all-reduce", "all-gather, received", "products", "candidate", "pairs"]
    )


def received(model: Model, layout: Layout, ranks: int, setting: Setting) -> int:
    """Bytes received in the all-gather of a jump."""
    return layout.sharing(ranks) * costs.message_bytes(model.shapes, layout, ranks, setting)


def arithmetic(model: Model, layout: Layout, setting: Setting, ranks: int) -> Counter[str]:
    """Flops of the fullest rank for an acceleration, by purpose."""
    sharing = layout.sharing(ranks)
    columns = costs.columns_multiplied(model.shapes, layout, ranks, ranks - 1 if sharing == 1 else 0)
    kept = costs.numbers_kept(model.shapes, sharing)
    return Counter(
        products=costs.product_flops(columns, setting),
        candidate=costs.candidate_flops(kept, setting),
        pairs=costs.store_flops(kept, setting),
    )


def machines(given: Sequence[Machine]) -> str:
    """The assumed machines."""
    rows = [
        [
            machine.title,
            scaled(machine.bandwidth, "B/s"),
            in_seconds(machine.latency),
            scaled(machine.memory, "B/s"),
            scaled(machine.training, "flop/s"),
            scaled(machine.single, "flop/s"),
        ]
        for machine in given
    ]
    return table(rows, ["each rank", "sends", "latency", "memory", "training", "float32"])


def times(name: str, machine: Machine, setting: Setting = FULL) -> str:
    """Times of an acceleration, also relative to those of training."""
    model = MODELS[name]
    rows = [_times_row(model, LAYOUTS[layout], ranks, machine, setting) for ranks in RANKS[1:] for layout in SHOWN]
    columns = [
        "layout",
        "N",
        "work",
        "all-reduce",
        "all-gather",
        "share of messages in p steps",
        "share of work in p steps",
    ]
    return table(rows, columns)


def _times_row(model: Model, layout: Layout, ranks: int, machine: Machine, setting: Setting) -> list[object]:
    took = estimates.acceleration(model.shapes, layout, ranks, setting, machine)
    messages = setting.period * estimates.gradients(model.count, layout, ranks, machine)
    work = setting.period * model.flops / machine.training
    return [
        layout.title,
        f"{ranks:,}",
        in_seconds(took.work),
        in_seconds(took.sum),
        in_seconds(took.gather),
        in_percent((took.sum + took.gather) / messages),
        in_percent(took.total / work),
    ]


def checked(checks: Sequence[Check]) -> str:
    """Number of figures that were compared, by kind and model."""
    kinds = Counter((MODELS[check.model].title, check.what) for check in checks)
    held = Counter((MODELS[check.model].title, check.what) for check in checks if check.holds)
    return table([[what, title, count, held[title, what]] for (title, what), count in kinds.items()],
                 ["figure", "model", "compared", "equal"])  # fmt: skip


def ends(checks: Sequence[Check]) -> str:
    """Bytes kept on the fullest and the emptiest rank, as simulated."""
    found = {(c.model, c.layout, c.ranks, c.rank): c.found for c in checks
             if c.what == "bytes kept" and c.history_size == FULL.history_size}  # fmt: skip
    rows = [
        [
            f"{MODELS[model].title}; {LAYOUTS[layout].title}",
            f"{ranks:,}",
            f"{first:,}",
            f"{found[model, layout, ranks, ranks - 1]:,}",
        ]
        for (model, layout, ranks, rank), first in found.items()
        if rank == 0 and ranks in (384, 1536) and layout != "ddp"
    ]
    return table(rows, ["bytes kept", "N", "first rank", "last rank"])
