"""``Anderson``: the public class, for acceleration by gradients, or by residuals of base steps as in the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from torch.optim import Optimizer

from .._calls import with_hooks
from .._driver import Driver
from .._optimizer import WrappedOptimizer
from .._options import Options, choice, integer, invalid, process_group_or_none, real
from .._tensors.evaluate import LossFn
from .average import MovingAverage
from .gradient import GradientDriver
from .step import StepDriver
from .storage import Storage

RESIDUALS = ("gradient", "step")
SAFEGUARDS = {"gradient": ("gradient", None), "step": ("gradient", "residual", "loss", None)}
"""Allowed safeguards for each kind of residual; the first is what ``"auto"`` means."""
FEWEST = 2
"""Least ``history_size`` with gradients: fewer pairs cannot show noise."""
OF_STEPS = {"store_period": 1, "relaxation": 1.0, "average": None, "regularization": 1e-12, "max_jump": inf}
"""Options that belong to ``residual="step"``, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class AndersonOptions(Options):
    """The options of ``Anderson``, described there, after they were checked."""

    residual: str
    history_size: int
    period: int
    store_period: int
    relaxation: float
    warmup: int
    average: MovingAverage | None
    regularization: float
    max_jump: float
    safeguard: str | None
    storage: Storage | None
    process_group: Any

    def __post_init__(self) -> None:
        choice("residual", self.residual, RESIDUALS)
        allowed = SAFEGUARDS[self.residual]
        checked: dict[str, Any] = {
            name: integer(name, getattr(self, name), least)
            for name, least in (("history_size", 1), ("period", 1), ("store_period", 1), ("warmup", 0))
        }
        if self.residual == "gradient" and checked["history_size"] < FEWEST:
            raise invalid("history_size", self.history_size, f"at least {FEWEST}, unless residual='step'")
        for name, fits, described in (
            ("relaxation", lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
            ("max_jump", lambda x: x > 0, "a number above 0, or infinity for no limit"),
            ("regularization", lambda x: x >= 0 and isfinite(x), "a finite number from 0"),
        ):
            checked[name] = real(name, getattr(self, name), fits, described)
        choice("safeguard", self.safeguard, ("auto", *allowed))
        checked["safeguard"] = allowed[0] if self.safeguard == "auto" else self.safeguard
        for name, kind in (("average", MovingAverage), ("storage", Storage)):
            if not isinstance(getattr(self, name), kind | None):
                raise invalid(name, getattr(self, name), f"None or a torch_anderson.{kind.__name__}")
        process_group_or_none(self.process_group)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name, default in OF_STEPS.items():
            if self.residual == "gradient" and getattr(self, name) != default:
                raise invalid(name, getattr(self, name), f"{default}, unless residual='step'")


class Anderson(WrappedOptimizer):
    r"""Anderson acceleration of any first-order optimizer.

    Each gradient, with the weights at which it was computed, is a pair. The last pairs show how the gradient changes
    with the weights, and after a base step the weights jump to where it should vanish. The jump is computed by
    limited-memory BFGS, and by Anderson's least squares :math:`\min \lVert g - Y c \rVert` where that explains the
    gradient. The next gradient, which training computes anyway, decides: the jump stays, is shortened, or is undone.
    Where gradients are noisy, as those of small batches are, it rests: it makes plain steps at almost no cost, and
    tests again later.

    ``residual="step"`` is the method of the paper: one base step is one evaluation of a fixed-point map,
    :math:`w \to u = w + r`; every ``period`` steps :math:`g = \arg\min \lVert r - R g \rVert`, and the weights jump to
    :math:`w + \beta (r - (W + R) g)`.

    Args:
        base: the optimizer that makes the steps.
        residual: ``"gradient"`` or ``"step"``.
        history_size: m, largest number of pairs in use; each takes two vectors of the model's size. At least 2 with
            gradients.
        period: p, base steps between two jumps.
        warmup: base steps before the first pair is stored.
        safeguard: test of a jump. ``"gradient"``: by the next gradient. With ``residual="step"`` also:
            ``"residual"``, the paper's: the residual at the next step must be smaller, or step and jump are undone;
            ``"loss"``: a lower loss than after the plain step, by the ``loss_fn`` given with the step (2 forward
            passes). ``"auto"``: ``"gradient"``. ``None``: no test.
        store_period: q, base steps between two stored pairs; a step that may jump always stores. This
            option and those down to ``max_jump`` are for ``residual="step"``.
        relaxation: beta, how far to go towards the accelerated weights.
        average: the adaptive moving average, a ``MovingAverage``; ``None`` for none.
        regularization: added to the diagonal of the Gram matrix of R's columns scaled to length 1.
        max_jump: longest jump, in lengths of the path through the stored points; infinity for no limit.
        storage: where the history is kept, a ``Storage``; ``None``: with the parameters.
        process_group: the ranks that train this model together; ``None`` for all there are.

    A parameter group takes no part if it has ``"anderson": False``.

    Example:
        >>> import torch
        >>> inputs = torch.linspace(-1, 1, 20).reshape(-1, 2)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Anderson(torch.optim.Adam(model.parameters(), lr=1e-3))
        >>> for _ in range(30):
        ...     optimizer.zero_grad()
        ...     loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        ...     loss.backward()
        ...     _ = optimizer.step()
        >>> bool(loss < 1e-6)
        True
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        residual: str = "gradient",
        history_size: int = 10,
        period: int = 1,
        warmup: int = 0,
        safeguard: str | None = "auto",
        store_period: int = 1,
        relaxation: float = 1.0,
        average: MovingAverage | None = None,
        regularization: float = 1e-12,
        max_jump: float = inf,
        storage: Storage | None = None,
        process_group: Any = None,
    ):
        options = AndersonOptions(
            residual=residual,
            history_size=history_size,
            period=period,
            store_period=store_period,
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
            allowed = f"'loss' or None with {type(base).__name__}, whose inner optimizer cannot be restored"
            raise invalid("safeguard", options.safeguard, allowed)

    @staticmethod
    def _make_driver(base: Optimizer, options: Any) -> Driver:
        return GradientDriver(base, options) if options.residual == "gradient" else StepDriver(base, options)

    @with_hooks
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, loss_fn: LossFn | None = None
    ) -> Any:
        """Make one base step, after which the weights may jump; or undo or shorten the last jump instead.

        Args:
            closure: handed to the base, which calls it as often as it needs; not called otherwise.
            loss_fn: the loss on this step's batch, forward pass only, for ``safeguard="loss"``.
        """
        return self._step(closure, loss_fn)

    def set_batch(self, *, loss_fn: LossFn | None = None) -> None:
        """Give the next step its ``loss_fn``, where a framework calls ``step``."""
        self._driver.given = loss_fn
