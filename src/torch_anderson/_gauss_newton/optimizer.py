"""``GaussNewton``: the public class, whose jumps are computed from the residuals of an ``Objective``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from .._calls import with_hooks
from .._driver import Driver
from .._optimizer import WrappedOptimizer
from .._options import Options, process_group_or_none
from .._ranks.ranks import Ranks
from .driver import GaussNewtonDriver
from .objective import Closure, Objective


@dataclass(frozen=True, kw_only=True)
class GaussNewtonOptions(Options):
    """The options of ``GaussNewton``, described there."""

    process_group: Any

    def __post_init__(self) -> None:
        process_group_or_none(self.process_group)


class GaussNewton(WrappedOptimizer):
    r"""An optimizer that makes Gauss-Newton jumps instead of, or between, the steps of another one, the base.

    An ``Objective`` knows its residuals :math:`r` sample by sample. Jumps go along the rows of their Jacobian
    :math:`J`:

    .. math:: w \leftarrow w - \alpha J^\top (J J^\top + \lambda)^{-1} r,

    with momentum, corrections of second and third order, and :math:`\alpha` by a search on more samples than are
    fitted. Where jumps pay they replace the base's steps, and no gradient is computed; otherwise the base makes most
    steps. It suits smooth problems with up to about :math:`10^5` weights, if the samples are the whole data set or can
    be drawn freely: physics-informed networks, surrogates. Parameters are whole, real and on one device.

    Args:
        base: the wrapped optimizer, which makes all steps that are not jumps.
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

    def __init__(self, base: Optimizer, *, process_group: Any = None):
        super().__init__(base, GaussNewtonOptions(process_group=process_group))

    @staticmethod
    def _make_driver(base: Optimizer, options: Any) -> Driver:
        return GaussNewtonDriver(base, options)

    @with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one step: a jump, or a step of the base. Returns the loss at the weights before it.

        Args:
            closure: an ``Objective``, a closure made from one, or an ordinary closure for the base. An objective is not
                called if the base makes no step. With samples that are given for this step, ``objective(name=batch)``,
                the base makes it; also with an ordinary closure, unless ``set_batch`` has given an objective.
        """
        if isinstance(closure, Objective):
            closure = closure.bind()
        if not isinstance(closure, Closure):
            return self._step(closure, None)
        closure.ranks = Ranks(self.options.process_group)
        return self._step(closure, closure)

    def set_batch(self, objective: Objective) -> None:
        """Give the next step its objective, where a framework calls ``step``.

        Before the step, a jump may replace the base's step; within its closure, as in Lightning, it may follow it.
        """
        if isinstance(objective, Objective):
            objective = objective.bind()  # type: ignore[assignment]
        if not isinstance(objective, Closure):
            raise TypeError(f"Invalid objective: {type(objective).__name__}. Allowed: a torch_anderson.Objective.")
        self._driver.given = objective
