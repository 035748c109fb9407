"""Measures the cost of a step: `Anderson(base)` against `base`, and against the time to read its history once.

    python -m experiments.benchmarks.step_cost              all rows; the large model takes about 6 GB and some minutes
    python -m experiments.benchmarks.step_cost --quick      fewer repeats, no large model

All methods take turns in the same rounds, and ratios are medians over rounds. Where the reference implementation can be
imported (as `AADL`), it takes part, and its ratio is in the last column. `jumps` is the number of accepted jumps, and
`accepted` their share of all accelerations that were computed.
"""

import time
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from experiments.benchmarks.common import accepted, command, difference, jumps, ratio, take_turns, threads, timed
from experiments.networks import perceptron
from experiments.optimizers import accelerate
from experiments.resnet import resnet50
from experiments.text import header, table
from torch_anderson import Anderson, MovingAverage

COLUMNS = ["step", "measured", "limit", "unit", "jumps", "accepted", "reference"]
NEVER = 10**9
Options = dict[str, Any]
PAPER: Options = {"residual": "step", "safeguard": "residual"}
EVERY_STEP: Options = PAPER | {"period": 1, "store_period": 1, "history_size": 10}
ACCEPTING: Options = {"safeguard": None, "relaxation": 0.05}
"""Without a safeguard every jump is accepted; the relaxation keeps them small enough not to diverge."""
AVERAGE: Options = {"average": MovingAverage(10)}
BLOCK = 40
"""Steps of a round: at least one whole cycle of the default options under noise, a few gradients and a rest."""


class Case(NamedTuple):
    """A row of the table."""

    name: str
    options: Options
    limit: float | None = None
    reference: Options | None = None
    """Options of the reference implementation for the same work; None if it has no such mode."""
    noisy: bool = True
    """Whether gradients have noise: from batches (small model), or added (large model)."""
    microseconds: bool = False


SMALL = [
    Case("default options, noisy batches", {}, 1.04),
    Case("default options, whole batch", {}, noisy=False),
    Case("p = q = 1, residual safeguard", EVERY_STEP, 1.6),
    Case("p = q = 1, residual safeguard, + average", EVERY_STEP | AVERAGE, 1.8),
    Case("p = q = 1, no safeguard", EVERY_STEP | ACCEPTING, 1.4, {}),
    Case("p = q = 1, no safeguard, + average", EVERY_STEP | ACCEPTING | AVERAGE, 1.65, {"average": True}),
    Case("nothing to do", EVERY_STEP | {"period": NEVER, "store_period": NEVER}, 30.0, microseconds=True),
]
LARGE = [
    Case("default options, no noise", {}, noisy=False),
    Case("p = q = 1, residual safeguard", PAPER, 2.5),
    Case("p = q = 1, no safeguard", PAPER | {"safeguard": None}, 2.5, {}),
]


def plain(base: Optimizer) -> Optimizer:
    """The base alone."""
    return base


def by_reference(base: Optimizer, history_size: int = 10, **options: Any) -> Optimizer:
    """The base, accelerated at every step by the reference implementation."""
    return accelerate(
        base, relaxation=0.05, wait_iterations=0, history_depth=history_size, store_each_nth=1, frequency=1, **options
    )


class Training:
    """The whole training step of a network of 8,897 weights on noisy data, in batches of 40 or in one."""

    def __init__(self, wrap: Callable[[Optimizer], Any], noisy: bool) -> None:
        torch.manual_seed(0)
        self.model = perceptron(7, 64, 64, 64, 1)
        inputs = torch.randn(400, 7)
        targets = inputs.sum(1, keepdim=True) + torch.randn(400, 1)
        size = 40 if noisy else 400
        self.batches = cycle(list(zip(inputs.split(size), targets.split(size), strict=True)))
        self.optimizer = wrap(Adam(self.model.parameters(), lr=1e-3))

    def block(self) -> float:
        """Processor seconds per step, without other processes of the machine."""
        start = time.process_time()
        for inputs, targets in islice(self.batches, BLOCK):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(inputs), targets).backward()
            self.optimizer.step()
        return (time.process_time() - start) / BLOCK


