"""Random sequences of operations on the library and on its textbook twin, which must agree."""

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition
from machines import Machine, event
from recipes import step_options
from reference import TextbookAnderson
from torch import Tensor, optim

from torch_anderson import Anderson


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

    @event(factor=st.sampled_from([0.9, 0.999, 3.0]), rotation=st.sampled_from([0.0, 0.01, 1.0]))
    def write_from_outside(self, factor: float, rotation: float) -> None:
        """Of the length of the last steps, much shorter or much longer; along the weights and across."""
        for problem, _ in self.runs:
            weights = problem.weights()
            problem.write(factor * weights + rotation * weights.roll(1))
        self.twin.overwritten()
        self.other.overwritten()

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
