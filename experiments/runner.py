"""One run: a task, a method and a seed, from the first step to the summary, through any interruption."""

import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch

from .jobs import CHECKPOINT_EVERY, Job, Outcome
from .methods import METHODS, Method
from .results import (
    CHECKPOINT,
    CONFIG,
    DIVERGED,
    FINISHED,
    METRICS,
    PICTURES,
    PROGRESS,
    SUMMARY,
    DamagedRun,
    alone_in,
    finite,
    is_complete,
    load_run,
    origin,
    run_folder,
    write_arrays,
    write_bytes,
    write_json,
)
from .screen import UserError
from .task import Metrics, Problem, Task
from .tasks import TASKS
from .trainers import Trainer

PROFILES = ("quick", "paper")
PROGRESS_EVERY = 0.5
"""Seconds."""
T = TypeVar("T")


class UnknownName(UserError, ValueError):
    """An unknown task, method, profile or setting; the message suggests similar names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        near = get_close_matches(name, known := list(known), n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(known)}."
        super().__init__(f"No {kind} is called {name!r}. {hint}")


class OtherSettings(UserError, ValueError):
    """The folder of a run contains this run with other settings."""


@dataclass(frozen=True)
class Spec(Job):
    """A run of a task, recorded step by step."""

    task: str
    method: str
    seed: int
    profile: str = "paper"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the task that differ from the profile's."""
    tensorboard: bool = False

    @property
    def variant(self) -> str:
        """The method, and what is set differently: ``anderson[history_size=5]``."""
        changes = ",".join(f"{name}={value}" for name, value in sorted(self.overrides.items()))
        return f"{self.method}[{changes}]" if changes else self.method

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes the run from others."""
        return {"task": self.task, "variant": self.variant, "seed": self.seed}

    def folder(self, results: Path) -> Path:
        """The folder for files of this run alone."""
        return run_folder(results, self.task, self.variant, self.seed)

    def is_done(self, results: Path) -> bool:
        """Whether its results are there."""
        return is_complete(self.folder(results))

    def make(self, results: Path, checkpoint_every: float = CHECKPOINT_EVERY) -> Outcome:
        """Make the run, or what is missing of it."""
        folder = self.folder(results)
        folder.mkdir(parents=True, exist_ok=True)
        with alone_in(folder):
            summary = load_run(run(self, results, checkpoint_every)).summary
        metric = TASKS[self.task].metric
        numbers = {"metric": metric, "final": summary["final"].get(metric)}
        return Outcome(self, summary["status"], numbers, summary["seconds"])

    def estimate(self, budget: float = 0.4) -> float:
        """Estimated processor seconds, from the first steps; takes about ``budget`` seconds."""
        with isolated():
            training = Training(self.resolve(), METHODS[self.method], self.seed, self.rate)
            for _ in range(2):
                training.advance()
            first, started = training.step, time.process_time()
            while time.process_time() - started < budget and not training.outcome:
                training.advance()
            spent = time.process_time() - started
        return spent * training.task.steps / max(training.step - first, 1)

    def resolve(self) -> Task:
        """The task with all its settings; raises ``UnknownName``, or ``ValueError`` for a wrong value."""
        task = named("task", self.task, TASKS)
        named("method", self.method, METHODS)
        if self.profile not in PROFILES:
            raise UnknownName("profile", self.profile, PROFILES)
        for name in self.overrides:
            named(f"setting of {self.task}", name, {setting.name: setting for setting in fields(task)})
        quick = task.quick if self.profile == "quick" else {}
        return task(**{**quick, **self.overrides})

    @property
    def rate(self) -> float:
        """The learning rate that the run starts with."""
        return METHODS[self.method].rate(self.resolve(), given="learning_rate" in self.overrides)


def named(kind: str, name: str, table: Mapping[str, T]) -> T:
    """An entry of a table; raises ``UnknownName``."""
    if name not in table:
        raise UnknownName(kind, name, table)
    return table[name]


class Training:
    """A run under way."""

    def __init__(self, task: Task, method: Method, seed: int, rate: float | None = None) -> None:
        torch.manual_seed(seed)
        self.problem: Problem = task.start(seed)
        self.trainer: Trainer = method.make(task, self.problem.model, method.rate(task) if rate is None else rate)
        self.task = task
        self.rows: list[dict[str, float]] = []
        self.seconds = self.cpu_seconds = 0.0
        self.outcome = ""
        """How it ended; empty while it is running."""

    @property
    def step(self) -> float:
        """The cost of the steps so far: their number, if each is one gradient."""
        spent = self.trainer.spent
        return int(spent) if spent == int(spent) else spent

    def advance(self) -> None:
        """Make one step of the method, record it, evaluate if due, and detect the end."""
        wall, cpu = time.perf_counter(), time.process_time()
        before = self.step
        loss = self.trainer.advance(self.problem)
        self.seconds += time.perf_counter() - wall
        self.cpu_seconds += time.process_time() - cpu
        due = self.step // self.task.evaluate_every > before // self.task.evaluate_every
        if not math.isfinite(loss):
            self.outcome = DIVERGED
        elif self.step >= self.task.steps or loss < self.task.tol:
            self.outcome = FINISHED
        row = {"step": self.step, "seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "loss": loss}
        self.rows.append(row | self.evaluate() if due or self.outcome else row)

    def evaluate(self) -> Metrics:
        """The metrics at the evaluation weights of the method; metrics that are not finite end the run."""
        with self.trainer.evaluation_weights(), torch.no_grad():
            metrics = self.problem.evaluate()
        if not all(map(math.isfinite, metrics.values())):
            self.outcome = DIVERGED
        return metrics

    def summary(self) -> dict[str, Any]:
        """How it ended."""
        evaluated = [row for row in self.rows if self.task.metric in row and math.isfinite(row[self.task.metric])]
        best = min(evaluated, key=lambda row: row[self.task.metric], default={})
        final = {name: self.rows[-1].get(name) for name in self.task.metrics}
        with torch.no_grad():
            references = self.problem.references()
        return {
            "status": self.outcome,
            "steps": self.step,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "final": final,
            "best": {name: best.get(name) for name in ("step", *self.task.metrics)},
            "references": references,
            "training_loss": self.training_loss(),
            "stats": self.trainer.stats(),
        }

    @torch.no_grad()
    def training_loss(self) -> float:
        """The loss on the batch of the first step, which is the same for all methods, at the evaluation weights."""
        with self.trainer.evaluation_weights():
            return self.problem.loss(0).item()

    def state_dict(self) -> dict[str, Any]:
        """The state from which the run can be resumed bit for bit."""
        objective = self.problem.objective
        return {
            "model": self.problem.model.state_dict(),
            "objective": objective.state_dict() if objective else None,
            "trainer": self.trainer.state_dict(),
            "random": torch.get_rng_state(),
            "seconds": [self.seconds, self.cpu_seconds],
            "rows": self.rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stopped."""
        self.problem.model.load_state_dict(state["model"])
        if self.problem.objective:
            self.problem.objective.load_state_dict(state["objective"])
        self.trainer.load_state_dict(state["trainer"])
        torch.set_rng_state(state["random"])
        self.seconds, self.cpu_seconds = state["seconds"]
        self.rows = state["rows"]


