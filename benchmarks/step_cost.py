"""Measures the cost of a step: `Anderson(base)` against `base`, and against the time to read its history once.

    python -m benchmarks.step_cost              all rows; the large model takes about 6 GB and some minutes
    python -m benchmarks.step_cost --quick      fewer repeats, no large model

All methods take turns in the same rounds, and ratios are medians over rounds. Where the reference implementation can be
imported (as `AADL`), it takes part, and its ratio is in the last column. `accepted` is the share of accelerations that
jumped.
"""

import argparse
import importlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.report import header, table
from torch_anderson import Anderson, MovingAverage

COLUMNS = ["step", "measured", "limit", "unit", "accepted", "reference"]
NEVER = 10**9
EVERY_STEP: dict[str, Any] = {"period": 1, "store_period": 1, "history_size": 10}
# The descent test rejects nearly every jump at so small a learning rate. Without tests every jump is accepted; the
# relaxation keeps them small enough not to diverge.
ACCEPTING: dict[str, Any] = {"safeguard": None, "max_jump": math.inf, "relaxation": 0.05}


class Case(NamedTuple):
    """One row about the small model."""

    name: str
    options: dict[str, Any]
    limit: float | None = None
    reference: dict[str, Any] | None = None
    """Options of the reference implementation for the same work; None if it has no such mode."""
    microseconds: bool = False


AVERAGE: dict[str, Any] = {"average": MovingAverage(10)}
CASES = [
    Case("default options", {}),
    Case("p = q = 1, residual safeguard", EVERY_STEP | {"safeguard": "residual"}),
    Case("residual_steps = 10", {"residual_steps": 10}),
    Case("every step, rejected", EVERY_STEP, 1.4, {}),
    Case("every step, accepted", EVERY_STEP | ACCEPTING, 1.4, {}),
    Case("+ average, rejected", EVERY_STEP | AVERAGE, 1.65, {"average": True}),
    Case("+ average, accepted", EVERY_STEP | ACCEPTING | AVERAGE, 1.65, {"average": True}),
    Case("nothing to do", {"period": NEVER, "store_period": NEVER}, 30.0, microseconds=True),
]


class Training:
    """The whole training step of a small network on batches of 40."""

    def __init__(self, wrap: Callable[[torch.optim.Optimizer], Any]):
        torch.manual_seed(0)
        layers = [layer for i in (7, 64, 64) for layer in (nn.Linear(i, 64), nn.ReLU())]
        self.model = nn.Sequential(*layers, nn.Linear(64, 1))
        inputs = torch.randn(400, 7)
        self.batches = list(zip(inputs.split(40), inputs.sum(1, keepdim=True).split(40), strict=True))
        self.optimizer = wrap(torch.optim.Adam(self.model.parameters(), lr=1e-5))
        self.loss = nn.MSELoss()

    def epoch(self) -> float:
        """Processor seconds per step, without other processes of the machine."""
        start = time.process_time()
        for inputs, targets in self.batches:
            self.optimizer.zero_grad()
            self.loss(self.model(inputs), targets).backward()
            self.optimizer.step()
        return (time.process_time() - start) / len(self.batches)


def small_rows(rounds: int, reference: Any) -> list[list[object]]:
    """Rows about the network of 8,897 parameters, on one thread."""
    plain = Training(lambda base: base)
    ours = [Training(partial(Anderson, **case.options)) for case in CASES]
    theirs = {
        case.name: Training(partial(accelerated_by, reference, history_size=10, **case.reference))
        for case in CASES
        if reference and case.reference is not None
    }
    with threads(1):
        times = take_turns([run.epoch for run in (plain, *ours, *theirs.values())], rounds, warmup=4)
    base, *rest = times
    references = dict(zip(theirs, rest[len(CASES) :], strict=True))
    return [
        _small_row(case, base, seconds, accepted(run.optimizer), references.get(case.name))
        for case, seconds, run in zip(CASES, rest, ours, strict=False)
    ]


def _small_row(
    case: Case, base: Sequence[float], ours: Sequence[float], share: str, theirs: Sequence[float] | None
) -> list[object]:
    measured = 1e6 * difference(ours, base) if case.microseconds else ratio(ours, base)
    unit = "us added" if case.microseconds else "x base"
    return [case.name, measured, case.limit or "-", unit, share, ratio(theirs, base) if theirs else "-"]


def large_row(rounds: int, reference: Any, history_size: int = 20) -> list[object]:
    """Row about the shapes of ResNet-50, random gradients, on two threads: added time in readings of the history."""
    shapes = resnet50_shapes()
    n = sum(math.prod(shape) for shape in shapes)
    with threads(2):
        wrapped = [Anderson(_sgd(shapes), period=1, history_size=history_size, safeguard=None)]
        base = _sgd(shapes)
        buffers = torch.randn(2, history_size, n)
        rounds_of = [lambda: timed(buffers.sum), lambda: _timed_step(base), lambda: _timed_step(wrapped[0])]
        read, plain, ours = take_turns(rounds_of, rounds, warmup=history_size + 2)
        share = accepted(wrapped.pop())
        added_by_reference: object = "-"
        if reference:
            theirs = accelerated_by(reference, _sgd(shapes), history_size)
            [seconds] = take_turns([lambda: _timed_step(theirs)], max(rounds // 3, 3), warmup=history_size + 2)
            added_by_reference = (median(seconds) - median(plain)) / median(read)
    added = median(o - p for o, p in zip(ours, plain, strict=True)) / median(read)
    return [f"ResNet-50, m = {history_size}", added, 2.0, "x reading", share, added_by_reference]


def groups_row(rounds: int, count: int = 1000) -> list[object]:
    """Row about very many groups of one tensor: added time, relative to that for one group of the same tensors."""
    with threads(1):
        apart, together = (
            [_many(count, split, wrap) for wrap in (lambda base: base, Anderson)] for split in (True, False)
        )
        steps = [partial(_timed_step, optimizer, time.process_time) for optimizer in (*apart, *together)]
        base_apart, ours_apart, base_together, ours_together = take_turns(steps, rounds, warmup=12)
    added = difference(ours_apart, base_apart) / difference(ours_together, base_together)
    return [f"{count:,} groups of one tensor", added, 2.0, "x one group", accepted(apart[1]), "-"]


def _many(count: int, split: bool, wrap: Callable[[torch.optim.Optimizer], Any]) -> Any:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3)) for _ in range(count)]
    return wrap(torch.optim.SGD([{"params": [param]} for param in params] if split else params, lr=1e-3))


def _sgd(shapes: Sequence[tuple[int, ...]]) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    return torch.optim.SGD(params, lr=1e-3)


def _timed_step(optimizer: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one step with noisy gradients of a parabola."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn_like(param).mul_(0.01).add_(param.detach())
    return timed(optimizer.step, clock)


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
        rows.append(large_row(15, reference))
    print(table(rows, COLUMNS))


def import_reference() -> Any:
    try:
        return importlib.import_module("AADL")
    except ImportError:
        return None


if __name__ == "__main__":
    main()
