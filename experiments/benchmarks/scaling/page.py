"""The page in docs/results/scaling: the text is in template.md, the numbers are computed here."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.benchmarks.report import header

from . import costs, tables
from .checks import FULL, LEAN, Check
from .costs import LAYOUTS, Setting
from .estimates import Machine
from .models import MODELS, Model
from .units import in_bytes, in_seconds, scaled

TEMPLATE = Path(__file__).with_name("template.md")
LARGEST = 1536
DEFAULT = Setting(history_size=10, period=1, store_period=1)
"""The defaults of ``Anderson`` with ``residual="step"``."""
Facts = dict[str, str]


def write_page(checks: Sequence[Check], told: int, machines: Mapping[str, Machine]) -> str:
    """The whole page. ``told``: bytes that a rank sends to all others at its first step."""
    facts = [_setting(), _memory(), _messages(told), _groups(machines["older"]), _times(machines), _paper()]
    return TEMPLATE.read_text(encoding="utf-8").format_map(
        {name: value for part in [*facts, _checked(checks)] for name, value in part.items()}
    )


def _setting() -> Facts:
    m, p, q = FULL.history_size, FULL.period, FULL.store_period
    return {"header": header(), "largest": f"{LARGEST:,}", "m": str(m), "p": str(p), "q": str(q)}


def _memory() -> Facts:
    rows = 2 * FULL.history_size * FULL.row_itemsize
    workspace = {device: costs.workspace_bytes(1 << 40, FULL, device) for device in costs.WORKSPACE_COLUMNS}
    facts = {
        "row_bytes": str(rows),
        "other_bytes": str(costs.bytes_a_number(FULL) - rows),
        "full_bytes": str(costs.bytes_a_number(FULL)),
        "lean_bytes": str(costs.bytes_a_number(LEAN)),
        "expected_figures": tables.expected_figures(),
        **{f"workspace_{device}": in_bytes(size) for device, size in workspace.items()},
    }
    for name, model in MODELS.items():
        buffer = costs.buffer_bytes(model.shapes, LAYOUTS["ddp-sharded"], LARGEST, FULL)
        facts[f"{name}_count"] = f"{model.count:,}"
        facts[f"{name}_memory"] = tables.memory(name)
        facts[f"{name}_excess"] = f"{_excess(model, 'fsdp2'):.2g}"
        facts[f"{name}_buffer"] = in_bytes(buffer)
    return facts


def _excess(model: Model, layout: str) -> float:
    """Numbers kept on the fullest rank, in units of 1/N of all."""
    return costs.numbers_kept(model.shapes, LAYOUTS[layout].sharing(LARGEST)) * LARGEST / model.count


def _messages(told: int) -> Facts:
    return {
        "summed": in_bytes(costs.summed_bytes(FULL)),
        "summed_by_default": in_bytes(costs.summed_bytes(DEFAULT)),
        "resnet50_acceleration": tables.acceleration("resnet50", FULL, 384),
        "told": in_bytes(told),
        "told_by_all": in_bytes(LARGEST * told),
    }


def _groups(machine: Machine) -> Facts:
    model = MODELS["resnet50"]
    groups, by_all = LAYOUTS["ddp-sharded"], LAYOUTS["ddp-sharded-by-all"]
    kept = [costs.kept_bytes(model.shapes, layout, LARGEST, FULL) for layout in (groups, by_all)]
    received = [tables.received(model, layout, LARGEST, FULL) for layout in (groups, by_all)]
    return {
        "group_sizes": tables.group_sizes("resnet50", machine, LARGEST),
        "saved": in_bytes(kept[0] - kept[1]),
        "more_received": f"{received[1] / received[0]:.1f}",
        "group_bytes": in_bytes(kept[0]),
        "group_excess": f"{_excess(model, 'ddp-sharded'):.0f}",
    }


def _times(machines: Mapping[str, Machine]) -> Facts:
    facts = {"machines": tables.machines(list(machines.values()))}
    for name, machine in {"resnet50": machines["older"], "7B": machines["newer"]}.items():
        facts[f"{name}_batch"] = MODELS[name].batch
        facts[f"{name}_step"] = in_seconds(MODELS[name].flops / machine.training)
        facts[f"{name}_times"] = tables.times(name, machine)
    return facts | {name: machine.title for name, machine in machines.items()}


def _paper() -> Facts:
    model, m = MODELS["resnet50"], FULL.history_size
    rows = 2 * m * FULL.row_itemsize * model.count
    return {
        "host_bytes": in_bytes(rows),
        "machine_bytes": in_bytes(6 * rows),
        "pair_bytes": in_bytes(2 * FULL.row_itemsize * model.count),
        "jump_bytes": in_bytes(FULL.itemsize * model.count),
        "qr_flops": scaled(2 * model.count * m**2, "flop"),
        "group_flops": scaled(tables.arithmetic(model, LAYOUTS["ddp-sharded"], FULL, 384).total(), "flop"),
    }


def _checked(checks: Sequence[Check]) -> Facts:
    return {
        "compared": str(len(checks)),
        "equal": "all" if all(check.holds for check in checks) else str(sum(check.holds for check in checks)),
        "checked": tables.checked(checks),
        "ends": tables.ends(checks),
    }
