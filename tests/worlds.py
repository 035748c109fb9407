"""What the random sequences train: a model of 27 weights with its optimizer, which can be copied and resumed."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau
from training import GroupCounter, ListState

from torch_anderson import GaussNewton, Objective, Term

BASES: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.03, momentum=0.9),
    "adam": partial(optim.Adam, lr=0.02),
    "adamw": partial(optim.AdamW, lr=0.02, foreach=True),
    "adagrad": partial(optim.Adagrad, lr=0.05),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.5),
    "lbfgs": partial(optim.LBFGS, lr=0.2, max_iter=2, history_size=3),
    "list_state": ListState,
    "group_counter": GroupCounter,
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "staircase": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=12),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=1000, cycle_momentum=False),
    "plateau": partial(ReduceLROnPlateau, patience=1, factor=0.7),
}
BATCHES = 64


class Model(nn.Module):
    """Two layers, and parameters that are in the loss from the start but join an optimizer later."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 3)
        self.late = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(0.5 * torch.randn(param.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def parts(self) -> list[list[nn.Parameter]]:
        """Parameters that are frozen, or join and leave an optimizer, together."""
        return [list(self.first.parameters()), list(self.second.parameters()), *([param] for param in self.late)]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.weight.dtype


@cache
def batch(i: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and classes: mostly the same problem, with a little that changes from batch to batch."""
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 100 + i)]
    x, change = (torch.randn(8, 2, generator=generator, dtype=torch.float64) for generator in generators)
    x = x + 0.05 * change
    y = torch.stack([x.sin().sum(1), x.cos().sum(1), x.prod(1)], dim=1)
    return x.to(dtype), y.to(dtype), y.argmax(1)


def log_cosh(prediction: Tensor, target: Tensor) -> Tensor:
    """A convex function of the predictions with bounded slopes."""
    error = prediction - target
    return (error.abs() + torch.log1p((-2 * error.abs()).exp())).mean()


def objective_of(model: Model) -> Objective:
    """The squares of the first batch, and of the late parameters."""
    x, y, _ = batch(0, model.dtype)

    def late(u: Any, x: Tensor) -> Tensor:
        return torch.cat(list(model.late)) + 0 * u(x).sum()

    return Objective(model, fit=Term(lambda u, x, y: u(x) - y, (x, y)), late=Term(late, x[:1]))


@dataclass(frozen=True)
class Recipe:
    """How an optimizer is built."""

    base: str
    accelerator: type[optim.Optimizer]
    options: dict[str, Any]

    def base_of(self, groups: list[dict[str, Any]]) -> optim.Optimizer:
        return BASES[self.base](groups)

    def optimizer_of(self, groups: list[dict[str, Any]]) -> optim.Optimizer:
        return self.accelerator(self.base_of(groups), **self.options)

    # What PyTorch's own cannot do.

    @property
    def takes_groups(self) -> bool:
        return self.base != "lbfgs"

    @property
    def takes_copies(self) -> bool:
        return self.base != "lbfgs"

    @property
    def leaves_idle(self) -> bool:
        """LBFGS moves all parameters along its direction, with gradient or without, and so do jumps."""
        return self.base != "lbfgs" and not self.jumps_by_rows

    @property
    def jumps_by_rows(self) -> bool:
        return issubclass(self.accelerator, GaussNewton)


@dataclass
class World:
    """A training run."""

    recipe: Recipe
    model: Model
    optimizer: Any
    steps: int = 0
    schedule: str = ""
    scheduler: Any = field(default=None)
    objectives: dict[str, Objective] = field(default_factory=dict)

    def loss(self, i: int) -> Tensor:
        if self.recipe.jumps_by_rows:
            return self.objective().draw().loss()
        x, y, _ = batch(i % BATCHES, self.model.dtype)
        late = sum(torch.cosh(param.clamp(-5, 5)).sum() for param in self.model.late)
        return log_cosh(self.model(x), y) + 0.1 * late

    def objective(self) -> Objective:
        """That of the model, made anew where the model or its type is another one."""
        known = self.objectives.get("now")
        if known is None or known.model is not self.model or known.terms["late"].samples[0].dtype != self.model.dtype:
            self.objectives["now"] = objective_of(self.model)
        return self.objectives["now"]

    def step(self, gradients: str = "true", closure: bool = True, given: str = "with the step") -> None:
        """One step of the optimizer and of the scheduler, with gradients as named in ``SPOILED``."""
        i = self.steps
        torch.manual_seed(i)  # GaussNewton shuffles samples
        rows = self.recipe.jumps_by_rows
        context: dict[str, Any] = {"objective": self.objective()} if rows else {"loss_fn": partial(self.loss, i)}
        if given == "ahead" or (rows and given == "with the step" and isinstance(self.optimizer, GaussNewton)):
            self.optimizer.set_batch(**context)
        arguments = context if given == "with the step" and not rows else {}
        evaluate = partial(self.evaluate, i, gradients)
        if closure or self.recipe.base == "lbfgs":
            loss = self.optimizer.step(evaluate, **arguments)
        else:
            loss = evaluate()
            self.optimizer.step(**arguments)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss.item())
        elif self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1

    def evaluate(self, i: int, gradients: str) -> Tensor:
        self.model.zero_grad()
        loss = self.loss(i)
        if loss.requires_grad:
            loss.backward()
        SPOILED[gradients]([param for param in self.model.parameters() if param.grad is not None])
        return loss.detach()

    def attach(self, schedule: str, to_base: bool = False) -> None:
        """A scheduler of the optimizer, or of its base, or none."""
        self.schedule = schedule
        # OneCycle leaves its own numbers in the groups.
        self.scheduler = SCHEDULERS[schedule](self.optimizer.base if to_base else self.optimizer) if schedule else None

    def groups(self, model: Model) -> list[dict[str, Any]]:
        """The present groups, with the parameters of another model."""
        there = dict(zip(self.model.parameters(), model.parameters(), strict=True))
        return [
            {"params": [there[param] for param in group["params"]], "anderson": group.get("anderson", True)}
            for group in self.optimizer.param_groups
        ]

    def has_layers_without(self, which: int) -> bool:
        """Whether another group than this one has parameters of the layers."""
        first, second, *_ = self.model.parts()
        groups = [group for i, group in enumerate(self.optimizer.param_groups) if i != which]
        return any(param in {*first, *second} for group in groups for param in group["params"])

    # Copies

    def like(self, model: Model, optimizer: Any) -> "World":
        """This run, to be continued by another model and optimizer."""
        other = replace(self, model=model, optimizer=optimizer, schedule="", scheduler=None, objectives={})
        if self.scheduler is not None:
            rates = [group["lr"] for group in optimizer.param_groups]
            other.attach(self.schedule)
            other.scheduler.load_state_dict(copy.deepcopy(self.scheduler.state_dict()))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # a new scheduler sets it
        return other

    def resumed(self, weights_first: bool = True) -> "World":
        """A new instance from a file, which holds nothing but tensors and numbers."""
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        model = Model().to(self.model.dtype)
        for param, other in zip(self.model.parameters(), model.parameters(), strict=True):
            other.requires_grad_(param.requires_grad)
        optimizer = self.recipe.optimizer_of(self.groups(model))
        loads = [lambda: model.load_state_dict(weights), lambda: optimizer.load_state_dict(state)]
        for load in loads if weights_first else reversed(loads):
            load()
        return self.like(model, optimizer)

    def deepcopied(self) -> "World":
        return self.like(*copy.deepcopy((self.model, self.optimizer)))

    def pickled(self) -> "World":
        return self.like(*pickle.loads(pickle.dumps((self.model, self.optimizer))))

    def unwrapped(self) -> "World":
        """The base alone, from here on."""
        model = copy.deepcopy(self.model)
        base = self.recipe.base_of(self.groups(model))
        base.load_state_dict(copy.deepcopy(self.optimizer.base.state_dict()))
        return self.like(model, base)

    @property
    def keeps_a_history(self) -> bool:
        """Whether copies and checkpoints have what was measured: it is kept with the parameters that take part, unless
        the base has something else there than dictionaries."""
        groups = [group for group in self.optimizer.param_groups if group.get("anderson", True)]
        taking_part = any(param.requires_grad for group in groups for param in group["params"])
        return taking_part and self.recipe.base != "list_state"

    # What is the same in two runs

    def weights(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]

    def base_tensors(self) -> list[Tensor]:
        """The state of the base, in the order of the parameters, and then what it keeps for all of them."""
        state = getattr(self.optimizer, "base", self.optimizer).state
        params = list(self.model.parameters())
        keys = [*(param for param in params if param in state), *(key for key in state if not isinstance(key, Tensor))]
        return [tensor for key in keys for tensor in tensors_in(state[key])]


def _write_all(value: float, params: list[Tensor]) -> None:
    for param in params:
        param.grad.fill_(value)


def _write_one(value: float, params: list[Tensor]) -> None:
    for param in params[:1]:
        param.grad.view(-1)[0] = value


def _take_away(step: int | None, params: list[Tensor]) -> None:
    for param in params[::step]:
        param.grad = None


SPOILED: dict[str, Callable[[list[Tensor]], None]] = {
    "true": lambda params: None,
    "zero": partial(_write_all, 0.0),
    "none": partial(_take_away, None),
    "every second none": partial(_take_away, 2),
    "nan": partial(_write_all, torch.nan),
    "one nan": partial(_write_one, torch.nan),
    "inf": partial(_write_all, torch.inf),
    "one inf": partial(_write_one, -torch.inf),
}
"""What becomes of the gradients of these parameters."""
NOT_FINITE = ("nan", "one nan", "inf", "one inf")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
