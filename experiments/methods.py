"""The methods that are compared: one table, from which every study selects.

To add one, define how it trains (a ``Trainer`` for tasks; a loop of ``solvers`` for equations and whole batches) and
add an entry to ``REGISTRY``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_anderson import Anderson, GaussNewton

from . import optimizers
from .optimizers import LABELS
from .solvers import loops, quasi_newton
from .solvers.levenberg_marquardt import PACKAGE, levenberg_marquardt
from .solvers.loops import Closures, Wrapper
from .task import Task
from .trainers import (
    AndersonTrainer,
    AveragingTrainer,
    CosineTrainer,
    LBFGSTrainer,
    LookaheadTrainer,
    ReferenceTrainer,
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
SOLVER_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
"""Learning rates that Adam and SOAP are tried with on equations."""
BATCH = 128
"""Rows of a batch on regressions, where there are batches."""
LBFGS_HISTORIES = (10, 100)
AADL = "AADL"
"""The module of the paper's own implementation."""
Make = Callable[[Task, nn.Module, float], Trainer]


# How they train on tasks


def base(task: Task, model: nn.Module, rate: float) -> Optimizer:
    """The task's base optimizer."""
    return optimizers.build(task.optimizer, model.parameters(), rate)


def around_base(trainer: type[Trainer], wrap: Wrapper = loops.unwrapped) -> Make:
    """Trains with the base, or with what is wrapped around it."""
    return lambda task, model, rate: trainer(task, model, wrap(base(task, model, rate)))


plain = around_base(Trainer)


def instead(trainer: type[Trainer], optimizer: Callable[..., Optimizer]) -> Make:
    """Trains with another optimizer in place of the base."""
    return lambda task, model, rate: trainer(task, model, optimizer(model.parameters(), lr=rate))


def anderson(task: Task, model: nn.Module, rate: float, **options: Any) -> Trainer:
    """The paper's Anderson with the task's options, changed by those given."""
    return AndersonTrainer(task, model, Anderson(base(task, model, rate), **task.anderson_options() | options))


def ema(task: Task, model: nn.Module, rate: float) -> Trainer:
    """An exponential moving average of the weights, from the start."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    return AveragingTrainer(task, model, base(task, model, rate), average, start=0)


def swa(task: Task, model: nn.Module, rate: float) -> Trainer:
    """The mean of the weights over the last part of the run."""
    start = int(task.steps * SWA_START)
    return AveragingTrainer(task, model, base(task, model, rate), AveragedModel(model), start)


def aadl(task: Task, model: nn.Module, rate: float) -> Trainer:
    """The paper's implementation around the base, with the task's settings."""
    settings = {"history_depth": task.history_size, "store_each_nth": task.store_period, "frequency": task.period}
    accelerated = optimizers.accelerate(base(task, model, rate), relaxation=task.relaxation, **settings)
    return ReferenceTrainer(task, model, accelerated)


def anderson_speed(task: Task) -> float:
    """The part of the base's speed that is left with coefficients near 0: relaxation shortens 1 of ``period`` steps."""
    return 1 - (1 - task.relaxation) / task.period


def average_speed(task: Task) -> float:
    """The part of the base's speed that is left when each step starts from the mean of ``average_window`` iterates."""
    return 2 / (task.average_window + 1) if task.average_window else 1.0


def is_pinn(task: Task) -> bool:
    """For physics-informed networks."""
    return task.pinn


def averages(task: Task) -> bool:
    """Whether the average has a window."""
    return task.average_window > 0


def relaxes(task: Task) -> bool:
    """Whether Anderson makes less than the full jump."""
    return anderson_speed(task) != 1


def absent(*arguments: Any) -> Any:
    """Stands for a study in which a method takes no part."""
    raise TypeError("This method takes no part in this study.")


