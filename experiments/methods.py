"""The table of methods that are compared.

To add one, define how it trains (a ``Trainer``, or one of those in ``trainers.py`` with other options) and add a line
to ``METHODS``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_anderson import Anderson, GaussNewton

from .peers import adamw_cosine, has_reference, muon, reference, soap
from .task import Task
from .trainers import (
    AndersonTrainer,
    AveragingTrainer,
    LBFGSTrainer,
    LookaheadTrainer,
    ScheduleFreeTrainer,
    TangentTrainer,
    Trainer,
)
from .tuning import tuned_rate

NEVER = 2**62
"""A warm-up that does not end, so that only the average takes effect."""
EMA_DECAY = 0.99
SWA_START = 0.75
"""Share of the run after which stochastic weight averaging begins."""


def base(task: Task, model: nn.Module, rate: float) -> Optimizer:
    """The task's base optimizer."""
    parameters = model.parameters()
    match task.optimizer:
        case "adam":
            return torch.optim.Adam(parameters, lr=rate)
        case "nesterov":
            return torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True)
        case "sgd":
            return torch.optim.SGD(parameters, lr=rate)
    raise ValueError(f"Invalid optimizer: {task.optimizer!r}. Allowed: 'adam', 'nesterov', 'sgd'.")


def plain(task: Task, model: nn.Module, rate: float) -> Trainer:
    """The base optimizer alone."""
    return Trainer(task, model, base(task, model, rate))


def anderson(task: Task, model: nn.Module, rate: float, **options: Any) -> Trainer:
    """The paper's Anderson with the task's options, changed by those given."""
    return AndersonTrainer(task, model, Anderson(base(task, model, rate), **task.anderson_options() | options))


def anderson_default(task: Task, model: nn.Module, rate: float) -> Trainer:
    """Anderson with no option set: jumps by gradients."""
    return AndersonTrainer(task, model, Anderson(base(task, model, rate)))


def gauss_newton_tangent(task: Task, model: nn.Module, rate: float) -> Trainer:
    """GaussNewton with no option set, along the tangent."""
    return TangentTrainer(task, model, GaussNewton(base(task, model, rate)))


def ema(task: Task, model: nn.Module, rate: float) -> Trainer:
    """An exponential moving average of the weights, from the start."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    return AveragingTrainer(task, model, base(task, model, rate), average, start=0)


def swa(task: Task, model: nn.Module, rate: float) -> Trainer:
    """The mean of the weights over the last part of the run."""
    return AveragingTrainer(
        task, model, base(task, model, rate), AveragedModel(model), start=int(task.steps * SWA_START)
    )


def lookahead(task: Task, model: nn.Module, rate: float) -> Trainer:
    """Lookahead around the base."""
    return LookaheadTrainer(task, model, base(task, model, rate))


def schedule_free(task: Task, model: nn.Module, rate: float) -> Trainer:
    """Schedule-free AdamW in place of the base, without weight decay as the base has none."""
    return ScheduleFreeTrainer(task, model, AdamWScheduleFree(model.parameters(), lr=rate))


def lbfgs(task: Task, model: nn.Module, rate: float) -> Trainer:
    """The base, then L-BFGS."""
    return LBFGSTrainer(task, model, base(task, model, rate))


def aadl(task: Task, model: nn.Module, rate: float) -> Trainer:
    """The paper's own implementation around the base."""
    return reference(task, model, base(task, model, rate))


def anderson_speed(task: Task) -> float:
    """The part of the base's speed that is left with coefficients near 0: relaxation shortens 1 of ``period`` steps."""
    return 1 - (1 - task.relaxation) / task.period


def average_speed(task: Task) -> float:
    """The part of the base's speed that is left when each step starts from the mean of ``average_window`` iterates."""
    return 2 / (task.average_window + 1) if task.average_window else 1.0


def speed_of_both(task: Task) -> float:
    """The part of the base's speed that relaxation and average leave together."""
    return anderson_speed(task) * average_speed(task)


def full_speed(task: Task) -> float:
    """The base's speed."""
    return 1.0


def always(task: Task) -> bool:
    """For every task."""
    return True


def is_pinn(task: Task) -> bool:
    """For physics-informed networks."""
    return task.pinn


