"""PyTorch's database of optimizers, the wrapped forms of each of them, and the problem that they train."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import torch_anderson
from torch_anderson import Anderson

# The import forbids the whole process to set torch.backends.*; other tests run in this process.
_allowed = torch.backends.__allow_nonbracketed_mutation_flag
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db  # noqa: E402

torch.backends.__allow_nonbracketed_mutation_flag = _allowed

REFUSED = {"SparseAdam": "Its gradients are sparse and have no flat form."}
"""Optimizers that cannot be wrapped, and why."""
DENSE = [info for info in optim_db if info.name not in REFUSED]
EXCEPTIONS = {
    "another type": {"LBFGS": "It is at the minimum before the types change."},
    "backward, then step": {"LBFGS": "Its step needs a closure."},
    "complex": {"Adafactor": "It takes real parameters only.", "Muon": "It takes real parameters only."},
    "copies": {"LBFGS": "A copy of it has lost its parameters."},
    "empty": {"Muon": "It takes matrices only.", "Adafactor": "It divides by the number of entries."},
    "frozen": {"LBFGS": "It moves parameters without gradient along its history."},
    "groups": {"LBFGS": "It takes one group only."},
    "not dense": {"Muon": "It takes matrices only."},
    "several types": {"LBFGS": "It joins all parameters to one vector."},
    "transposed": {"LBFGS": "It takes contiguous gradients only.", "Muon": "It computes in bfloat16."},
    "zero-dimensional": {"Muon": "It takes matrices only."},
}
"""What PyTorch's optimizers cannot do by themselves, and is therefore not asked of them when wrapped."""
AGREE = {"rtol": 1e-5, "atol": 1e-5}
"""For float64 results that differ in rounding errors; the implementations of ASGD alone differ by 2e-8."""


class Variant(NamedTuple):
    """One way of wrapping a base, and a number of steps in which it jumps; a jump may then still wait for its test."""

    wrap: Callable[[Optimizer], Optimizer]
    steps: int = 5
    plain: int = 0
    """Steps before it may jump."""


PLAIN = Variant(lambda base: base)
VARIANTS = {
    "defaults": Variant(Anderson, steps=11, plain=3),
    "every_step": Variant(partial(Anderson, residual="step", safeguard=None)),
    "residual": Variant(partial(Anderson, residual="step", safeguard="residual")),
    "step": Variant(partial(Anderson, residual="step"), steps=8),
}
if hasattr(torch_anderson, "GaussNewton"):
    VARIANTS |= {"gauss_newton": Variant(torch_anderson.GaussNewton, plain=9)}  # without objective, the base alone
STABLE = {
    "defaults": Variant(partial(Anderson, history_size=3), steps=8),
    "every_step": Variant(partial(Anderson, residual="step", safeguard=None, regularization=1e-4)),
    "residual": Variant(partial(Anderson, residual="step", safeguard="residual", regularization=1e-4)),
    "step": Variant(partial(Anderson, residual="step", regularization=1e-4), steps=8),
    **{name: variant for name, variant in VARIANTS.items() if name.startswith("gauss_newton")},
}
"""The same, with so few pairs or so much regularization that a jump magnifies rounding errors by about 1e4 at most."""
JUMPING = {name: variant for name, variant in VARIANTS.items() if name != "gauss_newton"}
"""Those that jump within a few steps."""


def able(topic: str) -> list[OptimizerInfo]:
    """The optimizers without an exception for a topic."""
    return [info for info in DENSE if info.name not in EXCEPTIONS[topic]]


def implementations(info: OptimizerInfo) -> list[dict[str, bool]]:
    """The options that select the implementations of an optimizer: for-loop, foreach, fused."""
    available = [flag for flag in ("foreach", "fused") if flag in info.supported_impls]
    return [{flag: flag == chosen for flag in available} for chosen in (None, *available)]


def inputs(info: OptimizerInfo) -> list[dict[str, Any]]:
    """The options of every input that the database has on the CPU: the first in every implementation."""
    first, *others = (given.kwargs for given in info.optim_inputs_func(device="cpu"))
    chosen = [{**first, **implementation} for implementation in implementations(info)] + others
    if info.step_requires_closure:
        return [{"max_iter": 3, **given} for given in chosen]  # several evaluations a step, but not 20
    return chosen


