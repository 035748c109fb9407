"""The command line: ``python -m experiments.benchmarks.scaling``; see the package for what it does."""

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import experiments.benchmarks.scaling as package

from . import simulation
from .checks import FULL, LEAN, RANKS, TRAINED, Check, acceleration_checks, memory_checks
from .estimates import MACHINES, Machine
from .figure import draw_memory
from .models import MODELS
from .page import LARGEST, write_page
from .rows import Row, all_rows

FOLDER = Path(__file__).parents[3] / "docs/results/scaling"


def machines(bandwidth: float | None, latency: float | None) -> Mapping[str, Machine]:
    """The assumed machines, with the given GB/s and microseconds if there are any."""
    given: dict[str, Any] = {
        **({"bandwidth": bandwidth * 1e9} if bandwidth else {}),
        **({"latency": latency * 1e-6} if latency else {}),
    }
    return {name: replace(machine, **given) for name, machine in MACHINES.items()}


def all_checks() -> list[Check]:
    """Everything that can be simulated on one core in a few minutes."""
    found: list[Check] = []
    for model in MODELS:
        print(f"{MODELS[model].title}: memory", flush=True)
        found += memory_checks([model], RANKS, FULL)
        found += memory_checks([model], RANKS[:-1], LEAN)  # cutting parameters into 1,536 parts takes a minute
    for layout, ranks, setting in TRAINED:
        print(f"ResNet-50: {layout} on {ranks} ranks", flush=True)
        found += acceleration_checks("resnet50", layout, ranks, setting)
    return found


def told_bytes() -> int:
    """Bytes that a rank with ResNet-50 sends to all others at the first step."""
    with simulation.world(LARGEST):
        return simulation.told_bytes(simulation.build(MODELS["resnet50"].shapes, "ddp-sharded", FULL, device="cpu"))


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as CSV; missing values stay empty."""
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, max(rows, key=len), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    """Check, write, and report whether all figures agree with the model."""
    parser = argparse.ArgumentParser(description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, help="GB/s that a rank sends, for the estimates")
    parser.add_argument("--latency", type=float, help="microseconds of a hop, for the estimates")
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: docs/results/scaling")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checks = all_checks()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_table(arguments.out / "scaling.csv", all_rows(checks))
    draw_memory(checks).savefig(arguments.out / "memory.png")
    page = write_page(checks, told_bytes(), machines(arguments.bandwidth, arguments.latency))
    (arguments.out / "README.md").write_text(page, encoding="utf-8")
    wrong = [check for check in checks if not check.holds]
    for check in wrong:
        print(check)
    print(f"{len(checks) - len(wrong)} of {len(checks)} figures agree with the model; {arguments.out} is written")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
