"""Measures the cost of a step: `Anderson(base)` against `base`, and against the time to read its history once.

    python -m experiments.benchmarks.step_cost              all rows; the large model takes about 6 GB and some minutes
    python -m experiments.benchmarks.step_cost --quick      fewer repeats, no large model

All methods take turns in the same rounds, and ratios are medians over rounds. Where the reference implementation can be
imported (as `AADL`), it takes part, and its ratio is in the last column. `jumps` is the number of accepted jumps, and
`accepted` their share of all accelerations that were computed.
"""

import argparse
import importlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from experiments.benchmarks.report import header, table
from torch_anderson import Anderson, MovingAverage

COLUMNS = ["step", "measured", "limit", "unit", "jumps", "accepted", "reference"]
NEVER = 10**9
EVERY_STEP: dict[str, Any] = {
    "residual": "step",
    "safeguard": "residual",
    "period": 1,
    "store_period": 1,
    "history_size": 10,
}
# Without a safeguard every jump is accepted; the relaxation keeps them small enough not to diverge.
ACCEPTING: dict[str, Any] = {"safeguard": None, "relaxation": 0.05}


class Case(NamedTuple):
    """One row about the small model."""

    name: str
    options: dict[str, Any]
    limit: float | None = None
    reference: dict[str, Any] | None = None
    """Options of the reference implementation for the same work; None if it has no such mode."""
    microseconds: bool = False
    whole_batch: bool = False


AVERAGE: dict[str, Any] = {"average": MovingAverage(10)}
CASES = [
    Case("default options, noisy batches", {}, 1.04),
    Case("default options, whole batch", {}, whole_batch=True),
    Case("p = q = 1, residual safeguard", EVERY_STEP, 1.6),
    Case("p = q = 1, residual safeguard, + average", EVERY_STEP | AVERAGE, 1.8),
    Case("p = q = 1, no safeguard", EVERY_STEP | ACCEPTING, 1.4, {}),
    Case("p = q = 1, no safeguard, + average", EVERY_STEP | ACCEPTING | AVERAGE, 1.65, {"average": True}),
    Case("nothing to do", EVERY_STEP | {"period": NEVER, "store_period": NEVER}, 30.0, microseconds=True),
]
BLOCK = 40
"""Steps of a round: at least one whole cycle of the default options under noise, a few gradients and a rest."""


class Training:
    """The whole training step of a small network on noisy data, in batches of 40 or in one."""

    def __init__(self, wrap: Callable[[torch.optim.Optimizer], Any], whole_batch: bool = False):
        torch.manual_seed(0)
        layers = [layer for i in (7, 64, 64) for layer in (nn.Linear(i, 64), nn.ReLU())]
        self.model = nn.Sequential(*layers, nn.Linear(64, 1))
        inputs = torch.randn(400, 7)
        targets = inputs.sum(1, keepdim=True) + torch.randn(400, 1)
        size = 400 if whole_batch else 40
        self.batches = cycle(list(zip(inputs.split(size), targets.split(size), strict=True)))
        self.optimizer = wrap(torch.optim.Adam(self.model.parameters(), lr=1e-3))
        self.loss = nn.MSELoss()

    def block(self) -> float:
        """Processor seconds per step, without other processes of the machine."""
        start = time.process_time()
        for inputs, targets in islice(self.batches, BLOCK):
            self.optimizer.zero_grad()
            self.loss(self.model(inputs), targets).backward()
            self.optimizer.step()
        return (time.process_time() - start) / BLOCK


def small_rows(rounds: int, reference: Any) -> list[list[object]]:
    """Rows about the network of 8,897 parameters, on one thread."""
    plain = [Training(lambda base: base, whole_batch) for whole_batch in (False, True)]
    ours = [Training(partial(Anderson, **case.options), case.whole_batch) for case in CASES]
    theirs = {
        case.name: Training(partial(accelerated_by, reference, history_size=10, **case.reference))
        for case in CASES
        if reference and case.reference is not None
    }
    with threads(1):
        times = take_turns([run.block for run in (*plain, *ours, *theirs.values())], rounds, warmup=4)
    batches, whole_batch, *rest = times
    references = dict(zip(theirs, rest[len(CASES) :], strict=True))
    return [
        _small_row(case, whole_batch if case.whole_batch else batches, seconds, run, references.get(case.name))
        for case, seconds, run in zip(CASES, rest, ours, strict=False)
    ]


def _small_row(
    case: Case, base: Sequence[float], ours: Sequence[float], run: Training, theirs: Sequence[float] | None
) -> list[object]:
    measured = 1e6 * difference(ours, base) if case.microseconds else ratio(ours, base)
    unit = "us added" if case.microseconds else "x base"
    counts = jumps(run.optimizer), accepted(run.optimizer)
    return [case.name, measured, case.limit or "-", unit, *counts, ratio(theirs, base) if theirs else "-"]


class LargeCase(NamedTuple):
    """One row about the shapes of ResNet-50."""

    name: str
    options: dict[str, Any]
    limit: float | None = None
    noise: float = 0.01
    """Noise of each entry of the gradient, at which the default options would rest."""
    reference: bool = False


LARGE_CASES = [
    LargeCase("default options, no noise", {}, noise=0.0),
    LargeCase("p = q = 1, residual safeguard", {"residual": "step", "safeguard": "residual"}, 2.5),
    LargeCase("p = q = 1, no safeguard", {"residual": "step", "safeguard": None}, 2.5, reference=True),
]