@dataclass(frozen=True)
class Method:
    """A method: an entry of the table. It takes part in the studies that it says how to train for."""

    name: str
    """The name on the command line."""
    label: str
    """The name in figures and tables."""
    kind: str = "peer"
    """paper, control, peer or ours."""
    about: str = ""
    """One sentence."""
    make: Make = absent
    """For tasks: makes the trainer from the task's settings, a model and a learning rate."""
    solve: Callable[[Any, float], None] = absent
    """For equations: trains on a clock at a learning rate until the time is spent."""
    descend: Callable[[Any, float], None] = absent
    """For whole batches: trains on a meter at a learning rate until the gradients are spent."""
    applies: Callable[[Any], bool] = lambda problem: True
    """Whether it applies to a task or an equation, and differs from the other methods there."""
    needs: tuple[str, ...] = ()
    """Modules that must be importable."""
    speed: Callable[[Task], float] = lambda task: 1.0
    """Factor of the task's learning rate."""
    tuned: bool = False
    """Whether it uses the learning rate found by ``python -m experiments tune``, if there is one."""
    rates: tuple[float | None, ...] = (None,)
    """Learning rates to try on equations."""
    base: str | None = None
    """The base whose rates apply to whole batches; None for methods without a learning rate."""
    family: str = ""
    """Methods of one family are variants, of which the best is reported as the tuned one."""
    scheduled: bool = False
    """Whether the first part of a long run differs from a short run."""

    @property
    def ours(self) -> bool:
        """Whether the library is what it tests."""
        return self.kind == "ours"

    @property
    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        return optimizers.missing(self.label, self.needs)

    def rate(self, task: Task, given: bool = False) -> float:
        """The initial learning rate on a task. A rate that was ``given`` is used in place of the tuned one."""
        rate = tuned_rate(task, self.name) if self.tuned and not given else task.learning_rate
        return rate * self.speed(task)


# The table


def for_tasks() -> Iterator[Method]:
    """Methods for tasks, which have a schedule and can be resumed."""
    yield from (
        Method("base", "base", "paper", "The base optimizer at the paper's learning rate.", plain),
        Method("anderson", "Anderson (paper)", "paper", "With Anderson acceleration, the paper's settings.",
               partial(anderson, average=None)),
        Method("anderson+average", "Anderson + average (paper)", "paper",
               "With Anderson and the adaptive moving average.", anderson, applies=averages),
        Method("average", "average only", "control", "The moving average without Anderson.",
               partial(anderson, warmup=NEVER), applies=averages),
        Method("matched-anderson", "base, rate of Anderson", "control",
               "The base at the learning rate to which Anderson's relaxation amounts.", plain, speed=anderson_speed,
               applies=relaxes),
        Method("matched-average", "base, rate of average", "control",
               "The base at the learning rate to which the fed-back average amounts.", plain, speed=average_speed,
               applies=averages),
        Method("matched-anderson+average", "base, rate of both", "control",
               "The base at the learning rate to which both together amount.", plain,
               speed=lambda task: anderson_speed(task) * average_speed(task),
               applies=lambda task: relaxes(task) and averages(task)),
        Method("anderson-default", "Anderson(base)", "ours", "Anderson(base) with no option set.",
               around_base(AndersonTrainer, Anderson)),
        Method("gauss-newton-tangent", "GaussNewton", "ours", "GaussNewton(base) with an Objective: along the tangent.",
               around_base(TangentTrainer, GaussNewton), tuned=True, applies=is_pinn),
        Method("base-tuned", "base, tuned", "peer", "The base at a tuned learning rate.", plain, tuned=True),
        Method("ema", "EMA", "peer", f"Evaluated at an exponential moving average of the weights ({EMA_DECAY}).",
               ema, tuned=True),
        Method("swa", "SWA", "peer", "Evaluated at the mean of the weights over the last quarter.", swa, tuned=True),
        Method("lookahead", "Lookahead", "peer", "Lookahead (5 steps, half way).", around_base(LookaheadTrainer),
               tuned=True),
        Method("schedule-free", "schedule-free AdamW", "peer", "Schedule-free AdamW, no schedule.",
               instead(ScheduleFreeTrainer, AdamWScheduleFree), tuned=True),
        Method("lbfgs", "base, then L-BFGS", "peer", "A quarter of the run, then L-BFGS on one batch.",
               around_base(LBFGSTrainer), tuned=True, applies=is_pinn),
        Method("adamw-cosine", "AdamW, cosine", "peer", "AdamW, the learning rate down to 0 along a cosine.",
               instead(CosineTrainer, torch.optim.AdamW), tuned=True),
        Method("muon", "Muon", "peer", "Orthogonalised momentum for matrices, AdamW for the rest.",
               lambda task, model, rate: Trainer(task, model, optimizers.muon(model, rate)), tuned=True),
        Method("aadl", "Anderson, reference code", "peer", "The paper's implementation, the paper's settings.",
               aadl, tuned=True, applies=lambda task: find_spec(AADL) is not None),
    )  # fmt: skip