class Run:
    """An optimizer on a quadratic: the loss is the sum of curvature * (parameter - target)^2 / 2 over all entries."""

    def __init__(
        self,
        info: OptimizerInfo,
        given: Mapping[str, Any],
        variant: Variant = PLAIN,
        *,
        dtype: torch.dtype = torch.float32,
        groups: Callable[[list[Parameter]], Any] = list,
        sign: int = 1,
    ):
        bias_shape = (3, 1) if info.name == "Muon" else (3,)  # Muon takes matrices only
        generator = torch.Generator().manual_seed(0)
        draws = [[torch.randn(shape, generator=generator) for shape in ((3, 4), bias_shape)] for _ in range(3)]
        starts, targets, logarithms = ([draw.to(dtype) for draw in each] for each in draws)
        self.params = [Parameter(start) for start in starts]
        self.targets, self.curvatures = targets, [10 * logarithm.exp() for logarithm in logarithms]
        self.sign = sign
        self.optimizer = variant.wrap(info.optim_cls(groups(self.params), **deepcopy(dict(given))))
        self.steps = variant.steps

    def loss(self) -> torch.Tensor:
        triples = zip(self.params, self.targets, self.curvatures, strict=True)
        return (
            self.sign / 2 * sum((curvature * (param - target).square()).sum() for param, target, curvature in triples)
        )

    def closure(self) -> torch.Tensor:
        """Set the gradients, by their formula, and return the loss."""
        with torch.no_grad():
            for param, target, curvature in zip(self.params, self.targets, self.curvatures, strict=True):
                param.grad = self.sign * curvature * (param - target) if param.requires_grad else None
            return self.loss()

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """One step, with what the variant needs for it."""
        return self.optimizer.step(closure)

    def train(self, steps: int | None = None) -> torch.Tensor:
        """The losses of so many steps, of the variant's number by default."""
        return torch.stack([torch.as_tensor(self.step(self.closure)) for _ in range(steps or self.steps)])

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.params]

    def take_weights(self, other: "Run") -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.params, other.params, strict=True):
                mine.copy_(theirs)


def stripped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict without our entries: the base's own."""
    state = {
        index: {name: value for name, value in entries.items() if not name.startswith("anderson_")}
        for index, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": {index: entries for index, entries in state.items() if entries}}


def assert_equal(ours: Any, theirs: Any) -> None:
    """Nested containers with the same bits; NaN equals NaN."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        if ours.dtype == theirs.dtype and torch.equal(ours, theirs):  # a tenth of the time
            return
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_equal(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine, other)
    else:
        assert ours == theirs or (ours != ours and theirs != theirs)


def over(infos: list[OptimizerInfo] = DENSE, variants: Mapping[str, Variant] = VARIANTS) -> Callable[[Any], Any]:
    """Parametrize a test by ``info`` and ``variant``."""
    cases = [pytest.param(info, variants[name], id=f"{info.name}-{name}") for info in infos for name in variants]
    return pytest.mark.parametrize("info, variant", cases)


def over_inputs(
    infos: list[OptimizerInfo] = DENSE,
    variants: Mapping[str, Variant] = VARIANTS,
    given: Callable[[OptimizerInfo], Any] = inputs,
) -> Callable[[Any], Any]:
    """As ``over``, for a check of (info, variant, given) that one test makes for all inputs of the optimizer."""

    def decorate(check: Callable[[OptimizerInfo, Variant, dict[str, Any]], None]) -> Any:
        def test(info: OptimizerInfo, variant: Variant) -> None:
            for each in given(info):
                try:
                    check(info, variant, each)
                except Exception as error:
                    error.add_note(f"Input: {info.name}({each})")
                    raise

        test.__name__, test.__qualname__, test.__module__ = check.__name__, check.__qualname__, check.__module__
        test.__doc__ = check.__doc__
        return over(infos, variants)(test)

    return decorate


def steps_with_gradients(optimizer, params, gradients):
    """One step for each list of gradients; a closure that a base calls several times gives the same ones again."""
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step(lambda: torch.tensor(1.0))


def random_gradients(*shapes, steps=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes] for _ in range(steps)]
