"""Measures the time that Anderson adds to a training step of ResNet-50 under DDP: 2 processes of one thread.

    python -m experiments.benchmarks.imagenet_step          batch 16 of 224 pixels, 6 GB a process, 10 minutes a row
    python -m experiments.benchmarks.imagenet_step --quick  one row, 64 pixels: shorter steps, so a larger ratio
    python -m experiments.benchmarks.imagenet_step --shard  the history sharded over the processes

Two models train on the same random images, one with the paper's Anderson (p = q = 5, m = 20, the history full), one
without. They take turns in blocks of 5 steps, one of which accelerates; the ratio is the median over rounds. The last
row has the default options, at rest after random gradients. `accepted` is the share of accelerations that jumped.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from experiments.benchmarks.common import accepted, chosen, command, ratio, take_turns
from experiments.resnet import resnet50
from experiments.text import header, table
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


def row(name: str, batch: int, size: int, rounds: int, shard: bool) -> list[object]:
    options = CASES[name] | ({"storage": Storage(shard=True)} if shard else {})
    plain, ours = (Training(each, batch, size) for each in (None, options))
    ours.fill()
    times = take_turns({"base": plain.block, "ours": ours.block}, rounds, warmup=1)
    measured, seconds = ratio(times["ours"], times["base"]), (median(times["ours"]), median(times["base"]))
    return [name, measured, LIMIT, "x base", accepted(ours.optimizer), *seconds]


def work(rank: int, folder: str, cases: list[str], measure: Callable[[str], list[object]]) -> None:
    """Train and measure on each process; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(minutes=10), PROCESSES, rank)
    rows = []
    for name in cases:
        rows.append(measure(name))
        if rank == 0:
            print(f"{name}: {rows[-1][1]:.3f} times the base's time a step", file=sys.stderr, flush=True)
    if rank == 0:
        print(header())
        print(table(rows, COLUMNS))
    dist.destroy_process_group()


def main(
    cases: Sequence[str] = (),
    batch: int = 16,
    size: int = 224,
    rounds: int = 5,
    quick: bool = False,
    shard: bool = False,
) -> None:
    """Print the table.

    Args:
        cases: Rows to measure; default: all.
        batch: Images per step on each process.
        size: Pixels.
        rounds: Blocks of each kind.
        quick: The first row only, 64 pixels, 2 rounds.
        shard: Shard the history over the processes.
    """
    names = chosen(cases, CASES)
    if quick:
        names, size, rounds = names[:1], 64, 2
    print(f"batch {batch}, {size} pixels, {PROCESSES} processes", flush=True)
    measure = partial(row, batch=batch, size=size, rounds=rounds, shard=shard)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(work, (folder, names, measure), PROCESSES, start_method="fork")


if __name__ == "__main__":
    command(main)
