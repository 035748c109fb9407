"""Random sequences of all that can happen to an optimizer, over all options of both accelerators.

Hypothesis draws options and a sequence of rules, and shortens what fails. ``Training`` and its subclasses check what
has to hold whatever happens: nothing raises, every way of resuming continues with the same bits, disabled steps are
the base's own, counters add up, finite gradients leave finite weights. ``Textbook`` compares with the textbook twin.

``make test`` runs 300 sequences, always the same ones. The environment variable SEQUENCES asks for another number,
which are then drawn anew each time; ``-rP`` shows what happened in them.
"""

import copy
import math
import os
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reference import TextbookAnderson
from torch import Tensor, optim
from training import assert_same, counts
from worlds import NOT_FINITE, SCHEDULERS, SPOILED, Model, Recipe, World, log_cosh

from torch_anderson import Anderson, GaussNewton, MovingAverage, Storage

SEQUENCES = int(os.environ.get("SEQUENCES", 300))
RULES = 20
MODERATE = 1e12
"""Above it, steps of the base alone may overflow."""


def averages() -> st.SearchStrategy[MovingAverage]:
    tolerances = st.sampled_from([0.0, 0.1, 1.0])
    paper = st.builds(MovingAverage, st.integers(1, 5), tolerance=tolerances)
    return paper | st.builds(MovingAverage, st.integers(4, 5), tolerance=tolerances, criterion=st.just("detrended"))


