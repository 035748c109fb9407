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
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition
from machines import Machine, event
from recipes import anderson_recipes, gauss_newton_recipes
from textbook_machine import Textbook
from torch import Tensor
from training import assert_same, counts
from worlds import NOT_FINITE, SCHEDULERS, SPOILED, Model, Recipe, World

SEQUENCES = int(os.environ.get("SEQUENCES", 300))
MODERATE = 1e12
"""Above it, steps of the base alone may overflow."""


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
    recipes = gauss_newton_recipes(["sgd", "momentum", "adam", "adagrad", "rmsprop", "list_state", "group_counter"])


# ------------------------------------------------------------------------------------------------- the tests

MACHINES: list[type[Machine]] = [
    AndersonOnGradientDescent,
    AndersonOnAdaptiveSteps,
    AndersonOnUnusualBases,
    GaussNewtonOnSquares,
    Textbook,
]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_whatever_happens_the_run_stays_sound(machine):
    share = 10 if machine is GaussNewtonOnSquares else 1  # traces take long
    sequences = math.ceil(SEQUENCES / len(MACHINES) / share)
    machine.run(sequences)
    assert machine.told["sequences"] >= sequences
    assert machine.told["accepted"] > 0