def run(spec: Spec, results: Path, checkpoint_every: float = CHECKPOINT_EVERY) -> Path:
    """Make a run, or the rest of it, below a results folder; returns the folder of the run."""
    task, method = spec.resolve(), METHODS[spec.method]
    folder, config = spec.folder(results), describe(spec, task)
    if is_complete(folder):
        check_same(folder, config)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with isolated():
        training = Training(task, method, spec.seed, spec.rate)
        resume(training, folder, config)
        write_json(folder / CONFIG, config)
        with observer(spec, folder) as observe:
            train(training, folder, config, checkpoint_every, observe)
        finish(training, folder, config)
    return folder


def train(training: Training, folder: Path, config: Mapping[str, Any], checkpoint_every: float, observe: Any) -> None:
    """Step until the end; leave a sign of life twice a second and a checkpoint every minute or so."""
    told = saved = time.monotonic()
    while not training.outcome:
        training.advance()
        observe(training.rows[-1])
        now = time.monotonic()
        if now - told >= PROGRESS_EVERY:
            told = now
            sign = {"step": training.step, "steps": training.task.steps, "seconds": training.seconds}
            write_json(folder / PROGRESS, sign | {"loss": training.rows[-1]["loss"]})
        if now - saved >= checkpoint_every:
            saved = now
            buffer = io.BytesIO()
            torch.save(training.state_dict() | {"identity": identity(config)}, buffer)
            write_bytes(folder / CHECKPOINT, buffer.getvalue())