@st.composite
def step_options(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination that is allowed where residuals are steps."""
    return {
        "residual": "step",
        "period": draw(st.integers(1, 4)),
        "store_period": draw(st.integers(1, 4)),
        "history_size": draw(st.integers(1, 5)),
        "relaxation": draw(st.sampled_from([1.0, 0.7, 0.2])),
        "warmup": draw(st.sampled_from([0, 0, 1, 4])),
        "regularization": draw(st.sampled_from([1e-12, 0.0, 1e-4])),
        "max_jump": draw(st.sampled_from([0.5, 2.0, math.inf])),
        "safeguard": draw(st.sampled_from([None, "loss", "residual"])),
        "average": draw(st.none() | averages()),
    }


@st.composite
def gradient_options(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination that is allowed where residuals are gradients."""
    return {
        "residual": "gradient",
        "period": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "history_size": draw(st.integers(2, 5)),
        "warmup": draw(st.sampled_from([0, 0, 1, 4])),
        "safeguard": draw(st.sampled_from(["gradient", "gradient", None])),
    }


STORAGES = st.sampled_from([None, None, Storage(dtype=torch.bfloat16), Storage(device="cpu")])


@st.composite
def anderson_recipes(draw: st.DrawFn, bases: list[str]) -> Recipe:
    options = {**draw(step_options() | gradient_options()), "storage": draw(STORAGES)}
    return Recipe(draw(st.sampled_from(bases)), Anderson, options)


@st.composite
def gauss_newton_recipes(draw: st.DrawFn, losses: list[Any], bases: list[str]) -> Recipe:
    options = {
        "loss": draw(st.sampled_from(losses)),
        "budget": draw(st.sampled_from([0.1, 0.3, 0.9])),
        "forward_cost": draw(st.sampled_from([1 / 3, 0.02])),
    }
    return Recipe(draw(st.sampled_from(bases)), GaussNewton, options, outputs=options["loss"], by="outputs")


def event(least: int = 0, **strategies: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """A rule that is followed by some steps, since what it has broken shows in them.

    At least one where a checkpoint is loaded: weights that are written before the next step belong to it.
    """

    def decorate(method: Callable) -> Callable:
        @rule(then=st.integers(least, 4), **strategies)
        @wraps(method)
        def followed_by_steps(self: "Machine", then: int, **drawn: Any) -> None:
            method(self, **drawn)
            self.sound()
            self.go_on(then)

        return followed_by_steps

    return decorate


class Machine(RuleBasedStateMachine):
    """Adds up what happened in all sequences of a kind; has its events followed by steps."""

    told: ClassVar[Counter]

    def go_on(self, steps: int) -> None:
        raise NotImplementedError

    def sound(self) -> None:
        raise NotImplementedError

    def tell(self, optimizer: Any) -> None:
        """At the end of a sequence."""
        self.told["sequences"] += 1
        self.told.update({name: int(count) for name, count in counts(optimizer).items()})

    def __init_subclass__(cls) -> None:
        cls.told = Counter()

    @classmethod
    def run(cls, sequences: int) -> None:
        """Run so many sequences and print what happened in them."""
        repeatable = "SEQUENCES" not in os.environ
        chosen = settings(
            max_examples=sequences,
            stateful_step_count=RULES,
            derandomize=repeatable,
            print_blob=not repeatable,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        run_state_machine_as_test(cls, settings=chosen)
        print(cls.__name__, dict(cls.told))


class Training(Machine):
    """One run, or two that have to go the same way: a run and its copy. Rules apply to both."""

    recipes: ClassVar[st.SearchStrategy[Recipe]]
    pace: ClassVar[int] = 1
    """Steps between two of those that the rules ask for."""

    worlds: list[World]

    @initialize(
        data=st.data(),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        two_groups=st.booleans(),
        opted_out=st.booleans(),
    )
    def build(self, data: st.DataObject, dtype: torch.dtype, two_groups: bool, opted_out: bool) -> None:
        recipe = data.draw(self.recipes)
        model = Model().to(dtype)
        first, second, *_ = model.parts()
        groups: list[dict[str, Any]] = [{"params": first + second}]
        if two_groups and recipe.takes_groups:
            groups = [{"params": first}, {"params": second}]
            if opted_out:
                groups[1]["anderson"] = False
        optimizer = recipe.optimizer_of(groups)
        optimizer.param_groups[-1]["lr"] *= 0.5
        self.worlds = [World(recipe, model, optimizer)]

    @property
    def world(self) -> World:
        return self.worlds[0]

    @property
    def recipe(self) -> Recipe:
        return self.world.recipe

    def has_copy(self) -> bool:
        return len(self.worlds) > 1

    # Steps

    def go_on(self, steps: int, **how: Any) -> None:
        for _ in range(steps * self.pace):
            for world in self.worlds:
                checked_step(world, **how)
            self.told["steps"] += 1

    @event(closure=st.booleans(), given=st.sampled_from(["with the step", "ahead", "never"]))
    def step(self, closure: bool, given: str) -> None:
        self.go_on(1, closure=closure, given=given)

    @event(
        gradients=st.sampled_from([name for name in SPOILED if name not in NOT_FINITE]),
        steps=st.integers(1, 3),
        closure=st.booleans(),
    )
    def step_with_gradients_missing(self, gradients: str, steps: int, closure: bool) -> None:
        for world in self.worlds:
            for _ in range(steps):
                checked_step(world, gradients=gradients, closure=closure)

    @event(gradients=st.sampled_from(NOT_FINITE), steps=st.integers(1, 3), resets=st.booleans(), closure=st.booleans())
    def step_with_gradients_not_finite(self, gradients: str, steps: int, resets: bool, closure: bool) -> None:
        """Then the weights are written back, the base starts anew, and the history, which has NaNs, may stay."""
        for world in self.worlds:
            before = [weights.clone() for weights in world.weights()]
            for _ in range(steps):
                world.step(gradients, closure=closure)
            with torch.no_grad():
                for param, value in zip(world.model.parameters(), before, strict=True):
                    param.copy_(value)
            renew_base_state(world)
            if resets:
                world.optimizer.reset_history()

    @event(steps=st.integers(1, 4))
    def step_disabled(self, steps: int) -> None:
        for world in self.worlds:
            plain = world.unwrapped()
            with world.optimizer.disabled():
                for _ in range(steps):
                    world.step()
                    plain.step(given="never")
            assert_same_tensors(world, plain)

    # Learning rates

    @event(factor=st.sampled_from([0.3, 0.9, 2.0]))
    def change_learning_rates(self, factor: float) -> None:
        for world in self.worlds:
            for group in world.optimizer.param_groups:
                group["lr"] = min(group["lr"] * factor, 0.3)

    @event(rate=st.sampled_from([0.0, 0.003, 0.03]), which=st.integers(0, 9))
    def change_one_learning_rate(self, rate: float, which: int) -> None:
        for world in self.worlds:
            world.optimizer.param_groups[which % len(world.optimizer.param_groups)]["lr"] = rate

    @event(steps=st.integers(1, 2))
    def pause(self, steps: int) -> None:
        """Learning rates of 0."""
        for world in self.worlds:
            rates = [group["lr"] for group in world.optimizer.param_groups]
            for group in world.optimizer.param_groups:
                group["lr"] = 0.0
            before, world.scheduler = world.scheduler, None
            for _ in range(steps):
                checked_step(world)
            world.scheduler = before
            for group, rate in zip(world.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    @event(name=st.sampled_from(list(SCHEDULERS)), to_base=st.booleans())
    def attach_scheduler(self, name: str, to_base: bool) -> None:
        for world in self.worlds:
            world.attach(name, to_base)

    @event()
    def drop_scheduler(self) -> None:
        for world in self.worlds:
            world.attach("")

    # Who takes part

    def parts_outside(self) -> list[int]:
        inside = {param for group in self.world.optimizer.param_groups for param in group["params"]}
        return [i for i, part in enumerate(self.world.model.parts()) if not inside.intersection(part)]

    @precondition(lambda self: self.recipe.takes_groups and self.parts_outside())
    @event(opted_out=st.booleans(), which=st.integers(0, 9))
    def add_group(self, opted_out: bool, which: int) -> None:
        outside = self.parts_outside()
        for world in self.worlds:
            world.attach("")  # PyTorch's schedulers do not follow a change of the groups
            part = world.model.parts()[outside[which % len(outside)]]
            world.optimizer.add_param_group({"params": part, **({"anderson": False} if opted_out else {})})

    @precondition(lambda self: len(self.world.optimizer.param_groups) > 1)
    @event(which=st.integers(0, 9))
    def remove_group(self, which: int) -> None:
        which %= len(self.world.optimizer.param_groups)
        if not self.world.has_layers_without(which):
            return  # outputs would not depend on any parameter, which is refused
        for world in self.worlds:
            world.attach("")
            group = world.optimizer.param_groups.pop(which)
            for param in group["params"]:
                world.optimizer.base.state.pop(param, None)  # else PyTorch's state_dict() raises KeyError

    @event(part=st.integers(0, 4), frozen=st.booleans())
    def freeze_or_unfreeze(self, part: int, frozen: bool) -> None:
        for world in self.worlds:
            for param in world.model.parts()[part]:
                param.requires_grad_(not frozen)
                param.grad = None

    @precondition(lambda self: self.recipe.takes_groups)
    @event(which=st.integers(0, 9))
    def opt_in_or_out(self, which: int) -> None:
        for world in self.worlds:
            group = world.optimizer.param_groups[which % len(world.optimizer.param_groups)]
            group["anderson"] = not group.get("anderson", True)

    # What others do to weights and history

    @event()
    def reset_history(self) -> None:
        for world in self.worlds:
            world.optimizer.reset_history()

    @event(part=st.integers(0, 4), way=st.sampled_from(["in place", "unseen", "other memory", "load"]))
    def write_from_outside(self, part: int, way: str) -> None:
        for world in self.worlds:
            for param in world.model.parts()[part]:
                value = 0.9 * param.detach()
                if way == "in place":
                    with torch.no_grad():
                        param.copy_(value)
                elif way == "unseen":
                    param.data.copy_(value)
                elif way == "other memory":
                    param.data = value
            if way == "load":
                world.model.load_state_dict(copy.deepcopy(world.model.state_dict()))

    @event(dtype=st.sampled_from([torch.float32, torch.float64]))
    def change_dtype(self, dtype: torch.dtype) -> None:
        for world in self.worlds:
            world.model.to(dtype)
            if world.base_tensors():  # PyTorch's optimizers ask for this: loading converts their state
                world.optimizer.load_state_dict(world.optimizer.state_dict())

    # Copies

    @event(least=1, weights_first=st.booleans(), of=st.integers(0, 1))
    def save_and_load(self, weights_first: bool, of: int) -> None:
        self.fork(of, partial(World.resumed, weights_first=weights_first))

    @precondition(lambda self: self.recipe.takes_copies)
    @event(way=st.sampled_from([World.deepcopied, World.pickled]), of=st.integers(0, 1))
    def copy(self, way: Callable[[World], World], of: int) -> None:
        self.fork(of, way)

    def fork(self, of: int, way: Callable[[World], World]) -> None:
        """Go on with one of the runs and its copy, side by side."""
        world = self.worlds[of % len(self.worlds)]
        self.worlds = [world, way(world)] if world.keeps_a_history else [way(world)]
        self.told["copies"] += 1

    @precondition(lambda self: self.has_copy() and self.world.keeps_a_history)
    @event(least=1, loads=st.booleans())
    def look(self, loads: bool) -> None:
        """Questions change nothing, nor does loading what was saved just now: the other run is not asked.

        A change of who takes part is noticed by the question, or by the next step.
        """
        optimizer = self.worlds[1].optimizer
        optimizer.stats.as_dict(), repr(optimizer), dict(optimizer.state), optimizer.stats.latest
        state = optimizer.state_dict()
        if loads:
            optimizer.load_state_dict(copy.deepcopy(state))
        self.go_on(1)

    @precondition(lambda self: self.has_copy() and self.world.keeps_a_history)
    @event(least=1, gradients=st.sampled_from(list(SPOILED)), steps=st.integers(1, 3))
    def roll_back(self, gradients: str, steps: int) -> None:
        """Steps that a checkpoint undoes leave no trace: the other run does not make them."""
        world = self.worlds[1]
        saved = copy.deepcopy((world.model.state_dict(), world.optimizer.state_dict()))
        schedule = world.scheduler and copy.deepcopy(world.scheduler.state_dict())
        for _ in range(steps):
            world.step(gradients)
        world.model.load_state_dict(saved[0])
        world.optimizer.load_state_dict(saved[1])
        if schedule:
            world.scheduler.load_state_dict(schedule)
        world.steps -= steps
        self.go_on(1)  # which notices what the checkpoint has noticed

    # What always holds

    @invariant()
    def sound(self) -> None:
        for world in self.worlds:
            assert_counters_add_up(world.optimizer)
            assert_base_state_is_the_bases_own(world)
        for other in self.worlds[1:]:
            assert counts(self.world.optimizer) == counts(other.optimizer)
            assert_same_tensors(self.world, other)

    def teardown(self) -> None:
        if hasattr(self, "worlds"):
            self.tell(self.world.optimizer)


def checked_step(world: World, **how: Any) -> None:
    """A step that leaves weights without gradient alone, and finite weights finite if the gradients are."""
    before = [weights.clone() for weights in world.weights()]
    before_it = taken_back(world.optimizer)
    moderate = largest([*before, *world.base_tensors()]) < MODERATE
    world.step(**how)
    gradients = [param.grad for param in world.model.parameters()]
    # A jump that is taken back takes them along, except those that were frozen meanwhile.
    returns = taken_back(world.optimizer) > before_it
    for param, value in zip(world.model.parameters(), before, strict=True):
        if world.recipe.leaves_idle and param.grad is None and not (returns and param.requires_grad):
            assert_same([param.detach()], [value])
    if moderate and largest([gradient for gradient in gradients if gradient is not None]) < MODERATE:
        assert math.isfinite(largest(world.weights()))


def taken_back(optimizer: Any) -> int:
    return sum(counts(optimizer).get(f"rejected_{cause}", 0) for cause in ("residual", "gradient"))


def largest(tensors: list[Tensor]) -> float:
    """The largest absolute value, NaN if there is a NaN."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).abs().max().item() if tensors else 0.0


def assert_same_tensors(one: World, other: World) -> None:
    """Bit for bit, weights and state of the base."""
    ours, theirs = ([*world.weights(), *world.base_tensors()] for world in (one, other))
    if len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs)):  # the quick test; it fails for NaN
        assert_same(ours, theirs)


def assert_counters_add_up(optimizer: Any) -> None:
    found = counts(optimizer)
    rejected = sum(count for name, count in found.items() if name.startswith("rejected_"))
    pending = found.get("attempted", 0) - found.get("accepted", 0) - rejected
    waits = getattr(optimizer.options, "safeguard", None) in ("residual", "gradient")
    assert pending in ((0, 1) if waits else (0,))


def assert_base_state_is_the_bases_own(world: World) -> None:
    for entries in world.optimizer.base.state.values():
        assert not isinstance(entries, dict) or not any(str(name).startswith("anderson_") for name in entries)


def renew_base_state(world: World) -> None:
    """As the base had it before its first step."""
    base = world.optimizer.base
    fresh = world.recipe.base_of(world.groups(world.model))
    base.load_state_dict({**base.state_dict(), "state": fresh.state_dict()["state"]})


class AndersonOnGradientDescent(Training):
    recipes = anderson_recipes(["sgd", "momentum"])


class AndersonOnAdaptiveSteps(Training):
    recipes = anderson_recipes(["adam", "adamw", "adagrad", "rmsprop"])


class AndersonOnUnusualBases(Training):
    recipes = anderson_recipes(["lbfgs", "list_state", "group_counter"])


class GaussNewtonOnSquares(Training):
    recipes = gauss_newton_recipes(["residual", "mse"], ["sgd", "momentum", "adam", "adagrad", "lbfgs", "list_state"])
    pace = 2


class GaussNewtonOnConvexLosses(Training):
    recipes = gauss_newton_recipes(
        ["cross_entropy", log_cosh], ["sgd", "momentum", "adamw", "rmsprop", "group_counter"]
    )
    pace = 2


# ------------------------------------------------------------------------------------------- the textbook twin


class Problem:
    """A robust regression of 16 weights in two groups, the same for every instance."""

    def __init__(self, base: str, rates: tuple[float, float], opted_out: bool, one_group: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        randn = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.inputs, self.targets = randn(40, 16) * torch.logspace(0, -0.5, 16, dtype=torch.float64), randn(40)
        self.params = [randn(3, 4).requires_grad_(), randn(4).requires_grad_(), randn(2).requires_grad_()]
        self.noise = 0.02 * randn(64, 16)
        groups = [{"params": [param], "lr": rate} for param, rate in zip(self.params, rates, strict=False)]
        if opted_out:
            groups.append({"params": [self.params[2]], "lr": rates[0], "anderson": False})
        self.base = TWIN_BASES[base](self.params[:2] if one_group else groups, lr=rates[0])
        self.steps = 0

    def loss(self, i: int) -> Tensor:
        x = torch.cat([param.flatten() for param in self.params[:2]])
        error = self.inputs @ x - self.targets
        return (1 + error**2).sqrt().mean() + 0.01 * x @ x + self.noise[i % 64] @ x + self.params[2].cos().sum()

    def evaluate(self, i: int, zero: bool) -> Tensor:
        for param in self.params:
            param.grad = None
        loss = self.loss(i)
        loss.backward()
        for param in self.params if zero else ():
            param.grad.zero_()
        return loss.detach()

    def step(self, optimizer: Any, zero: bool = False, **given: Any) -> None:
        optimizer.step(partial(self.evaluate, self.steps, zero), **given)
        self.steps += 1

    def weights(self) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.params])

    @torch.no_grad()
    def write(self, weights: Tensor) -> None:
        for param, part in zip(self.params, weights.split([param.numel() for param in self.params]), strict=True):
            param.copy_(part.view_as(param))


TWIN_BASES: dict[str, Any] = {
    "sgd": optim.SGD,
    "nesterov": partial(optim.SGD, momentum=0.9, nesterov=True),
    "adam": optim.Adam,
    "rprop": optim.Rprop,
    "lbfgs": partial(optim.LBFGS, max_iter=2, history_size=3),
}
TOLERANCE = 1e-8
"""The library solves normal equations, the twin uses an SVD of the columns. At a regularization of 1e-4 the scaled
problem has a condition of at most 1e4 times the number of columns, so that one solution differs by about 1e-11. Jumps
amplify such a difference; this much is left for what a sequence makes of it while it is not chaotic."""
CHAOS = 1e-12
"""A third run, the twin from weights that differ in the last digit, shows how much rounding is amplified: where by more
than about a thousand times, nothing can be compared, and all three start anew from the same weights."""


class Textbook(Machine):
    """The library, its twin, and the twin from weights that differ in the last digit."""

    @initialize(
        base=st.sampled_from(list(TWIN_BASES)),
        options=step_options(),
        second_rate=st.sampled_from([1.0, 0.3, 0.0]),
        opted_out=st.booleans(),
    )
    def build(self, base: str, options: dict[str, Any], second_rate: float, opted_out: bool) -> None:
        options["regularization"] = 1e-4
        rate = 0.1 if base == "sgd" else 0.02
        one_group = base == "lbfgs"
        problems = [Problem(base, (rate, rate * second_rate), opted_out, one_group) for _ in range(3)]
        self.ours, self.textbook, self.disturbed = problems
        self.library = Anderson(self.ours.base, **options)
        given = {name: value for name, value in options.items() if name != "residual"}
        self.twin, self.other = (TextbookAnderson(problem.base, **given) for problem in problems[1:])
        self.causes: list[str] = []
        self.library.register_acceleration_hook(lambda record: self.causes.append(record.cause or "accepted"))
        self.disturb()

    @property
    def runs(self) -> list[tuple[Problem, Any]]:
        return [(self.ours, self.library), (self.textbook, self.twin), (self.disturbed, self.other)]

    def disturb(self) -> None:
        self.disturbed.write(self.textbook.weights() * (1 + 4e-16))

    def go_on(self, steps: int, loss_fn: bool = True, **how: Any) -> None:
        for _ in range(steps):
            for problem, optimizer in self.runs:
                problem.step(optimizer, loss_fn=partial(problem.loss, problem.steps) if loss_fn else None, **how)
            self.told["steps"] += 1
            self.sound()
            self.same_causes()

    @event(steps=st.integers(1, 4), loss_fn=st.booleans())
    def step(self, steps: int, loss_fn: bool) -> None:
        self.go_on(steps, loss_fn)

    @event(steps=st.integers(1, 2))
    def step_with_zero_gradients(self, steps: int) -> None:
        self.go_on(steps, zero=True)

    @event(factor=st.sampled_from([0.5, 0.7, 1.5]))
    def change_learning_rates(self, factor: float) -> None:
        for problem, _ in self.runs:
            rates = [group["lr"] for group in problem.base.param_groups]
            for group in problem.base.param_groups if 1e-3 < max(rates) * factor < 0.2 else ():
                group["lr"] *= factor

    @precondition(lambda self: not isinstance(self.ours.base, optim.Rprop))  # its steps do not heed the learning rate
    @event()
    def pause(self) -> None:
        """A step at learning rates of 0."""
        rates = [group["lr"] for group in self.ours.base.param_groups]
        for problem, optimizer in self.runs:
            for group in problem.base.param_groups:
                group["lr"] = 0.0
            problem.step(optimizer)
            for group, rate in zip(problem.base.param_groups, rates, strict=True):
                group["lr"] = rate

    @event()
    def reset_history(self) -> None:
        self.library.reset_history()
        self.twin.reset()
        self.other.reset()

    @event()
    def write_from_outside(self) -> None:
        for problem, _ in self.runs:
            problem.write(0.9 * problem.weights())
        self.twin.cancel()
        self.other.cancel()

    @event(steps=st.integers(1, 3))
    def step_disabled(self, steps: int) -> None:
        self.twin.cancel()
        self.other.cancel()
        with self.library.disabled():
            for _ in range(steps):
                for problem, optimizer in self.runs:
                    problem.step(optimizer if optimizer is self.library else problem.base)

    @invariant()
    def sound(self) -> None:
        ours, textbook, disturbed = (problem.weights() for problem, _ in self.runs)
        if not distance(textbook, disturbed) <= CHAOS or self.columns_are_rounding():  # nor where either is NaN
            self.start_anew()
            return
        assert distance(ours, textbook) <= TOLERANCE, f"twin: {self.twin.last}, library: {self.library.stats.latest}"
        self.told["compared"] += 1

    def columns_are_rounding(self) -> bool:
        """Whether residuals do not differ but by rounding errors, of which anything may follow: Rprop makes such."""
        pairs = self.twin.pairs
        return any((a.rn - b.rn).norm() < 1e-12 * b.rn.norm() for a, b in pairwise(pairs))

    def same_causes(self) -> None:
        """After a step: the library notices only there that a jump was overwritten."""
        if self.causes and self.twin.last and self.twin.pending is None:
            assert self.causes[-1] == self.twin.last["cause"], f"{self.twin.last}, {self.library.stats.latest}"

    def start_anew(self) -> None:
        """All from the same weights and the same state of the base, with no history."""
        weights = 0.1 * Problem("sgd", (0.1, 0.1), True, False).weights()
        for problem, optimizer in self.runs:
            problem.write(weights)
            problem.base.load_state_dict(copy.deepcopy(self.ours.base.state_dict()))
            optimizer.reset_history() if optimizer is self.library else optimizer.reset()
        self.causes, self.twin.last = [], None
        self.told["started anew"] += 1
        self.disturb()

    def teardown(self) -> None:
        if hasattr(self, "library"):
            self.tell(self.library)


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of weights, relative to the largest weight where that is above 1."""
    return ((one - other).abs().max() / one.abs().max().clamp_min(1.0)).item()


# ------------------------------------------------------------------------------------------------- the tests

MACHINES: list[type[Machine]] = [
    AndersonOnGradientDescent,
    AndersonOnAdaptiveSteps,
    AndersonOnUnusualBases,
    GaussNewtonOnSquares,
    GaussNewtonOnConvexLosses,
    Textbook,
]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_whatever_happens_the_run_stays_sound(machine):
    sequences = math.ceil(SEQUENCES / len(MACHINES))
    machine.run(sequences)
    assert machine.told["sequences"] >= sequences
    assert machine.told["accepted"] > 0
