"""Measures the time that Anderson adds to a training step of ResNet-50 under DDP: 2 processes of one thread.

    python -m experiments.benchmarks.imagenet_step          batch 16 of 224 pixels, 6 GB a process, 10 minutes a row
    python -m experiments.benchmarks.imagenet_step --quick  one row, 64 pixels: shorter steps, so a larger ratio
    python -m experiments.benchmarks.imagenet_step --shard  the history sharded over the processes

Two models train on the same random images, one with the paper's Anderson (p = q = 5, m = 20, the history full), one
without. They take turns in blocks of 5 steps, one of which accelerates; the ratio is the median over rounds. The last
row has the default options, at rest after random gradients. `accepted` is the share of accelerations that jumped.
"""

import argparse
import os
import sys
import tempfile
import time
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from experiments.benchmarks.report import header, table
from experiments.benchmarks.step_cost import accepted, ratio, take_turns
from experiments.resnet import resnet50
from torch_anderson import Anderson, MovingAverage, Storage

COLUMNS = ["ResNet-50, 2 processes", "measured", "limit", "unit", "accepted", "s/step", "s/step base"]
LIMIT = 1.05
PROCESSES = 2
PERIOD, HISTORY = 5, 20
PAPER: dict[str, Any] = {
    "residual": "step",
    "safeguard": "residual",
    "history_size": HISTORY,
    "period": PERIOD,
    "store_period": PERIOD,
    "relaxation": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    "residual safeguard": PAPER,
    "all jumps made": PAPER | {"safeguard": None},
    "residual safeguard, average": PAPER | {"average": MovingAverage(PERIOD - 1)},
    "default options, at rest": {},
}


class Training:
    """ResNet-50 under DDP on random images."""

    def __init__(self, options: dict[str, Any] | None, batch: int, size: int):
        torch.manual_seed(0)
        self.model = DistributedDataParallel(resnet50())
        # So small a rate that it does not matter where the random gradients of `fill` lead.
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-5, momentum=0.9, nesterov=True)
        if options is not None:
            self.optimizer = Anderson(self.optimizer, **options)
        self.images, self.labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))

    def fill(self) -> None:
        """Steps with random gradients until the history is full: forward and backward passes would take long."""
        for _ in range(PERIOD * (HISTORY + 2)):
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            self.optimizer.step()

    def block(self) -> float:
        """Seconds per step, over as many steps as contain one acceleration; all processes wait for the slowest."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(PERIOD):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
            self.optimizer.step()
        dist.barrier()
        return (time.perf_counter() - start) / PERIOD


def row(name: str, arguments: argparse.Namespace) -> list[object]:
    options = CASES[name] | ({"storage": Storage(shard=True)} if arguments.shard else {})
    plain, ours = (Training(each, arguments.batch, arguments.size) for each in (None, options))
    ours.fill()
    base, accelerated = take_turns([plain.block, ours.block], arguments.rounds, warmup=1)
    measured = ratio(accelerated, base)
    return [name, measured, LIMIT, "x base", accepted(ours.optimizer), median(accelerated), median(base)]


def work(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    """Train and measure on each process; rank 0 prints."""
    torch.set_num_threads(1)
    patience = timedelta(minutes=10)
    dist.init_process_group("gloo", f"file://{folder}/store", patience, PROCESSES, rank)
    rows = []
    for name in arguments.cases:
        rows.append(row(name, arguments))
        if rank == 0:
            print(f"{name}: {rows[-1][1]:.3f} times the base's time a step", file=sys.stderr, flush=True)
    if rank == 0:
        print(f"batch {arguments.batch}, {arguments.size} pixels, {PROCESSES} processes")
        print(header())
        print(table(rows, COLUMNS))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one row, small images, 2 rounds")
    parser.add_argument("--shard", action="store_true", help="shard the history over the processes")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, help="rows to measure; default all, with --quick the first"
    )
    parser.add_argument("--batch", type=int, default=16, help="images per step on each process")
    parser.add_argument("--size", type=int, help="pixels; default 224, with --quick 64")
    parser.add_argument("--rounds", type=int, help="blocks of each kind; default 5, with --quick 2")
    arguments = parser.parse_args()
    arguments.cases = arguments.cases or list(CASES)[: 1 if arguments.quick else None]
    arguments.size = arguments.size or (64 if arguments.quick else 224)
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(work, (folder, arguments), PROCESSES, start_method="fork")


if __name__ == "__main__":
    main()
