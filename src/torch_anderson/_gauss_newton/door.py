"""``GaussNewton``: the public class, whose jumps are computed from the model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .._calls import with_hooks
from .._driver import Driver
from .._optimizer import WrappedOptimizer
from .._options import Options, choice, invalid, process_group_or_none, real
from .._ranks.placement import is_dtensor
from .._tensors.checkpoint import STATE, Entries
from .._tensors.evaluate import Loss, OutputsFn
from .._tensors.members import Group, members
from .driver import GaussNewtonDriver
from .objective import Closure, Objective
from .tangent import TangentDriver

LOSSES = ("residual", "mse", "cross_entropy")
DIRECTIONS = ("auto", "tangent", "history")
NO_ROWS = (
    "Invalid outputs: a function, whose rows are not known. Allowed: an Objective, as in step(objective), with "
    "directions='tangent' and after a step with an Objective; or build GaussNewton(..., directions='history')."
)


@dataclass(frozen=True, kw_only=True)
class GaussNewtonOptions(Options):
    """The options of ``GaussNewton``, described there."""

    loss: Loss
    directions: str
    budget: float
    forward_cost: float
    process_group: Any

    def __post_init__(self) -> None:
        if not callable(self.loss) and self.loss not in LOSSES:
            raise invalid("loss", self.loss, f"{', '.join(map(repr, LOSSES))} or a function")
        choice("directions", self.directions, DIRECTIONS)
        budget = real("budget", self.budget, lambda x: 0 < x <= 0.9, "a number above 0 and at most 0.9")
        cost = real("forward_cost", self.forward_cost, lambda x: x > 0 and isfinite(x), "a finite number above 0")
        process_group_or_none(self.process_group)
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "forward_cost", cost)


class GaussNewton(WrappedOptimizer):
    r"""An optimizer that makes Gauss-Newton jumps instead of, or between, the steps of another one, the base.

    With an ``Objective``, whose residuals are known sample by sample, jumps go along the rows of the
    residuals' Jacobian :math:`J` (``directions="tangent"``):

    .. math:: w \leftarrow w - \alpha J^\top (J J^\top + \lambda)^{-1} r,

    with momentum, corrections of second and third order, and :math:`\alpha` by a search on more samples than are
    fitted. Where jumps pay they replace the base's steps, and no gradient is computed; otherwise the base makes most
    steps. It suits smooth problems with up to about :math:`10^5` weights, if the samples are the whole data set or can
    be drawn freely: physics-informed networks, surrogates.

    With ``outputs``, a forward pass that may be a black box, jumps go along directions of recent training
    (``directions="history"``): differences of stored weights, accepted jumps, the present step and the gradient.
    Forward passes measure how the outputs change along them. The combination with the lowest damped loss,
    :math:`\min_c \lVert r + A c \rVert^2 + \lambda c^\top M c`, is tried, and kept if the loss falls. Otherwise the
    base's step stays. Jumps come at least 10 steps apart, and less often while they do not pay.

    Args:
        base: the wrapped optimizer, which makes all steps that are not jumps.
        loss: how the loss is computed from ``outputs``. ``"residual"``: one or several tensors of residuals; the loss
            is the sum of their mean squares; ``"mse"`` of (predictions, targets); ``"cross_entropy"`` of (logits,
            classes); or a convex, twice differentiable function of (predictions, ...) that returns a mean over samples.
        directions: the directions along which jumps go. ``"tangent"``: the rows of the Jacobian of an ``Objective``'s
            residuals; ``"history"``: directions of recent training; ``"auto"``: ``"tangent"`` with an ``Objective``,
            ``"history"`` with ``outputs``.
        budget: initial share of the cost that jumps may take. With history directions it adapts between 0.02 and twice
            this value; with tangent directions it is a limit only while base steps gain more than jumps.
        forward_cost: cost of a no-grad forward pass, relative to a gradient evaluation.
        process_group: the ranks that train this model together; ``None`` for all ranks.

    A parameter group takes no part if it has ``"anderson": False``.

    Example:
        >>> import torch
        >>> from torch_anderson import GaussNewton, Objective, Term
        >>> points = torch.linspace(-1, 1, 50).reshape(-1, 1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> objective = Objective(model, fit=Term(lambda u, x: u(x) - x.square().sum(), points))
        >>> optimizer = GaussNewton(torch.optim.Adam(model.parameters(), lr=1e-2))
        >>> for _ in range(30):
        ...     loss = optimizer.step(objective)
        >>> bool(loss < 1e-6)
        True
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        loss: Loss = "residual",
        directions: str = "auto",
        budget: float = 0.3,
        forward_cost: float = 1 / 3,
        process_group: Any = None,
    ):
        options = GaussNewtonOptions(
            loss=loss, directions=directions, budget=budget, forward_cost=forward_cost, process_group=process_group
        )
        super().__init__(base, options)

    @staticmethod
    def _make_driver(base: Optimizer, options: Any) -> Driver:
        return TangentDriver(base, options) if options.directions == "tangent" else GaussNewtonDriver(base, options)

    @with_hooks
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, outputs: OutputsFn | None = None
    ) -> Any:
        """Make one step: a jump, or a base step that a jump may follow. Returns the loss at the weights before it.

        Args:
            closure: an ``Objective``, a closure made from one, or an ordinary closure for the base. An objective is not
                called if the base makes no step. With an ordinary closure and no ``outputs``, all steps are the base's.
            outputs: what ``loss`` is made of, on this step's samples: a function without arguments that makes a
                forward pass at the present weights.
        """
        given = self._checked(outputs)
        if isinstance(closure, Objective):
            closure = closure.bind()
        if given is None and isinstance(closure, Closure):
            self._driver.ahead = self._checked(closure)  # which may replace the driver
        try:
            return self._step(closure, given)
        except BaseException:
            self._driver.ahead = None  # the samples of a step that failed are not for the next one
            raise

    def set_batch(self, *, outputs: OutputsFn | None = None) -> None:
        """Give the next step its ``outputs``, where a framework calls ``step``."""
        self._driver.ahead = self._checked(outputs)

    def _checked(self, outputs: Any) -> Any:
        if isinstance(outputs, Objective):
            outputs = outputs.bind()
        if isinstance(outputs, Closure):
            loss = self._driver.options.loss
            if loss != "residual":
                raise ValueError(f"Invalid loss: {loss!r}. Allowed: 'residual' with an Objective.")
            self._choose(tangent=True)
            return outputs if isinstance(self._driver, TangentDriver) else outputs.residuals
        if outputs is not None and not callable(outputs):
            raise TypeError(
                f"Invalid outputs: {type(outputs).__name__}. Allowed: a function without arguments that evaluates the "
                "model at the present weights, e.g. step(outputs=lambda: (model(x), y))."
            )
        if outputs is not None and isinstance(self._driver, TangentDriver):
            raise TypeError(NO_ROWS)
        return outputs

    def _choose(self, tangent: bool) -> None:
        """Choose the driver that "auto" stands for, by a checkpoint or by the first samples that are given."""
        driver: Any = self._driver
        if driver.options.directions != "auto" or driver.stats.counts["attempted"]:
            return
        wanted = TangentDriver if tangent and has_rows(driver.base.param_groups) else GaussNewtonDriver
        if not isinstance(driver, wanted):
            self._driver = wanted(driver.base, driver.options)
            self._driver.hooks, self._driver.ahead = driver.hooks, driver.ahead
            self._driver.stats.counts = driver.stats.counts

    def _suit(self, found: dict[Tensor, Entries]) -> None:
        if found:
            kinds = {int(kept[STATE][1]) for kept in found.values() if STATE in kept}
            self._choose(tangent=kinds == {TangentDriver.kind})


def has_rows(groups: Sequence[Group]) -> bool:
    """Whether residuals can be differentiated sample by sample: by whole, real parameters on one device."""
    params = members(groups)
    whole = not any(map(is_dtensor, params)) and not any(p.is_complex() for p in params)
    return whole and len({p.device for p in params}) <= 1
