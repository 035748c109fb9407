"""Checks the model of costs against the library in simulated worlds, and writes the page in docs/results/scaling.

Fails if a figure differs. See the docstring of the package for what is modelled and what is simulated.
"""

import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.common import command

from . import simulation
from .checks import FULL, LEAN, RANKS, TRAINED, Check, acceleration_checks, memory_checks
from .estimates import MACHINES
from .figure import draw_memory
from .models import MODELS
from .page import LARGEST, write_page
from .tables import all_rows

FOLDER = Path(__file__).parents[3] / "docs/results/scaling"


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


def main(bandwidth: float | None = None, latency: float | None = None, out: Path = FOLDER) -> None:
    """Check, write, and report whether all figures agree with the model.

    Args:
        bandwidth: GB/s that a rank sends, for the estimates.
        latency: Microseconds of a hop, for the estimates.
        out: Folder of the page.
    """
    torch.set_num_threads(1)
    given: dict[str, Any] = {"bandwidth": bandwidth and bandwidth * 1e9, "latency": latency and latency * 1e-6}
    given = {name: value for name, value in given.items() if value}
    machines = {name: replace(machine, **given) for name, machine in MACHINES.items()}
    checks = all_checks()
    with simulation.world(LARGEST):
        optimizer = simulation.build(MODELS["resnet50"].shapes, "ddp-sharded", FULL, device="cpu")
        told = simulation.told_bytes(optimizer)
    out.mkdir(parents=True, exist_ok=True)
    rows = list(all_rows(checks))
    with (out / "scaling.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, max(rows, key=len), lineterminator="\n")  # missing values stay empty
        writer.writeheader()
        writer.writerows(rows)
    draw_memory(checks).savefig(out / "memory.png")
    (out / "README.md").write_text(write_page(checks, told, machines), encoding="utf-8")
    wrong = [check for check in checks if not check.holds]
    print(
        *wrong, f"{len(checks) - len(wrong)} of {len(checks)} figures agree with the model; {out} is written", sep="\n"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    command(main)
