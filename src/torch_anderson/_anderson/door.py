"""``Anderson``: the door to residual-driven acceleration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch.optim import Optimizer

from .._driver import Driver
from .._optimizer import WrappedOptimizer
from .._options import Options, choice, integer, invalid, process_group_or_none, real
from .._tensors.evaluate import LossFn
from .average import MovingAverage
from .driver import AndersonDriver
from .storage import Storage

SAFEGUARDS = ("descent", "loss", "residual", None)


@dataclass(frozen=True, kw_only=True)
class AndersonOptions(Options):
    """The options of ``Anderson``, described there, with their defaults."""

    history_size: int
    period: int
    store_period: int
    residual_steps: int
    relaxation: float
    warmup: int
    average: MovingAverage | None
    regularization: float | None
    max_jump: float
    safeguard: str | None
    storage: Storage | None
    process_group: Any

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            name: integer(name, getattr(self, name), least)
            for name, least in (
                ("history_size", 1),
                ("period", 1),
                ("store_period", 1),
                ("residual_steps", 1),
                ("warmup", 0),
            )
        }
        checked["relaxation"] = real(
            "relaxation", self.relaxation, lambda x: 0 < x <= 1, "a number above 0 and at most 1"
        )
        checked["max_jump"] = real(
            "max_jump", self.max_jump, lambda x: x > 0, "a number above 0, or infinity for no limit"
        )
        if self.regularization is not None:
            checked["regularization"] = real(
                "regularization",
                self.regularization,
                lambda x: x >= 0 and isfinite(x),
                "None or a finite number from 0",
            )
        choice("safeguard", self.safeguard, SAFEGUARDS)
        for name, kind in (("average", MovingAverage), ("storage", Storage)):
            if not isinstance(getattr(self, name), kind | None):
                raise invalid(name, getattr(self, name), f"None or a torch_anderson.{kind.__name__}")
        process_group_or_none(self.process_group)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.residual_steps > 1:
            self._check_long_pairs()

    def _check_long_pairs(self) -> None:
        s = self.residual_steps
        if self.period % s:
            raise invalid("residual_steps", s, f"a divisor of period={self.period}")
        if self.store_period not in (1, s):
            raise invalid("store_period", self.store_period, f"1 with residual_steps={s}, which stores every {s} steps")
        if self.safeguard == "residual":
            raise invalid("safeguard", self.safeguard, f"'descent', 'loss' or None with residual_steps={s}")
        if self.average:
            raise invalid("average", self.average, f"None with residual_steps={s}")


class Anderson(WrappedOptimizer):
    r"""Alternating Anderson acceleration of any first-order optimizer, with moving average and safeguard.

    One base step is taken as one evaluation of a fixed-point map, :math:`w \to u = w + r`. Every ``period`` steps the
    last residuals are combined such that a linear model of the map would leave the least of them,
    :math:`g = \arg\min \lVert r - R g \rVert`, and the weights jump to :math:`w + \beta (r - (W + R) g)`.

    Args:
        base: the optimizer that makes the steps.
        history_size: m, most columns of R.
        period: p, base steps between two accelerations.
        store_period: q, base steps between two stored pairs; an accelerating step always stores.
        residual_steps: s, base steps that a pair spans. 1 is the paper's; a whole period stands out of noise better.
        relaxation: beta, how far to go towards the accelerated weights.
        warmup: base steps before the first pair is stored.
        average: the adaptive moving average, a ``MovingAverage``; ``None`` for none.
        regularization: added to the diagonal of the Gram matrix of R's columns scaled to length 1. ``None``: 1e-12;
            with pairs of several steps, up to 0.1 by the noise that the columns show.
        max_jump: longest jump, in lengths of the path through the stored points; infinity for no limit.
        safeguard: test that a finite jump must pass. ``"descent"``: residuals that change smoothly, a predicted gain
            that is not chance, and a jump further along r than the plain step. ``"loss"``: a lower loss than after
            the plain step, by the ``loss_fn`` given with the step (2 forward passes). ``"residual"``: the paper's, a
            smaller residual at the next step, which is taken back if the test fails. ``None``: no further test.
        storage: where the history is kept, a ``Storage``; ``None``: with the parameters.
        process_group: the ranks that train this model together; ``None`` for all there are.

    A parameter group takes no part if it has ``"anderson": False``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Anderson(torch.optim.Adam(model.parameters(), lr=1e-2))
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     loss = model(torch.ones(4, 2)).square().mean()
        ...     loss.backward()
        ...     _ = optimizer.step()
        >>> optimizer.stats.as_dict()["history_len"]
        10.0
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        history_size: int = 10,
        period: int = 10,
        store_period: int = 1,
        residual_steps: int = 1,
        relaxation: float = 1.0,
        warmup: int = 0,
        average: MovingAverage | None = None,
        regularization: float | None = None,
        max_jump: float = 2.0,
        safeguard: str | None = "descent",
        storage: Storage | None = None,
        process_group: Any = None,
    ):
        options = AndersonOptions(
            history_size=history_size,
            period=period,
            store_period=store_period,
            residual_steps=residual_steps,
            relaxation=relaxation,
            warmup=warmup,
            average=average,
            regularization=regularization,
            max_jump=max_jump,
            safeguard=safeguard,
            storage=storage,
            process_group=process_group,
        )
        super().__init__(base, options)
        if options.safeguard == "residual" and any(isinstance(part, Optimizer) for part in vars(base).values()):
            allowed = (
                f"'descent', 'loss' or None with {type(base).__name__}, whose inner optimizer cannot be taken back"
            )
            raise invalid("safeguard", options.safeguard, allowed)

    @staticmethod
    def _make_driver(base: Optimizer, options: Any) -> Driver:
        return AndersonDriver(base, options)

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, loss_fn: LossFn | None = None
    ) -> Any:
        """Make one base step; on every ``period``-th the weights may jump.

        Args:
            closure: handed to the base, which calls it as often as it needs; never called by us.
            loss_fn: the loss on this step's batch, forward pass only, for ``safeguard="loss"``.
        """
        return self._step(closure, loss_fn)

    def set_batch(self, *, loss_fn: LossFn | None = None) -> None:
        """Give the next step its ``loss_fn``, where a framework owns the call of ``step``."""
        self._driver.ahead = loss_fn
