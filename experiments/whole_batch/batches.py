"""Comparison of batch sizes: where the gain ends, whether the accelerator rests there, and when it jumps again.

The base alone and the accelerated base get the same batches. Losses are those of the whole data set, evaluated outside
the measured time.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

import torch_anderson

from ..arguments import available, chosen
from ..data import MissingData
from ..jobs import Race, counters
from ..methods import DESCENTS
from ..optimizers import build
from ..results import Record
from ..tasks.domains import generator as random
from .problems import BASES, PROBLEMS, Case, Problem
from .race import entries, gradient_seconds, prepared

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
class Batched(Race):
    """A base, alone or accelerated, with one batch size."""

    study: ClassVar[str] = "batches"
    holds: ClassVar[dict[str, Any]] = {"final": float, "samples": int}

    batch: int | None
    seed: int

    def measure(self) -> Record:
        """Make the run and return its numbers."""
        with prepared(PROBLEMS[self.problem], self.seed) as case:
            trainer = Trainer(self.problem, self.method, case)
            batches = islice(rows(case.samples, self.batch, self.seed), STEPS)
            losses = [trainer.train(batch, step in JUDGED) for step, batch in enumerate(batches, 1)]
            judged = [loss for loss in losses if loss is not None]
            return trainer.summary() | {"final": median(judged), "samples": case.samples}

    def estimate(self, budget: float) -> float:
        """Estimated seconds."""
        whole = gradient_seconds(self.problem)
        largest = max(size for size in SIZES[self.problem] if size)
        # Small batches have a cost that does not depend on their size.
        share = 1.0 if self.batch is None else 0.5 * self.batch / largest
        return STEPS * max(whole * share, 5e-4) + len(JUDGED) * whole


@dataclass(frozen=True)
class Ending(Race):
    """Small batches, then the whole data set: how soon the accelerator notices that the noise has ended."""

    study: ClassVar[str] = "endings"

    seed: int

    def measure(self) -> Record:
        """``first`` is the number of quiet steps up to the first accepted jump, None without one."""
        with prepared(PROBLEMS[self.problem], self.seed) as case:
            trainer = Trainer(self.problem, self.method, case)
            for batch in islice(rows(case.samples, NOISY_BATCH, self.seed), NOISY_STEPS):
                trainer.train(batch)
            noisy = trainer.accepted()
            return {"first": trainer.quiet_steps(noisy), "noisy": noisy} | trainer.summary()

    def estimate(self, budget: float) -> float:
        """Estimated seconds."""
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

    def train(self, batch: Tensor | None, judge: bool = False) -> float | None:
        """One step; returns the loss of all samples afterwards, if asked to."""
        started = time.process_time()
        self.optimizer.zero_grad()
        self.case.loss(batch).backward()
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


def plan(problems: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> list[Race]:
    """The runs of these problems and methods, or of all: the family, batch sizes, and noise that ends."""
    here, able = chosen("problem", problems, PROBLEMS), chosen("method", methods, DESCENTS)
    here, able = available(here, without_data), available(able, lambda method: method.missing)
    known, runnable = {problem.name for problem in here}, {method.name for method in able}
    smaller = [job for job in (*batched(known, seeds), *endings(known, seeds)) if job.method in runnable]
    return [*entries(here, able, seeds), *smaller]


def without_data(problem: Problem) -> str:
    """How to get the data of a problem that are not on this machine; empty if they are."""
    try:
        problem.build(0)
    except MissingData as error:
        return f"{problem.name} is left out: {error}"
    return ""


def batched(problems: Iterable[str], seeds: Iterable[int]) -> list[Batched]:
    """All runs of the study of batch sizes, seeds outermost."""
    named = [name for name in SIZES if name in set(problems)]
    return [
        Batched(problem, method, size, seed)
        for seed in seeds
        for problem in named
        for size in SIZES[problem]
        for base in BASES
        for method in (base, f"anderson-{base}")
    ]


def endings(problems: Iterable[str], seeds: Iterable[int]) -> list[Ending]:
    """All runs in which the noise ends."""
    named = [name for name in ENDING_PROBLEMS if name in set(problems)]
    return [Ending(problem, f"anderson-{base}", seed) for seed in seeds for problem in named for base in BASES]
