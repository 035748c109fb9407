"""Comparison of batch sizes: where the gain ends, whether the accelerator rests there, and when it jumps again.

The base alone and the accelerated base get the same batches. Losses are those of the whole data set, evaluated outside
the measured time.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor

import torch_anderson

from ..optimizers import build
from .problems import BASES, PROBLEMS, Case, random
from .race import Record, counters, gradient_seconds, prepared

SIZES = {
    "softmax": (None, 1024, 512, 256, 128, 64, 32),
    "mlp": (None, 1024, 512, 256, 128, 64, 32),
    "fashion": (None, 4096, 1024, 256, 64, 32),
}
"""Problem -> batch sizes; None is all samples."""
STEPS = 300
JUDGED = range(STEPS - 45, STEPS + 1, 5)
"""Steps after which the loss is evaluated; a run is judged by the median, because noise moves single losses."""
NOISY_BATCH, NOISY_STEPS, QUIET_STEPS = 64, 300, 200
ENDING_PROBLEMS = ("softmax", "mlp")


@dataclass(frozen=True)
class Batched:
    """A base, alone or accelerated, with one batch size."""

    problem: str
    method: str
    batch: int | None
    seed: int

    def make(self) -> Record:
        """Make the run."""
        with prepared(PROBLEMS[self.problem], self.seed) as case:
            trainer = Trainer(self.problem, self.method, case)
            losses = [trainer.train(rows, step in JUDGED) for step, rows in enumerate(self.batches(case), 1)]
            judged = [loss for loss in losses if loss is not None]
            return asdict(self) | trainer.summary() | {"final": median(judged), "samples": case.samples}

    def batches(self, case: Case) -> Iterator[Tensor | None]:
        """The samples of every step."""
        return islice(rows(case.samples, self.batch, self.seed), STEPS)

    def estimate(self) -> float:
        """Seconds that the run takes, about: small batches have a cost that does not depend on their size."""
        whole = gradient_seconds(self.problem)
        largest = max(size for size in SIZES[self.problem] if size)
        share = 1.0 if self.batch is None else 0.5 * self.batch / largest
        return STEPS * max(whole * share, 5e-4) + len(JUDGED) * whole


@dataclass(frozen=True)
class Ending:
    """Small batches, then the whole data set: how soon the accelerator notices that the noise has ended."""

    problem: str
    method: str
    seed: int

    def make(self) -> Record:
        """Make the run; ``first`` is the number of quiet steps up to the first accepted jump, None without one."""
        with prepared(PROBLEMS[self.problem], self.seed) as case:
            trainer = Trainer(self.problem, self.method, case)
            for chosen in islice(rows(case.samples, NOISY_BATCH, self.seed), NOISY_STEPS):
                trainer.train(chosen)
            noisy = trainer.accepted()
            return asdict(self) | {"first": trainer.quiet_steps(noisy), "noisy": noisy} | trainer.summary()

    def estimate(self) -> float:
        """Seconds that the run takes, about."""
        return NOISY_STEPS * 1e-3 + QUIET_STEPS * gradient_seconds(self.problem)


class Trainer:
    """A base, alone or accelerated, that trains on given samples."""

    def __init__(self, problem: str, method: str, case: Case) -> None:
        accelerated, _, base = method.rpartition("-")
        # The second of four rates: with the larger ones small batches are unstable.
        self.optimizer: Any = build(base, case.parameters, PROBLEMS[problem].rates[base][1])
        if accelerated:
            self.optimizer = torch_anderson.Anderson(self.optimizer)
        self.case = case
        self.seconds = 0.0

    def train(self, chosen: Tensor | None, judge: bool = False) -> float | None:
        """One step; returns the loss of all samples afterwards, if asked to."""
        started = time.process_time()
        self.optimizer.zero_grad()
        self.case.loss(chosen).backward()
        self.optimizer.step()
        self.seconds += time.process_time() - started
        if not judge:
            return None
        with torch.no_grad():
            return float(self.case.loss(None))

    def quiet_steps(self, before: int) -> int | None:
        """Steps on all samples until a jump is accepted, None if that never happens."""
        for step in range(1, QUIET_STEPS + 1):
            self.train(None)
            if self.accepted() > before:
                return step
        return None

    def accepted(self) -> int:
        """Jumps so far."""
        return int(self.optimizer.stats.counts["accepted"])

    def summary(self) -> Record:
        """What is kept of a run."""
        return {"cpu_seconds": self.seconds, "stats": counters(self.optimizer)}


def rows(samples: int, batch: int | None, seed: int) -> Iterator[Tensor | None]:
    """The samples of every step: all of them (None), or batches of one random order after the other."""
    generator = random(seed, 64)
    while True:
        if batch is None:
            yield None
        else:
            order = torch.randperm(samples, generator=generator)
            yield from order[: samples - samples % batch].split(batch)


def batched(problems: Iterable[str], seeds: Iterable[int]) -> list[Batched]:
    """All runs of the study of batch sizes, seeds outermost."""
    chosen = [name for name in SIZES if name in set(problems)]
    return [
        Batched(problem, method, size, seed)
        for seed in seeds
        for problem in chosen
        for size in SIZES[problem]
        for base in BASES
        for method in (base, f"anderson-{base}")
    ]


def endings(problems: Iterable[str], seeds: Iterable[int]) -> list[Ending]:
    """All runs in which the noise ends."""
    chosen = [name for name in ENDING_PROBLEMS if name in set(problems)]
    return [Ending(problem, f"anderson-{base}", seed) for seed in seeds for problem in chosen for base in BASES]