def averages(task: Task) -> bool:
    """Whether the average has a window."""
    return task.average_window > 0


def relaxes(task: Task) -> bool:
    """Whether Anderson makes less than the full jump."""
    return anderson_speed(task) != 1


def relaxes_and_averages(task: Task) -> bool:
    """Whether relaxation and average both slow training down."""
    return relaxes(task) and averages(task)


@dataclass(frozen=True)
class Method:
    """A method, one line of the table."""

    name: str
    """The name on the command line."""
    label: str
    """The name in figures and tables."""
    kind: str
    """paper, control, peer or ours."""
    about: str
    """One sentence."""
    make: Callable[[Task, nn.Module, float], Trainer]
    """Makes the trainer from the task's settings, a model and a learning rate."""
    speed: Callable[[Task], float] = full_speed
    """Factor of the task's learning rate."""
    tuned: bool = False
    """Whether it uses the learning rate found by ``python -m experiments tune``, if there is one."""
    applies: Callable[[Task], bool] = always
    """Whether it applies to a task, and differs from the other methods there."""

    def rate(self, task: Task, given: bool = False) -> float:
        """The initial learning rate. A rate that was ``given`` is used in place of the tuned one."""
        rate = tuned_rate(task, self.name) if self.tuned and not given else task.learning_rate
        return rate * self.speed(task)


METHODS = {
    method.name: method
    for method in (
        Method("base", "base", "paper", "The base optimizer at the paper's learning rate.", plain),
        Method("anderson", "Anderson (paper)", "paper", "With Anderson acceleration, the paper's settings.",
               partial(anderson, average=None)),
        Method("anderson+average", "Anderson + average (paper)", "paper",
               "With Anderson and the adaptive moving average.", anderson, applies=averages),
        Method("average", "average only", "control", "The moving average without Anderson.",
               partial(anderson, warmup=NEVER), applies=averages),
        Method("matched-anderson", "base, rate of Anderson", "control",
               "The base at the learning rate to which Anderson's relaxation amounts.", plain, anderson_speed,
               applies=relaxes),
        Method("matched-average", "base, rate of average", "control",
               "The base at the learning rate to which the fed-back average amounts.", plain, average_speed,
               applies=averages),
        Method("matched-anderson+average", "base, rate of both", "control",
               "The base at the learning rate to which both together amount.", plain, speed_of_both,
               applies=relaxes_and_averages),
        Method("anderson-default", "Anderson(base)", "ours", "Anderson(base) with no option set.",
               anderson_default),
        Method("gauss-newton-tangent", "GaussNewton", "ours", "GaussNewton(base) with an Objective: along the tangent.",
               gauss_newton_tangent, tuned=True, applies=is_pinn),
        Method("base-tuned", "base, tuned", "peer", "The base at a tuned learning rate.", plain, tuned=True),
        Method("ema", "EMA", "peer", f"Evaluated at an exponential moving average of the weights ({EMA_DECAY}).",
               ema, tuned=True),
        Method("swa", "SWA", "peer", "Evaluated at the mean of the weights over the last quarter.", swa, tuned=True),
        Method("lookahead", "Lookahead", "peer", "Lookahead (5 steps, half way).", lookahead, tuned=True),
        Method("schedule-free", "schedule-free AdamW", "peer", "Schedule-free AdamW, no schedule.",
               schedule_free, tuned=True),
        Method("lbfgs", "base, then L-BFGS", "peer", "A quarter of the run, then L-BFGS on one batch.",
               lbfgs, tuned=True, applies=is_pinn),
        Method("adamw-cosine", "AdamW, cosine", "peer", "AdamW, the learning rate down to 0 along a cosine.",
               adamw_cosine, tuned=True),
        Method("soap", "SOAP", "peer", "Adam in the eigenbasis of Shampoo's preconditioner.", soap, tuned=True),
        Method("muon", "Muon", "peer", "Orthogonalised momentum for matrices, AdamW for the rest.", muon, tuned=True),
        Method("aadl", "Anderson, reference code", "peer", "The paper's implementation, the paper's settings.",
               aadl, tuned=True, applies=has_reference),
    )
}  # fmt: skip
"""All methods, in the order in which they are shown."""
