"""What a residual is: the displacement of a base step (the paper's), or the gradient.

A kind of residual says what pair (point, residual) a step yields, and whether it can be compared with those before it.
"""

from collections.abc import Sequence
from enum import Enum, auto
from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._tensors.blocks import Space, Vector
from .._tensors.members import Group, takes_part

NOT_PROPORTIONAL = (torch.optim.Rprop, torch.optim.LBFGS, torch.optim.ASGD, torch.optim.Adafactor)
"""Optimizers whose step is not proportional to the learning rate."""

SAME_RATIO = 1e-9
"""Relative difference of two ratios of learning rates up to which they count as equal: that of rounding."""


def learning_rates(groups: Sequence[Group]) -> list[float]:
    """The learning rates of groups; 1 where the base chooses its rate itself."""
    return [1.0 if group.get("lr") is None else float(group["lr"]) for group in groups]


def same_ratios(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether learning rates of groups differ by a common factor; where all are 0, nothing can be said."""
    if before == now:
        return True
    most_before, most_now = max(before, default=0.0), max(now, default=0.0)
    if len(before) != len(now) or not most_before or not most_now:
        return False
    pairs = ((a / most_before, b / most_now) for a, b in zip(before, now, strict=True))
    return all(abs(a - b) <= SAME_RATIO * max(a, b) for a, b in pairs)


class StepResidual:
    """The pair of a base step from w to u is (u, r), r = u - w, which is proportional to the learning rate."""

    def __init__(self, base: Optimizer, space: Space, start: Vector, point: Vector):
        self._base = base
        self._space = space
        self._proportional = not isinstance(base, NOT_PROPORTIONAL)
        self.start = start
        """w"""
        self.point = point
        """u"""
        self.rate = 1.0
        """The largest learning rate."""
        self.group_rates: list[float] = []
        """The learning rates of all groups, at the last step that was measured."""
        self.comparable = True
        """Whether they have kept their ratios since the last stored pair."""

    def begin(self) -> None:
        """Keep the weights before a base step."""
        self._space.note_gradients()
        self._space.read(self.start)

    def end(self) -> bool:
        """Read weights and learning rates after the base step. Returns whether the weights have changed.

        On other devices than the CPU the check would wait for the device, and with sharded parameters it would need all
        ranks. There the answer is yes, and a step of exactly zero shows at the next acceleration.
        """
        self._space.refresh()  # the base may have given the parameters other memory
        self._space.read(self.point)
        if self._space.settled and all(map(torch.equal, self.start, self.point)):
            return False
        rates = learning_rates([group for group in self._base.param_groups if takes_part(group)])
        before, self.group_rates = self.group_rates, rates
        self.rate = max(rates, default=1.0) if self._proportional else 1.0
        if before and before != rates:
            self.comparable = self.comparable and self._proportional and same_ratios(before, rates)
        return True

    def norm(self) -> float:
        """|r| over all ranks, before ``difference``; waits for the device."""
        squares = [torch.dist(u, w).double().square() for u, w in zip(self.point, self.start, strict=True)]
        return sqrt(float(self._space.add_up(squares)))

    def difference(self) -> Vector:
        """r, in the place of w."""
        return [torch.sub(u, w, out=w) for u, w in zip(self.point, self.start, strict=True)]


def largest_entry(vector: Vector) -> Tensor:
    """The maximum norm of a vector, on the device."""
    parts = [part.abs().amax() for part in vector if len(part)]
    return largest(parts) if parts else vector[0].new_zeros(())


class Reading(Enum):
    """The result of reading a gradient."""

    COMPARABLE = auto()
    """It is of the same function as those read before, or the first."""
    NOT_COMPARABLE = auto()
    NO_GRADIENT = auto()
    UNKNOWN_DECAY = auto()
    """How the base applies its weight decay is unknown, and so is the minimum that it approaches."""
    OWN_PAIRS = auto()
    """The base keeps pairs of points and gradients itself."""


WHY_PLAIN = {
    Reading.UNKNOWN_DECAY: "Anderson makes plain steps: it does not know how {name} applies weight_decay, so its "
    "gradients do not show where the minimum is. Use residual='step', or add the penalty to the loss.",
    Reading.OWN_PAIRS: "Anderson makes plain steps: {name} keeps pairs of points and gradients itself; jumps would "
    "invalidate them.",
}
"""Messages for results that do not change from step to step."""


class Setting(NamedTuple):
    """What a group adds to its gradients."""

    maximize: bool = False
    decay: float = 0.0
    """The factor of w in the gradient that the base descends."""
    root: float = 1.0
    """Square root of the group's share of the largest learning rate."""


PLAIN = Setting()
NEXT_TO_NOTHING = 1e-6
"""A group whose share of the largest learning rate is not above this is not moved by jumps."""

COUPLED = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
    *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
)
"""Optimizers that add weight_decay times w to the gradient, unless told to decouple it.

Decoupled decay does not move the minimum where steps are normalised, as those of AdamW, Adafactor and Muon are: near it
their steps keep their length however small the gradient is, and the decay is negligible compared with them.
"""