def large_row(case: LargeCase, rounds: int, reference: Any, history_size: int = 20) -> list[object]:
    """Row about the shapes of ResNet-50, on two threads: added time in readings of the history."""
    shapes = resnet50_shapes()
    n = sum(math.prod(shape) for shape in shapes)
    with threads(2):
        wrapped = [Anderson(_sgd(shapes), history_size=history_size, **case.options)]
        base = _sgd(shapes)
        buffers = torch.randn(2, history_size, n)
        step = partial(_timed_step, noise=case.noise)
        rounds_of = [lambda: timed(buffers.sum), lambda: step(base), lambda: step(wrapped[0])]
        read, plain, ours = take_turns(rounds_of, rounds, warmup=history_size + 2)
        counts = jumps(wrapped[0]), accepted(wrapped.pop())
        added_by_reference: object = "-"
        if reference and case.reference:
            theirs = accelerated_by(reference, _sgd(shapes), history_size)
            [seconds] = take_turns([lambda: step(theirs)], max(rounds // 3, 3), warmup=history_size + 2)
            added_by_reference = (median(seconds) - median(plain)) / median(read)
    added = median(o - p for o, p in zip(ours, plain, strict=True)) / median(read)
    name = f"ResNet-50, m = {history_size}, {case.name}"
    return [name, added, case.limit or "-", "x reading", *counts, added_by_reference]


def groups_row(rounds: int, count: int = 1000) -> list[object]:
    """Row about very many groups of one tensor: added time, relative to that for one group of the same tensors."""
    paper = partial(Anderson, **EVERY_STEP)
    with threads(1):
        apart, together = (
            [_many(count, split, wrap) for wrap in (lambda base: base, paper)] for split in (True, False)
        )
        steps = [partial(_timed_step, optimizer, time.process_time) for optimizer in (*apart, *together)]
        base_apart, ours_apart, base_together, ours_together = take_turns(steps, rounds, warmup=12)
    added = difference(ours_apart, base_apart) / difference(ours_together, base_together)
    counts = jumps(apart[1]), accepted(apart[1])
    return [f"p = q = 1, {count:,} groups of one tensor", added, 2.0, "x one group", *counts, "-"]


def _many(count: int, split: bool, wrap: Callable[[torch.optim.Optimizer], Any]) -> Any:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3)) for _ in range(count)]
    return wrap(torch.optim.SGD([{"params": [param]} for param in params] if split else params, lr=1e-3))


def _sgd(shapes: Sequence[tuple[int, ...]]) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    return torch.optim.SGD(params, lr=1e-3)


def _timed_step(optimizer: Any, clock: Callable[[], float] = time.perf_counter, noise: float = 0.01) -> float:
    """Seconds of one step with gradients of a paraboloid of condition 100, plus noise."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = _curvature(param.shape) * param.detach()
            if noise:
                param.grad.add_(torch.randn_like(param), alpha=noise)
    return timed(optimizer.step, clock)


@cache
def _curvature(shape: torch.Size) -> torch.Tensor:
    return torch.logspace(-2, 0, shape.numel()).reshape(shape)


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The 161 parameters of ResNet-50.

    >>> sum(math.prod(shape) for shape in resnet50_shapes()), len(resnet50_shapes())
    (25557032, 161)
    """
    shapes: list[tuple[int, ...]] = [*_convolution(64, 3, 7)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [*_convolution(width, channels, 1), *_convolution(width, width, 3)]
            shapes += _convolution(4 * width, width, 1)
            shapes += _convolution(4 * width, channels, 1) if block == 0 else []
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def _convolution(outputs: int, inputs: int, size: int) -> list[tuple[int, ...]]:
    """A convolution without bias and its batch normalization."""
    return [(outputs, inputs, size, size), (outputs,), (outputs,)]


def accelerated_by(reference: Any, base: torch.optim.Optimizer, history_size: int, **options: Any) -> Any:
    """The base, accelerated at every step by the reference implementation."""
    reference.accelerate(
        base,
        acceleration_type="anderson",
        relaxation=0.05,
        wait_iterations=0,
        history_depth=history_size,
        store_each_nth=1,
        frequency=1,
        **options,
    )
    return base


def take_turns(measures: Sequence[Callable[[], float]], rounds: int, warmup: int) -> list[list[float]]:
    """The results of each measure, round by round; interleaved, so that other load affects all of them equally."""
    for _ in range(warmup):
        for measure in measures:
            measure()
    return [list(column) for column in zip(*([measure() for measure in measures] for _ in range(rounds)), strict=True)]


def timed(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes."""
    start = clock()
    call()
    return clock() - start


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of time over the base's time.

    >>> ratio([2.0, 6.0, 9.0], [1.0, 2.0, 3.0])
    3.0
    """
    return median(a / b for a, b in zip(times, base, strict=True))


def difference(times: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of the time minus that of the base."""
    return median(a - b for a, b in zip(times, base, strict=True))


def jumps(optimizer: Anderson) -> int:
    """The number of accepted jumps."""
    return optimizer.stats.counts["accepted"]


def accepted(optimizer: Anderson) -> str:
    """The share of accelerations that jumped."""
    counts = optimizer.stats.counts
    total = counts["accepted"] + sum(n for name, n in counts.items() if name.startswith(("rejected_", "skipped_")))
    return f"{counts['accepted'] / total:.0%}" if total else "-"


@contextmanager
def threads(count: int) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no large model")
    parser.add_argument(
        "--reference", action=argparse.BooleanOptionalAction, default=True, help="measure AADL too, if importable"
    )
    arguments = parser.parse_args()
    reference = import_reference() if arguments.reference else None
    print(header())
    rows = small_rows(10 if arguments.quick else 60, reference)
    rows.append(groups_row(30 if arguments.quick else 100))
    if not arguments.quick:
        rows += [large_row(case, 15, reference) for case in LARGE_CASES]
    print(table(rows, COLUMNS))


def import_reference() -> Any:
    try:
        return importlib.import_module("AADL")
    except ImportError:
        return None


if __name__ == "__main__":
    main()