def variants(name: str, label: str, **other: Any) -> Iterator[Method]:
    """Adam or SOAP on equations at several rates: constant, and with a cosine schedule, on several kinds of losses."""
    kinds: list[tuple[str, str, Closures, Callable[[Any], bool]]] = [
        ("cosine", "cosine", loops.usual_closures, lambda problem: True),
        ("retain", "cosine, retained points", partial(loops.objective_closures, retain=True),
         lambda problem: problem.drawn),
        ("traced", "cosine, traced residuals", loops.traced_closures, lambda problem: problem.traceable),
        ("batches", f"cosine, batches of {BATCH}", partial(loops.data_closures, batch=BATCH),
         lambda problem: problem.data),
    ]  # fmt: skip
    shared: dict[str, Any] = {"rates": SOLVER_RATES, "family": name}
    yield Method(name, label, solve=partial(loops.first_order, name, loops.usual_closures), **shared, **other)
    for suffix, words, closures, applies in kinds:
        solve = partial(loops.first_order, name, closures, cosine=True)
        yield Method(
            f"{name}-{suffix}", f"{label}, {words}", solve=solve, applies=applies, scheduled=True, **shared
        )  # fmt: skip


def for_equations() -> Iterator[Method]:
    """Methods that solve equations, and the bases, which whole batches are trained with too.

    Those with traced losses are left out where tracing the loss crashes torch.
    """
    for name, label, rate in (("adam", "Adam", 1e-3), ("soap", "SOAP", 3e-3)):  # rates that were not tuned
        solve = partial(loops.gauss_newton, name)
        yield Method(f"gauss-newton-{name}", f"GaussNewton({label})", "ours", solve=solve, rates=(rate,))
    for name, label in LABELS.items():
        bare: dict[str, Any] = {"base": name, "descend": partial(loops.stepwise, name, loops.unwrapped)}
        yield from variants(name, label, **bare) if name == "adam" else [Method(name, label, **bare)]
    yield from variants(
        "soap", "SOAP", about="Adam in the eigenbasis of Shampoo's preconditioner.", tuned=True,
        make=lambda task, model, rate: Trainer(task, model, optimizers.soap(model.parameters(), rate)),
    )  # fmt: skip
    for name, label, run in (
        ("adam-lbfgs", "Adam, then L-BFGS", quasi_newton.lbfgs),
        ("ssbroyden", "Adam, then self-scaled Broyden", quasi_newton.ssbroyden),
    ):
        yield Method(name, label, solve=run, applies=lambda problem: not problem.crashes)
    yield Method("levenberg-marquardt", "torch-levenberg-marquardt", solve=levenberg_marquardt, needs=(PACKAGE,))


def anderson_methods(wrapper: Wrapper = Anderson) -> Iterator[Method]:
    """Anderson on each base, or another ``wrapper`` in its place."""
    for base, label in LABELS.items():
        descend = partial(loops.stepwise, base, wrapper)
        yield Method(f"anderson-{base}", f"Anderson({label})", "ours", descend=descend, base=base)


def for_whole_batches() -> Iterator[Method]:
    """Methods whose gradients are counted, besides the bases."""
    yield from anderson_methods()
    for history in LBFGS_HISTORIES:
        yield Method(f"lbfgs-{history}", f"L-BFGS, history {history}", descend=partial(loops.lbfgs, history))
    yield Method("cg", "nonlinear CG", descend=loops.conjugate_gradients)
    for base, label in LABELS.items():
        yield Method(
            f"aadl-{base}", f"AADL({label})", descend=partial(loops.reference, base), base=base, needs=(AADL,)
        )  # fmt: skip


REGISTRY = {method.name: method for method in (*for_tasks(), *for_equations(), *for_whole_batches())}
"""All methods, in the order in which they are shown."""
METHODS = {name: method for name, method in REGISTRY.items() if method.make is not absent}
"""Those for tasks."""
SOLVERS = {name: method for name, method in REGISTRY.items() if method.solve is not absent}
"""Those for equations."""
DESCENTS = {name: method for name, method in REGISTRY.items() if method.descend is not absent}
"""Those for whole batches."""


def wrapped_in(wrapper: Wrapper) -> dict[str, Method]:
    """Those for whole batches with another ``wrapper`` in the place of ``Anderson``, or with other options of it."""
    return DESCENTS | {method.name: method for method in anderson_methods(wrapper)}
