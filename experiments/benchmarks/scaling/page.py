"""The page in docs/results/scaling: the text is in template.md, the numbers are computed here."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.text import header, in_seconds, scaled

from . import costs, tables
from .checks import FULL, LEAN, Check
from .costs import LAYOUTS, Setting
from .estimates import Machine
from .models import MODELS, Model

TEMPLATE = Path(__file__).with_name("template.md")
LARGEST = 1536
DEFAULT = Setting(history_size=10, period=1, store_period=1)
"""The defaults of ``Anderson`` with ``residual="step"``."""


def write_page(checks: Sequence[Check], told: int, machines: Mapping[str, Machine]) -> str:
    """The whole page. ``told``: bytes that a rank sends to all others at its first step."""
    groups, by_all = LAYOUTS["ddp-sharded"], LAYOUTS["ddp-sharded-by-all"]
    m, rows, older = FULL.history_size, 2 * FULL.history_size * FULL.row_itemsize, machines["older"]
    resnet = MODELS["resnet50"]
    kept, kept_by_all = (costs.kept_bytes(resnet.shapes, layout, LARGEST, FULL) for layout in (groups, by_all))
    received, received_by_all = (tables.received(resnet, layout, LARGEST, FULL) for layout in (groups, by_all))
    facts = {
        "header": header(),
        "largest": f"{LARGEST:,}",
        "m": str(m),
        "p": str(FULL.period),
        "q": str(FULL.store_period),
        # Memory
        "row_bytes": str(rows),
        "other_bytes": str(costs.bytes_a_number(FULL) - rows),
        "full_bytes": str(costs.bytes_a_number(FULL)),
        "lean_bytes": str(costs.bytes_a_number(LEAN)),
        "expected_figures": tables.expected_figures(),
        # Messages
        "summed": scaled(costs.summed_bytes(FULL)),
        "summed_by_default": scaled(costs.summed_bytes(DEFAULT)),
        "resnet50_acceleration": tables.acceleration("resnet50", FULL, 384),
        "told": scaled(told),
        "told_by_all": scaled(LARGEST * told),
        # Groups of ranks that share a history
        "group_sizes": tables.group_sizes("resnet50", older, LARGEST),
        "saved": scaled(kept - kept_by_all),
        "more_received": f"{received_by_all / received:.1f}",
        "group_bytes": scaled(kept),
        "group_excess": f"{_excess(resnet, 'ddp-sharded'):.0f}",
        # The paper's implementation
        "host_bytes": scaled(rows * resnet.count),
        "machine_bytes": scaled(6 * rows * resnet.count),
        "pair_bytes": scaled(2 * FULL.row_itemsize * resnet.count),
        "jump_bytes": scaled(FULL.itemsize * resnet.count),
        "qr_flops": scaled(2 * resnet.count * m**2, "flop"),
        "group_flops": scaled(tables.arithmetic(resnet, groups, FULL, 384).total(), "flop"),
        # Checks
        "compared": str(len(checks)),
        "equal": "all" if all(check.holds for check in checks) else str(sum(check.holds for check in checks)),
        "checked": tables.checked(checks),
        "ends": tables.ends(checks),
        "machines": tables.machines(list(machines.values())),
    }
    facts |= {name: machine.title for name, machine in machines.items()}
    for device in costs.WORKSPACE_COLUMNS:
        facts[f"workspace_{device}"] = scaled(costs.workspace_bytes(1 << 40, FULL, device))
    for name, model in MODELS.items():
        facts[f"{name}_count"] = f"{model.count:,}"
        facts[f"{name}_memory"] = tables.memory(name)
        facts[f"{name}_excess"] = f"{_excess(model, 'fsdp2'):.2g}"
        facts[f"{name}_buffer"] = scaled(costs.buffer_bytes(model.shapes, groups, LARGEST, FULL))
    for name, machine in {"resnet50": older, "7B": machines["newer"]}.items():
        facts[f"{name}_batch"] = MODELS[name].batch
        facts[f"{name}_step"] = in_seconds(MODELS[name].flops / machine.training)
        facts[f"{name}_times"] = tables.times(name, machine)
    return TEMPLATE.read_text(encoding="utf-8").format_map(facts)


def _excess(model: Model, layout: str) -> float:
    """Numbers kept on the fullest rank, in units of 1/N of all."""
    return costs.numbers_kept(model.shapes, LAYOUTS[layout].sharing(LARGEST)) * LARGEST / model.count
