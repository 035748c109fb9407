"""Peers from other packages: AdamW with a cosine schedule, SOAP, Muon, and the paper's own implementation.

The packages are imported when a run needs them, as one of them takes seconds to import.
"""

import math
from collections import deque
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .task import Problem, Task
from .trainers import Trainer


class CosineTrainer(Trainer):
    """With a schedule that goes down to zero over the run along half a cosine."""

    def rate_factor(self) -> float:
        """By the share of the budget that is spent."""
        return (1 + math.cos(math.pi * min(self.spent / self.task.steps, 1.0))) / 2


def adamw_cosine(task: Task, model: nn.Module, rate: float) -> Trainer:
    """AdamW in place of the base, with its usual weight decay."""
    return CosineTrainer(task, model, torch.optim.AdamW(model.parameters(), lr=rate))


def soap(task: Task, model: nn.Module, rate: float) -> Trainer:
    """SOAP in place of the base."""
    return Trainer(task, model, soap_optimizer(task, model, rate))


def soap_optimizer(task: Task, model: nn.Module, rate: float) -> Optimizer:
    """SOAP, without weight decay as the base has none."""
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), lr=rate, weight_decay=0.0)  # type: ignore[no-any-return]


def muon(task: Task, model: nn.Module, rate: float) -> Trainer:
    """Muon in place of the base. Its steps are scaled to the size of AdamW's, so that one rate suits both parts."""
    from pytorch_optimizer import Muon

    matrices, others = split_for_muon(model)
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return Trainer(task, model, Muon(groups, lr=rate, adamw_lr=rate, use_adjusted_lr=True))


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices before the output layer, which Muon is made for; and the rest, for its AdamW part."""
    *matrices, head = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    return matrices, [head, *(parameter for parameter in model.parameters() if parameter.ndim != 2)]


def has_reference(task: Task) -> bool:
    """Whether the paper's implementation can be imported."""
    return find_spec("AADL") is not None


class ReferenceTrainer(Trainer):
    """The paper's implementation, with its safeguard: a closure for the base step and two losses a jump."""

    COUNTERS = ("acc_call_counter", "acc_store_counter")
    HISTORY = "acc_param_hist"

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

    def state_dict(self) -> dict[str, Any]:
        """The state, including the history, which it keeps outside of the optimizer's state."""
        history = [list(iterates) for iterates in getattr(self.optimizer, self.HISTORY)]
        counters = {name: getattr(self.optimizer, name) for name in self.COUNTERS}
        return super().state_dict() | {"history": history, "reference_counters": counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The history too."""
        super().load_state_dict(state)
        for name, value in state["reference_counters"].items():
            setattr(self.optimizer, name, value)
        kept: list[deque[Tensor]] = getattr(self.optimizer, self.HISTORY)
        setattr(
            self.optimizer,
            self.HISTORY,
            [deque(iterates, old.maxlen) for iterates, old in zip(state["history"], kept, strict=True)],
        )


def reference(task: Task, model: nn.Module, optimizer: Optimizer) -> Trainer:
    """The paper's implementation around the base, with the task's settings."""
    import AADL

    AADL.accelerate(
        optimizer,
        acceleration_type="anderson",
        relaxation=task.relaxation,
        history_depth=task.history_size,
        store_each_nth=task.store_period,
        frequency=task.period,
    )
    return ReferenceTrainer(task, model, optimizer)