def finish(training: Training, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the results, the summary last: with it the run is complete."""
    lines = (json.dumps(finite(row)) for row in training.rows)
    write_bytes(folder / METRICS, ("\n".join(lines) + "\n").encode())
    with training.trainer.evaluation_weights(), torch.no_grad():
        if pictures := training.problem.pictures():
            write_arrays(folder / PICTURES, pictures)
    write_json(folder / SUMMARY, training.summary() | {"learning_rate": config["learning_rate"]})
    for name in (CHECKPOINT, PROGRESS):
        (folder / name).unlink(missing_ok=True)


def resume(training: Training, folder: Path, config: Mapping[str, Any]) -> None:
    """Continue from the checkpoint of this run in the folder, if there is one; raises ``DamagedRun``."""
    path = folder / CHECKPOINT
    if not path.exists():
        return
    try:
        state = torch.load(path, weights_only=True)
        if state["identity"] == identity(config):
            training.load_state_dict(state)
    except Exception as error:  # there is no end to what unpickling and loading may raise
        message = str(error).partition("\n")[0]  # without the advice to programmers that PyTorch appends
        raise DamagedRun(f"{path}: cannot be resumed ({type(error).__name__}: {message})") from error


def describe(spec: Spec, task: Task) -> dict[str, Any]:
    """The configuration of a run: settings, versions, hardware."""
    return {
        "task": spec.task,
        "method": spec.method,
        "variant": spec.variant,
        "seed": spec.seed,
        "profile": spec.profile,
        "settings": finite(asdict(task)),
        "overrides": finite(dict(spec.overrides)),
        "learning_rate": spec.rate,
        **origin(),
    }


def identity(config: Mapping[str, Any]) -> str:
    """The part of a configuration that identifies a run."""
    return json.dumps([config[key] for key in ("task", "method", "seed", "settings", "learning_rate")], sort_keys=True)


def check_same(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse to take one run for another; raises ``OtherSettings``."""
    kept = dict(load_run(folder).config)
    # A setting that the library got later had its default then.
    kept["settings"] = {**defaults(config["task"]), **kept["settings"]}
    if identity(kept) == identity(config):
        return
    differing = [name for name, value in config["settings"].items() if kept["settings"].get(name) != value]
    raise OtherSettings(
        f"{folder} holds this run with other settings ({', '.join(differing) or 'another learning rate'}). "
        "Give another folder with --results, or delete that one."
    )


def defaults(task: str) -> dict[str, Any]:
    """The settings of a task that have a default."""
    return {setting.name: setting.default for setting in fields(TASKS[task]) if setting.default is not MISSING}


@contextmanager
def observer(spec: Spec, folder: Path) -> Iterator[Any]:
    """A function that is shown each row, and passes evaluations on to TensorBoard if asked to."""
    if not spec.tensorboard:
        yield lambda row: None
        return
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def write(row: Mapping[str, float]) -> None:
            for name in row.keys() - {"step", "seconds", "cpu_seconds"}:
                writer.add_scalar(name, row[name], int(row["step"]))

        yield write


@contextmanager
def isolated() -> Iterator[None]:
    """A context with separate random numbers and one thread.

    With one thread, runs side by side do not compete, and the order of sums does not depend on the machine's cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
