"""How methods train: an optimizer with its schedule, and the weights it wants to be judged by."""

import copy
import math
from collections.abc import Callable, Iterator
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

from torch_anderson import Acceleration, Anderson

from .task import Problem, Task

LOOKAHEAD_STEPS, LOOKAHEAD_RATE = 5, 0.5
LBFGS_START = 0.25
"""Share of the run that Adam gets before L-BFGS."""


class Trainer:
    """A method at work on a model: an optimizer with its schedule, and the weights it wants to be judged by.

    A subclass says in ``step`` what one step does and what it costs: a gradient counts 1, a forward pass alone
    ``Task.forward_cost``. Batches are numbered by steps; schedules go by what was spent, so that they fit the budget.
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
        """Train on the batch of this step (from 0); returns its loss, and what the step cost."""
        self.optimizer.zero_grad()
        loss = problem.loss(step)
        loss.backward()
        self.optimizer.step()
        return loss.item(), 1

    def rate_factor(self) -> float:
        """What the schedule multiplies the learning rate by now; the task's own."""
        return self.task.rate_factor(int(self.spent))

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has the weights to be judged by.

        Evaluations are neither timed nor counted: what it costs to find these weights belongs into ``step``.
        """
        return nullcontext()

    def stats(self) -> dict[str, float]:
        """Numbers about the run that are the method's own."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """All that changes while training, for a checkpoint."""
        optimizer, schedule = self.optimizer.state_dict(), self.schedule.state_dict()
        return {"optimizer": optimizer, "schedule": schedule, "counters": [self.steps, self.spent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stopped."""
        self.steps, self.spent = state["counters"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


class AndersonTrainer(Trainer):
    """Anderson around the base, with a sample of what its accelerations were like."""

    SAMPLE_EVERY = 10
    """Condition numbers cost an eigenvalue problem each."""

    optimizer: Anderson

    def __init__(self, task: Task, model: nn.Module, optimizer: Anderson) -> None:
        super().__init__(task, model, optimizer)
        self.sample: list[tuple[float, float]] = []
        self.seen = 0
        optimizer.register_acceleration_hook(self._look)

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """As the plain step, with what a safeguard or a discrepancy may ask for; what they evaluate is paid for."""
        self.optimizer.set_batch(loss_fn=partial(problem.loss, step), outputs=self._outputs(problem, step))
        before = self.evaluations
        loss, cost = super().step(problem, step)
        return loss, cost + self.evaluation_cost * (self.evaluations - before)

    def _outputs(self, problem: Problem, step: int) -> Callable[..., Any] | None:
        """On as many batches as the task says, or as the discrepancy may choose."""
        if self.optimizer.options.discrepancy is None:
            return None
        sizes = () if self.task.most_batches > 1 else (self.task.probe_factor,)
        return partial(problem.outputs, step, *sizes)

    @property
    def evaluations(self) -> int:
        """Forward passes that Anderson has made."""
        return self.optimizer.stats.counts["extra_evaluations"]

    @property
    def evaluation_cost(self) -> float:
        """Of one of them: of a batch, or of what accelerations by the discrepancy look at."""
        return self.task.forward_cost * (self.task.probe_factor if self.optimizer.options.discrepancy else 1)

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Those that Anderson keeps for it, if it does."""
        discrepancy = self.optimizer.options.discrepancy
        keeps = discrepancy is not None and discrepancy.evaluates
        return self.optimizer.accelerated_weights(self.model) if keeps else nullcontext()

    def _look(self, acceleration: Acceleration) -> None:
        if self.seen % self.SAMPLE_EVERY == 0:
            self.sample.append((acceleration.condition_number, acceleration.gain))
        self.seen += 1

    def stats(self) -> dict[str, float]:
        """Anderson's counters, and medians over the run."""
        counts = {name: value for name, value in self.optimizer.stats.as_dict().items() if name not in PER_ACCELERATION}
        conditions, gains = zip(*self.sample, strict=True) if self.sample else ((), ())
        medians = {"condition_number": [x for x in conditions if not math.isnan(x)], "gain": gains}
        return counts | {name: median(values) for name, values in medians.items() if values}

    def state_dict(self) -> dict[str, Any]:
        """The sample too."""
        return super().state_dict() | {"sample": list(self.sample), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The sample too."""
        super().load_state_dict(state)
        self.sample, self.seen = list(state["sample"]), state["seen"]


PER_ACCELERATION = Acceleration(0, 0, 0, 0, 0, 0).as_dict().keys()


class AveragingTrainer(Trainer):
    """Trains as the base does and is judged by an average of the weights from step ``start`` on."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer, average: AveragedModel, start: int) -> None:
        super().__init__(task, model, optimizer)
        self.average, self.start = average, start

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """The base's step; then the average takes in where it led."""
        outcome = super().step(problem, step)
        if step >= self.start:
            self.average.update_parameters(self.model)
        return outcome

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The average, as soon as there is one."""
        if not self.average.n_averaged:
            yield
            return
        with swapped(self.model, list(self.average.module.parameters())):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The average too."""
        return super().state_dict() | {"average": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The average too."""
        super().load_state_dict(state)
        self.average.load_state_dict(state["average"])


class LookaheadTrainer(Trainer):
    """Slow weights that go a part of the way each time the fast ones have made some steps (Zhang et al. 2019)."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(task, model, optimizer)
        self.slow = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """The base's step; every few, both kinds of weights meet."""
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
        """The slow weights too."""
        return super().state_dict() | {"slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The slow weights too."""
        super().load_state_dict(state)
        torch._foreach_copy_(self.slow, state["slow"])


class ScheduleFreeTrainer(Trainer):
    """Schedule-free AdamW (Defazio et al. 2024), which brings its own averaging in place of a schedule."""

    optimizer: AdamWScheduleFree

    def __init__(self, task: Task, model: nn.Module, optimizer: AdamWScheduleFree) -> None:
        super().__init__(task, model, optimizer)
        optimizer.train()

    def rate_factor(self) -> float:
        """No schedule."""
        return 1.0

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Its averaged weights. The training ones come back from a copy: changing over rounds."""
        training = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer.eval()
        try:
            yield
        finally:
            self.optimizer.train()
            torch._foreach_copy_([parameter.detach() for parameter in self.model.parameters()], training)


class LBFGSTrainer(Trainer):
    """Adam first, then L-BFGS on one batch that is kept: a changing one breaks its curvature pairs."""

    EVALUATIONS = 25
    """At most so many in one call."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(task, model, optimizer)
        self.start = int(task.steps * LBFGS_START)
        self.lbfgs = torch.optim.LBFGS(
            model.parameters(), history_size=50, max_iter=20, line_search_fn="strong_wolfe", tolerance_change=0.0
        )

    def step(self, problem: Problem, step: int) -> tuple[float, float]:
        """One of Adam's, or a few iterations of L-BFGS."""
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
        """Both optimizers."""
        return super().state_dict() | {"lbfgs": self.lbfgs.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Both optimizers."""
        super().load_state_dict(state)
        self.lbfgs.load_state_dict(copy.deepcopy(state["lbfgs"]))


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
