"""How methods train on tasks: an optimizer with its schedule, and the weights that are evaluated."""

import copy
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, ClassVar

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

    kept: ClassVar[tuple[str, ...]] = ()
    """Attributes that belong to a checkpoint, besides those of every trainer."""

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
        state: dict[str, Any] = {"counters": [self.steps, self.spent]}
        for name in ("optimizer", "schedule", *self.kept):
            value = getattr(self, name)
            state[name] = value.state_dict() if hasattr(value, "state_dict") else copy.deepcopy(value)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.steps, self.spent = state["counters"]
        for name in ("optimizer", "schedule", *self.kept):
            value, saved = getattr(self, name), copy.deepcopy(state[name])
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                setattr(self, name, saved)


class CosineTrainer(Trainer):
    """With a schedule that goes down to zero over the run along half a cosine."""

    def rate_factor(self) -> float:
        """By the share of the budget that is spent."""
        return (1 + math.cos(math.pi * min(self.spent / self.task.steps, 1.0))) / 2


class AndersonTrainer(Trainer):
    """Anderson around the base, and a sample of its jumps."""

    SAMPLE_EVERY = 10
    """Jumps from one sampled to the next: each condition number costs an eigenvalue problem."""
    kept = ("sample", "seen")

    optimizer: Anderson

    def __init__(self, task: Task, model: nn.Module, optimizer: Anderson) -> None:
        super().__init__(task, model, optimizer)
        self.sample: list[tuple[float, float]] = []
        self.seen = 0
        optimizer.register_acceleration_hook(self._look)

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """The plain step; forward passes of ``safeguard="loss"`` are added to its cost."""
        self.optimizer.set_batch(loss_fn=partial(problem.loss, step))
        before = self.optimizer.stats.counts["extra_evaluations"]
        loss, cost = super().step(problem, step)
        return loss, cost + self.task.forward_cost * (self.optimizer.stats.counts["extra_evaluations"] - before)

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


class TangentTrainer(Trainer):
    """GaussNewton along the tangent, which draws points and takes gradients by itself.

    A step costs as many gradients as take the same time, because the cost of a jump depends on its rows.
    """

    GRADIENTS = 5
    """Gradients whose median time is the unit of cost."""
    kept = ("unit",)

    optimizer: GaussNewton
    unit = 0.0
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


class AveragingTrainer(Trainer):
    """The base, evaluated at an average of its weights from step ``start`` on."""

    kept = ("average",)

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer, average: AveragedModel, start: int) -> None:
        super().__init__(task, model, optimizer)
        self.average, self.start = average, start

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """Make the base's step and update the average."""
        outcome = super().step(problem, step)
        if step >= self.start:
            self.average.update_parameters(self.model)
        return outcome

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """The evaluation weights: the average, once there is one."""
        return swapped(self.model, list(self.average.module.parameters())) if self.average.n_averaged else nullcontext()


class LookaheadTrainer(Trainer):
    """Slow weights that move a part of the way towards the fast ones every few steps (Zhang et al. 2019)."""

    kept = ("slow",)

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
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        with swapped(self.model, parameters):
            self.optimizer.eval()
            try:
                yield
            finally:
                self.optimizer.train()


class LBFGSTrainer(Trainer):
    """Adam first, then L-BFGS on one fixed batch: a changing batch would break its curvature pairs."""

    EVALUATIONS = 25
    """Largest number of gradients in one call."""
    kept = ("lbfgs",)

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


class ReferenceTrainer(Trainer):
    """The paper's implementation, with its safeguard: a closure for the base step and two losses a jump.

    It keeps its history outside of the optimizer's state.
    """

    COUNTERS = ("acc_call_counter", "acc_store_counter")
    HISTORY = "acc_param_hist"
    kept = ("memory",)

    @property
    def memory(self) -> dict[str, Any]:
        """The history and the counters."""
        counters = {name: getattr(self.optimizer, name) for name in self.COUNTERS}
        return counters | {self.HISTORY: [list(iterates) for iterates in getattr(self.optimizer, self.HISTORY)]}

    @memory.setter
    def memory(self, saved: dict[str, Any]) -> None:
        lengths = [iterates.maxlen for iterates in getattr(self.optimizer, self.HISTORY)]
        history = [deque(iterates, length) for iterates, length in zip(saved[self.HISTORY], lengths, strict=True)]
        for name, value in (saved | {self.HISTORY: history}).items():
            setattr(self.optimizer, name, value)

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """It calls the closure with gradients for the base's step, and without for the losses it compares."""
        losses: list[float] = []
        cost = 0.0

        def closure() -> float:
            nonlocal cost
            loss = problem.loss(step)
            losses.append(loss.item())
            cost += 1 if torch.is_grad_enabled() else self.task.forward_cost
            if torch.is_grad_enabled():
                self.optimizer.zero_grad()
                loss.backward()
            return losses[-1]

        self.optimizer.step(closure)
        return losses[0], cost


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
