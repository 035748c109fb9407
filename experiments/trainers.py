"""How methods train: an optimizer with its schedule, and the weights that are evaluated."""

import copy
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from torch_anderson import Anderson, GaussNewton, JumpRecord

from .task import Problem, Task

LOOKAHEAD_STEPS, LOOKAHEAD_RATE = 5, 0.5
LBFGS_START = 0.25
"""Share of the run in which Adam trains before L-BFGS."""


class Trainer:
    """Trains a model with one method: an optimizer with its schedule, and the weights that are evaluated.

    A subclass defines in ``step`` what one step does and what it costs: a gradient counts 1, a forward pass alone
    ``Task.forward_cost``. Batches are numbered by steps; schedules depend on the cost so far, so that they fit the
    budget.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        self.task = task
        self.model = model
        self.optimizer = optimizer
        self.steps = 0
        self.spent: float = 0
        """Cost of all steps so far."""
        self.schedule = LambdaLR(optimizer, lambda _: self.rate_factor())

    def advance(self, problem: Problem) -> float:
        """Make the next step; returns the loss of its batch."""
        loss, cost = self.step(problem, self.steps)
        self.steps += 1
        self.spent += cost
        self.schedule.step()
        return loss

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """Train on the batch of this step (from 0); returns its loss, and the cost of the step."""
        self.optimizer.zero_grad()
        loss = problem.loss(step)
        loss.backward()
        self.optimizer.step()
        return loss.item(), 1

    def rate_factor(self) -> float:
        """The present factor of the learning rate by the task's schedule."""
        return self.task.rate_factor(int(self.spent))

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has the weights that are evaluated.

        Evaluations are neither timed nor counted: the cost of finding these weights belongs to ``step``.
        """
        return nullcontext()

    def stats(self) -> dict[str, float]:
        """Numbers about the run that only this method has."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes while training, for a checkpoint."""
        optimizer, schedule = self.optimizer.state_dict(), self.schedule.state_dict()
        return {"optimizer": optimizer, "schedule": schedule, "counters": [self.steps, self.spent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.steps, self.spent = state["counters"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


class AndersonTrainer(Trainer):
    """Anderson around the base, and a sample of its jumps."""

    SAMPLE_EVERY = 10
    """Jumps from one sampled to the next: each condition number costs an eigenvalue problem."""

    optimizer: Anderson

    def __init__(self, task: Task, model: nn.Module, optimizer: Anderson) -> None:
        super().__init__(task, model, optimizer)
        self.sample: list[tuple[float, float]] = []
        self.seen = 0
        optimizer.register_acceleration_hook(self._look)

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """The plain step; forward passes of ``safeguard="loss"`` are added to its cost."""
        self.optimizer.set_batch(loss_fn=partial(problem.loss, step))
        before = self.evaluations
        loss, cost = super().step(problem, step)
        return loss, cost + self.task.forward_cost * (self.evaluations - before)

    @property
    def evaluations(self) -> int:
        """Number of forward passes that the accelerator has made."""
        return self.optimizer.stats.counts["extra_evaluations"]

    def _look(self, record: JumpRecord) -> None:
        if self.seen % self.SAMPLE_EVERY == 0:
            self.sample.append((record.condition_number, record.gain))
        self.seen += 1

    def stats(self) -> dict[str, float]:
        """The accelerator's counters, and medians over the sampled jumps in place of the numbers of the latest one."""
        stats = self.optimizer.stats
        of_one_jump = stats.latest.as_dict() if stats.latest else {}
        counts = {name: value for name, value in stats.as_dict().items() if name not in of_one_jump}
        conditions, gains = zip(*self.sample, strict=True) if self.sample else ((), ())
        medians = {"condition_number": [x for x in conditions if not math.isnan(x)], "gain": gains}
        return counts | {name: median(values) for name, values in medians.items() if values}

    def state_dict(self) -> dict[str, Any]:
        """The state of training with the sample."""
        return super().state_dict() | {"sample": list(self.sample), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of training and the sample."""
        super().load_state_dict(state)
        self.sample, self.seen = list(state["sample"]), state["seen"]


class TangentTrainer(Trainer):
    """GaussNewton along the tangent, which draws points and takes gradients by itself.

    A step costs as many gradients as take the same time, because the cost of a jump depends on its rows.
    """

    GRADIENTS = 5
    """Gradients whose median time is the unit of cost."""

    optimizer: GaussNewton

    def __init__(self, task: Task, model: nn.Module, optimizer: GaussNewton) -> None:
        super().__init__(task, model, optimizer)
        self.unit = 0.0
        """Processor seconds of a gradient."""

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """Jump, or make a step of the base."""
        if not self.unit:
            self.unit = median(gradient_seconds(problem) for _ in range(self.GRADIENTS))
        begin = time.process_time()
        loss = self.optimizer.step(problem.objective)
        return float(loss), (time.process_time() - begin) / self.unit

    def stats(self) -> dict[str, float]:
        """The accelerator's counters."""
        return {name: count for name, count in self.optimizer.stats.counts.items() if count}

    def state_dict(self) -> dict[str, Any]:
        """The state, including the unit of cost."""
        return super().state_dict() | {"unit": self.unit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, including the unit of cost."""
        super().load_state_dict(state)
        self.unit = state["unit"]


class AveragingTrainer(Trainer):
    """The base, evaluated at an average of its weights from step ``start`` on."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer, average: AveragedModel, start: int) -> None:
        super().__init__(task, model, optimizer)
        self.average, self.start = average, start

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """Make the base's step and update the average."""
        outcome = super().step(problem, step)
        if step >= self.start:
            self.average.update_parameters(self.model)
        return outcome

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The evaluation weights: the average, once there is one."""
        if not self.average.n_averaged:
            yield
            return
        with swapped(self.model, list(self.average.module.parameters())):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The state, including the average."""
        return super().state_dict() | {"average": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, including the average."""
        super().load_state_dict(state)
        self.average.load_state_dict(state["average"])


class LookaheadTrainer(Trainer):
    """Slow weights that move a part of the way towards the fast ones every few steps (Zhang et al. 2019)."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(task, model, optimizer)
        self.slow = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """Make the base's step; every few steps, update the slow weights and copy them to the model."""
        outcome = super().step(problem, step)
        if (step + 1) % LOOKAHEAD_STEPS == 0:
            fast = [parameter.detach() for parameter in self.model.parameters()]
            torch._foreach_lerp_(self.slow, fast, LOOKAHEAD_RATE)
            torch._foreach_copy_(fast, self.slow)
        return outcome

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """The slow weights."""
        return swapped(self.model, self.slow)

    def state_dict(self) -> dict[str, Any]:
        """The state, including the slow weights."""
        return super().state_dict() | {"slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, including the slow weights."""
        super().load_state_dict(state)
        torch._foreach_copy_(self.slow, state["slow"])


class ScheduleFreeTrainer(Trainer):
    """Schedule-free AdamW (Defazio et al. 2024), which averages in place of a schedule."""

    optimizer: AdamWScheduleFree

    def __init__(self, task: Task, model: nn.Module, optimizer: AdamWScheduleFree) -> None:
        super().__init__(task, model, optimizer)
        optimizer.train()

    def rate_factor(self) -> float:
        """No schedule."""
        return 1.0

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The averaged weights. Those of training are restored from a copy, as converting back would round."""
        training = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer.eval()
        try:
            yield
        finally:
            self.optimizer.train()
            torch._foreach_copy_([parameter.detach() for parameter in self.model.parameters()], training)


class LBFGSTrainer(Trainer):
    """Adam first, then L-BFGS on one fixed batch: a changing batch would break its curvature pairs."""

    EVALUATIONS = 25
    """Largest number of gradients in one call."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(task, model, optimizer)
        self.start = int(task.steps * LBFGS_START)
        self.lbfgs = torch.optim.LBFGS(
            model.parameters(), history_size=50, max_iter=20, line_search_fn="strong_wolfe", tolerance_change=0.0
        )

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """One step of Adam, or a few iterations of L-BFGS."""
        if step < self.start:
            return super().step(problem, step)
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            self.lbfgs.zero_grad()
            loss = problem.loss(self.start)
            loss.backward()
            return loss

        self.lbfgs.param_groups[0]["max_eval"] = min(self.EVALUATIONS, math.ceil(self.task.steps - self.spent))
        return self.lbfgs.step(closure).item(), evaluations

    def state_dict(self) -> dict[str, Any]:
        """The state, including that of L-BFGS."""
        return super().state_dict() | {"lbfgs": self.lbfgs.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, including that of L-BFGS."""
        super().load_state_dict(state)
        self.lbfgs.load_state_dict(copy.deepcopy(state["lbfgs"]))


def gradient_seconds(problem: Problem) -> float:
    """Processor time of one gradient."""
    begin = time.process_time()
    problem.model.zero_grad()
    problem.loss(0).backward()
    return time.process_time() - begin


@contextmanager
def swapped(model: nn.Module, weights: list[Tensor]) -> Iterator[None]:
    """A context in which the model has these weights."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    kept = [parameter.clone() for parameter in parameters]
    torch._foreach_copy_(parameters, weights)
    try:
        yield
    finally:
        torch._foreach_copy_(parameters, kept)