def unusable_gradients(base: Optimizer) -> Reading | None:
    """Why gradients do not show where the base's minimum is; None if they do."""
    if isinstance(base, torch.optim.LBFGS):
        return Reading.OWN_PAIRS
    if isinstance(base, COUPLED) or type(base).__module__.startswith("torch.optim"):
        return None
    decays = any(takes_part(group) and group.get("weight_decay") for group in base.param_groups)
    return Reading.UNKNOWN_DECAY if decays else None


class GradientResidual:
    """The pair at w is (w, g), g the gradient of the function that the base descends: with coupled weight decay.

    Groups may have different learning rates. Both are then scaled, w / root and g root, as if all groups had the same
    rate and the function were another one: the metric is that of the base's steps. A group whose rate is 0, or next to
    nothing, is not moved. Without ``scaled``, both are read as they are, and unknown weight decay is left out: the
    gradient is to decide on a jump, not to find the minimum.
    """

    def __init__(self, base: Optimizer, space: Space, scaled: bool = True):
        self._base = base
        self._space = space
        self._scaled = scaled
        self.rates: list[float] = []
        """The learning rates of the groups that take part, when the gradient was last read."""
        self._functions: list[tuple[bool, float]] | None = None
        """What these groups added to the gradient then; None if unknown."""
        self._settings: list[list[Setting]] = []
        """Those of the parameters of each block; empty if they add nothing."""
        self._coupled = isinstance(base, COUPLED)

    def read(self, point: Vector, gradient: Vector) -> Reading:
        """Read w and g, unless there is no gradient, or not of a function that has its minimum where the base ends."""
        space, groups = self._space, [group for group in self._base.param_groups if takes_part(group)]
        reason = unusable_gradients(self._base)
        if reason is Reading.OWN_PAIRS or (reason and self._scaled):
            return reason
        if space.ranks.size == 1 and all(p.grad is None for p in space.params):
            return Reading.NO_GRADIENT
        before, self.rates = self.rates, learning_rates(groups)
        most = max(self.rates) or 1.0
        found = [self._setting(group, rate / most) for group, rate in zip(groups, self.rates, strict=True)]
        functions, self._functions = self._functions, [(setting.maximize, setting.decay) for setting in found]
        same_metric = not self._scaled or same_ratios(before, self.rates)
        comparable = not before or (functions in (None, self._functions) and same_metric)
        self._settings = []
        if any(setting != PLAIN for setting in found):
            owners = {p: found[i] for i, group in enumerate(groups) for p in group["params"]}
            self._settings = [[owners[p] for p in block.params] for block in space.blocks]
        space.note_gradients()
        space.read(point)
        for block, part in zip(space.blocks, gradient, strict=True):
            block.read_gradients(part)
        if self._settings:
            self._adjust(point, gradient)
        return Reading.COMPARABLE if comparable else Reading.NOT_COMPARABLE

    def _setting(self, group: Group, share: float) -> Setting:
        decay = 0.0
        if self._coupled and not group.get("decoupled_weight_decay", False):
            decay = float(group.get("weight_decay") or 0.0) + float(group.get("lambd") or 0.0)
        root = sqrt(share) if share > NEXT_TO_NOTHING else 0.0
        return Setting(bool(group.get("maximize")), decay, root if self._scaled else 1.0)

    def _adjust(self, point: Vector, gradient: Vector) -> None:
        for block, settings, w, g in zip(self._space.blocks, self._settings, point, gradient, strict=True):
            weights: tuple[Tensor, ...] = (w,)
            gradients: tuple[Tensor, ...] = (g,)
            if settings.count(settings[0]) == len(settings):
                settings = settings[:1]
            else:
                weights, gradients = block.pieces(w), block.pieces(g)
            if upward := [x for x, setting in zip(gradients, settings, strict=True) if setting.maximize]:
                torch._foreach_neg_(upward)
            for decay in {setting.decay for setting in settings} - {0.0}:
                chosen = [i for i, setting in enumerate(settings) if setting.decay == decay]
                torch._foreach_add_([gradients[i] for i in chosen], [weights[i] for i in chosen], alpha=decay)
            if any(setting.root != 1 for setting in settings):
                torch._foreach_mul_(gradients, [setting.root for setting in settings])
                torch._foreach_div_(weights, [setting.root or inf for setting in settings])

    def unscale(self, point: Vector) -> None:
        """Turn a point as it was read into weights. Groups that are not moved stay as they are."""
        for block, settings, w in zip(self._space.blocks, self._settings, point, strict=False):
            roots = [setting.root for setting in settings]
            if any(root != 1 for root in roots):
                torch._foreach_mul_(block.pieces(w), roots)
                for root, piece, view in zip(roots, block.pieces(w), block.views, strict=True):
                    if not root:
                        piece.copy_(view)


def largest(numbers: Sequence[Tensor]) -> Tensor:
    """The largest of several tensors without dimensions, on the device of the first."""
    if len(numbers) == 1:
        return numbers[0]
    return torch.stack([number.to(numbers[0]) for number in numbers]).amax()