def small_rows(rounds: int, reference: bool) -> list[list[object]]:
    """Rows about the small network, on one thread."""
    runs: dict[tuple[str, Any], Training] = {("base", noisy): Training(plain, noisy) for noisy in (True, False)}
    for case in SMALL:
        runs["ours", case.name] = Training(partial(Anderson, **case.options), case.noisy)
        if reference and case.reference is not None:
            runs["reference", case.name] = Training(partial(by_reference, **case.reference), case.noisy)
    with threads(1):
        times = take_turns({name: run.block for name, run in runs.items()}, rounds, warmup=4)
    rows: list[list[object]] = []
    for case in SMALL:
        base, ours = times["base", case.noisy], times["ours", case.name]
        measured = 1e6 * difference(ours, base) if case.microseconds else ratio(ours, base)
        optimizer, theirs = runs["ours", case.name].optimizer, times.get(("reference", case.name))
        unit = "us added" if case.microseconds else "x base"
        counts = jumps(optimizer), accepted(optimizer)
        rows.append([case.name, measured, case.limit or "-", unit, *counts, ratio(theirs, base) if theirs else "-"])
    return rows


def groups_row(rounds: int, count: int = 1000) -> list[object]:
    """Row about very many groups of one tensor: added time, relative to that for one group of the same tensors."""
    optimizers: dict[tuple[str, bool], Any] = {}
    for apart in (True, False):
        wrappers: dict[str, Callable[[Optimizer], Any]] = {"base": plain, "ours": partial(Anderson, **EVERY_STEP)}
        for name, wrap in wrappers.items():
            torch.manual_seed(0)
            params = [nn.Parameter(torch.randn(3)) for _ in range(count)]
            optimizers[name, apart] = wrap(SGD([{"params": [p]} for p in params] if apart else params, lr=1e-3))
    steps = {name: partial(timed_step, each, clock=time.process_time) for name, each in optimizers.items()}
    with threads(1):
        times = take_turns(steps, rounds, warmup=12)
    split, together = (difference(times["ours", apart], times["base", apart]) for apart in (True, False))
    ours = optimizers["ours", True]
    name = f"p = q = 1, {count:,} groups of one tensor"
    return [name, split / together, 2.0, "x one group", jumps(ours), accepted(ours), "-"]


def large_row(case: Case, rounds: int, reference: bool, history_size: int = 20) -> list[object]:
    """Row about the 161 parameters of ResNet-50, on two threads: added time in readings of the history."""
    step, warmup = partial(timed_step, noise=0.01 * case.noisy), history_size + 2
    base, ours = resnet_optimizer(), Anderson(resnet_optimizer(), history_size=history_size, **case.options)
    history = torch.randn(2, history_size, sum(p.numel() for group in base.param_groups for p in group["params"]))
    measures = {"read": partial(timed, history.sum), "base": partial(step, base), "ours": partial(step, ours)}
    with threads(2):
        times = take_turns(measures, rounds, warmup)
        row = [difference(times["ours"], times["base"]) / median(times["read"]), case.limit or "-", "x reading"]
        row += [jumps(ours), accepted(ours), "-"]
        if reference and case.reference is not None:
            del measures, ours  # its history takes as much memory
            theirs = by_reference(resnet_optimizer(), history_size)
            alone = take_turns({"reference": partial(step, theirs)}, max(rounds // 3, 3), warmup)["reference"]
            row[-1] = (median(alone) - median(times["base"])) / median(times["read"])
    return [f"ResNet-50, m = {history_size}, {case.name}", *row]


def resnet_optimizer() -> SGD:
    """SGD of small random numbers in the shapes of ResNet-50."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in resnet50().parameters()]
    torch.manual_seed(0)
    return SGD([nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes], lr=1e-3)


def timed_step(optimizer: Any, noise: float = 0.01, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one step with gradients of a paraboloid of condition 100, plus noise."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = curvature(param.shape) * param.detach()
            if noise:
                param.grad.add_(torch.randn_like(param), alpha=noise)
    return timed(optimizer.step, clock)


@cache
def curvature(shape: torch.Size) -> torch.Tensor:
    return torch.logspace(-2, 0, shape.numel()).reshape(shape)


def main(quick: bool = False, reference: bool = True) -> None:
    """Print the table.

    Args:
        quick: Fewer repeats, no large model.
        reference: Measure AADL too, if it can be imported.
    """
    reference = reference and find_spec("AADL") is not None
    print(header())
    rows = small_rows(10 if quick else 60, reference)
    rows.append(groups_row(30 if quick else 100))
    if not quick:
        rows += [large_row(case, 15, reference) for case in LARGE]
    print(table(rows, COLUMNS))


if __name__ == "__main__":
    command(main)
