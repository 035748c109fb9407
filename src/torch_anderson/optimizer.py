"""``Anderson``: an optimizer that accelerates another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import compress
from logging import WARNING
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import checkpoint
from .acceleration import ResidualDriver
from .discrepancy import Discrepancy
from .discrepancy_driver import DiscrepancyDriver
from .distributed import Ranks
from .driver import Batch, Driver
from .evaluation import LossFn, batch_statistics, resharded
from .flat import flat_view
from .layout import accelerated
from .options import Options
from .shards import is_dtensor, part_of
from .stats import Acceleration, Stats
from .storage import Storage

FORWARDED = frozenset({"train", "eval", "consolidate_state_dict"})


class Anderson(Optimizer):
    r"""Alternating Anderson acceleration of any first-order optimizer, with moving average and safeguard.

    One base step is taken as one evaluation of a fixed-point map, :math:`w \to u = w + r`. Every ``period`` steps
    the last residuals are combined so that a linear model of the map would leave the least of them,
    :math:`g = \arg\min \lVert r - R g \rVert`, and the weights jump to :math:`w + \beta (r - (W + R) g)`.

    Args:
        base: the optimizer that makes the steps.
        history_size: m, most columns of R.
        period: p, base steps between two accelerations.
        store_period: q, base steps between two stored pairs; an accelerating step always stores.
        relaxation: beta, how far to go towards the accelerated weights.
        mixing: ``"paper"``: :math:`w + \beta (r - (W + R) g)`; ``"anderson"``, the usual damping:
            :math:`w - W g + \beta (r - R g)`. The same at ``relaxation=1``.
        warmup: base steps before the first pair is stored.
        residual: ``"step"``: r is the displacement of one base step. ``"cycle"``: of a whole period, which stands
            out of the noise better.
        average_window: t, length of the moving average, 0 for none. With ``residual="cycle"``: the iterates at the
            end of the period whose mean ends the cycle.
        average_tolerance: epsilon; the average is taken while the window's largest standard deviation is above
            epsilon times the largest entry of r.
        average_criterion: ``"paper"``: deviation from the mean. ``"detrended"``: from a straight line, so that
            noise-free progress does not count as noise; needs ``average_window >= 4``.
        regularization: added to the diagonal of the Gram matrix of R's columns scaled to length 1. ``"adaptive"``:
            1e-12 with steps; with cycles, up to 0.1 by the noise that the columns themselves show.
        solver: ``"gram"``, or ``"qr"`` as in the paper (slow, needs all of R in float64).
        max_jump: longest jump, in lengths of the path through the stored iterates; infinity for no limit.
        safeguard: what a finite jump must pass besides. ``"descent"``: residuals that change smoothly, a predicted
            gain that is not chance, and a jump further along r than the plain step. ``"loss"``: a lower loss than
            the plain step, on the ``loss_fn`` given with the step (2 forward passes). ``"residual"``: the paper's, a
            smaller residual at the next step, which is taken back if it fails. ``None``: nothing.
        on_accept: what happens to the base's first moments at a jump: ``"keep"`` or ``"reset_momentum"``.

        discrepancy: let the model's outputs drive instead of the residual: ``"mse"``, ``"residual"``,
            ``"cross_entropy"``, a convex function, or a ``Discrepancy``, which also has the sizes and periods. Of the
            options above only ``on_accept`` counts then.
        storage: where the history lives, and which ranks train together: a ``Storage``.

    A parameter group takes no part if it has ``"anderson": False``.

    Example:
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
        relaxation: float = 1.0,
        mixing: str = "paper",
        warmup: int = 0,
        residual: str = "step",
        average_window: int = 0,
        average_tolerance: float = 0.1,
        average_criterion: str = "paper",
        regularization: float | str = "adaptive",
        solver: str = "gram",
        max_jump: float = 2.0,
        safeguard: str | None = "descent",
        on_accept: str = "keep",
        discrepancy: Discrepancy | str | Callable[..., torch.Tensor] | None = None,
        storage: Storage | None = None,
    ):
        options = Options(
            history_size=history_size,
            period=period,
            store_period=store_period,
            relaxation=relaxation,
            mixing=mixing,
            warmup=warmup,
            residual=residual,
            average_window=average_window,
            average_tolerance=average_tolerance,
            average_criterion=average_criterion,
            regularization=regularization,
            solver=solver,
            max_jump=max_jump,
            safeguard=safeguard,
            on_accept=on_accept,
            discrepancy=as_discrepancy(discrepancy),
            storage=storage,
        )
        _check_driver(options)
        _check_base(base, options)
        super().__init__(base.param_groups, {})  # hooks; the groups are the base's
        checkpoint.withdraw(base)  # a checkpoint of ours that the base loaded by itself has lost its precision
        self._accelerator = _driver(base, options)
        self._accelerator.begin()

    @classmethod
    def wrapping(cls, base_class: type[Optimizer], **options: Any) -> type[Anderson]:
        """A class that builds ``base_class`` and wraps it, for tools that want a class.

        >>> AndersonAdam = Anderson.wrapping(torch.optim.Adam, period=5)
        >>> optimizer = AndersonAdam([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        >>> type(optimizer.base).__name__, isinstance(optimizer, Anderson)
        ('Adam', True)
        """

        def __init__(self: Anderson, params: Any, *args: Any, **kwargs: Any) -> None:
            cls.__init__(self, base_class(params, *args, **kwargs), **options)

        def __reduce__(self: Anderson) -> tuple[Any, ...]:
            return _blank, (cls, base_class, options), self.__getstate__()

        members = {"__init__": __init__, "__reduce__": __reduce__, "__module__": cls.__module__}
        return type(f"{cls.__name__}{base_class.__name__}", (cls,), members)

    # ------------------------------------------------------------------------------------------------ training

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss_fn: LossFn | None = None,
        outputs: Callable[..., Any] | None = None,
    ) -> Any:
        """One base step; on every ``period``-th the weights may jump.

        Args:
            closure: handed to the base, which calls it as often as it does; never called by us.
            loss_fn: the loss on this step's batch, forward pass only, for ``safeguard="loss"``.
            outputs: for ``discrepancy``, the model's outputs on this step's batch or any other, as a function of the
                present weights: (predictions, targets), or residuals. Called on some steps only, several times; with
                a number of batches if ``most_batches`` is above 1.
        """
        return self._accelerator.step(closure, self._batch(loss_fn, outputs))

    def set_batch(self, *, loss_fn: LossFn | None = None, outputs: Callable[..., Any] | None = None) -> None:
        """Give what belongs to a batch to the next step, where a framework owns the call of ``step``."""
        self._accelerator.next_batch = self._batch(loss_fn, outputs)

    def _batch(self, loss_fn: LossFn | None, outputs: Callable[..., Any] | None) -> Batch:
        if outputs is not None and self.options.discrepancy is None:
            self._accelerator.tell_once("outputs have no effect without Anderson(..., discrepancy=...).", WARNING)
        return Batch(loss_fn, outputs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the base does it."""
        self.base.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it, every step is the base's own, bit for bit; pairs stored before stay."""
        accelerator = self._accelerator
        accelerator.cancel()
        before, accelerator.enabled = accelerator.enabled, False
        try:
            yield
        finally:
            accelerator.enabled = before

    @contextmanager
    def accelerated_weights(
        self, model: torch.nn.Module | None = None, batches: Iterable[Any] | None = None
    ) -> Iterator[None]:
        """Within it, the model has the weights to evaluate with: the mixture of present weights and averages that the
        batches given with the steps liked best. Training goes on undisturbed afterwards.

        Args:
            model: needed with ``batches``.
            batches: inputs from which the statistics of BatchNorm layers are worked out at these weights. Without them
                those of training stay, which belong to other weights.
        """
        if batches is not None and model is None:
            raise ValueError(
                "Invalid batches: statistics are worked out for a model. Give accelerated_weights(model, batches)."
            )
        if not isinstance(self._accelerator, DiscrepancyDriver) or not self._accelerator.settings.evaluates:
            raise RuntimeError(
                "No weights to evaluate with are kept. Build Anderson with "
                "discrepancy=Discrepancy(..., use='evaluation') or use='both'."
            )
        if model is None and any(is_dtensor(param) for group in self.param_groups for param in group["params"]):
            raise ValueError(
                "Invalid model: None. Of a sharded model, give accelerated_weights(model) the model itself."
            )
        with resharded(model), self._accelerator.evaluation_weights(), batch_statistics(model, batches):
            yield

    def reset_history(self) -> None:
        """Forget all that was measured, e.g. after loading other weights into the model; the weights stay."""
        self._accelerator.reset_history()

    def register_acceleration_hook(self, hook: Callable[[Acceleration], None]) -> RemovableHandle:
        """Call ``hook(record)`` after every acceleration that was worked out: accepted, rejected or skipped.

        >>> optimizer = Anderson(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
        >>> handle = optimizer.register_acceleration_hook(lambda record: print(record.gain, record.cause))
        >>> handle.remove()
        """
        handle = RemovableHandle(self._accelerator.hooks)
        self._accelerator.hooks[handle.id] = hook
        return handle

    @property
    def base(self) -> Optimizer:
        """The optimizer that makes the steps."""
        return self._accelerator.base

    @property
    def options(self) -> Options:
        """The options, as checked at construction."""
        return self._accelerator.options

    @property
    def stats(self) -> Stats:
        """What happened so far; ``stats.as_dict()`` for a logger."""
        return self._accelerator.stats

    # ------------------------------------------------- what PyTorch and its tools expect of an optimizer
    #
    # Groups, state and defaults are the base's. They are read through ``self.base``, never from an instance
    # dictionary: some frameworks make a subclass whose instances have another one.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base's parameter groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._built:
            self.base.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base's state, where our entries begin with ``anderson_``."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._built:
            self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base's defaults."""
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._built:
            self.base.defaults = defaults

    @property
    def _built(self) -> bool:
        """False while ``Optimizer.__init__`` runs, which would fill groups of its own."""
        return hasattr(self, "_accelerator")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base. The history starts anew."""
        if self._built:
            self.base.add_param_group(param_group)
            try:
                _check_parameters(self.base, self.options)
            except ValueError:
                self.base.param_groups.pop()
                raise
            self._accelerator.agreed = False

    def __getattr__(self, name: str) -> Any:
        if name in FORWARDED:
            return getattr(self.base, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self.options).items())
        return f"{type(self).__name__}({options}) of {self.base!r}"

    # --------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The base's state dict, with our entries in the state of each parameter."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._accelerator.publish()
        state_dict: dict[str, Any] = self.base.state_dict()
        if self._accelerator.ranks.size > 1:
            state_dict = checkpoint.broadcastable(state_dict)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of an unwrapped base: the history then starts empty.

        A checkpoint of another history size or another model raises ValueError and changes nothing.
        """
        state_dict = state_dict.copy()  # hooks may write to it
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        base_part, ours = checkpoint.split(state_dict)
        checkpoint.check(ours, self.base.param_groups, state_dict["param_groups"], self.options)
        opted_out = [not group.get("anderson", True) for group in self.base.param_groups]
        self.base.load_state_dict(base_part)
        for group in compress(self.base.param_groups, opted_out):
            group.setdefault("anderson", False)  # an unwrapped base knows nothing of it
        checkpoint.insert(self.base, ours, state_dict["param_groups"])
        self._accelerator.start_over()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Named keys only: an instance-level ``step``, as schedulers leave it, must not travel."""
        self._accelerator.publish()
        return {"base": self.base, "options": self.options, "enabled": self._accelerator.enabled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "base" not in state:  # from code that treats us as a plain optimizer
            self.base.__setstate__(state)
            return
        self.__dict__["_accelerator"] = _driver(state["base"], state["options"])
        self._accelerator.enabled = state["enabled"]
        self._accelerator.begin()
        super().__setstate__({})


def _blank(cls: type[Anderson], base_class: type[Optimizer], options: dict[str, Any]) -> Anderson:
    wrapped = cls.wrapping(base_class, **options)
    return wrapped.__new__(wrapped)


def as_discrepancy(given: Discrepancy | str | Callable[..., torch.Tensor] | None) -> Discrepancy | None:
    """The loss alone stands for all defaults."""
    return given if given is None or isinstance(given, Discrepancy) else Discrepancy(given)


def _driver(base: Optimizer, options: Options) -> Driver[Any]:
    return DiscrepancyDriver(base, options) if options.discrepancy else ResidualDriver(base, options)


def _check_driver(options: Options) -> None:
    """Options of the residual driver would be silently without effect."""
    if options.storage is not None and not isinstance(options.storage, Storage):
        raise ValueError(f"Invalid storage: {options.storage!r}. Allowed: None or a torch_anderson.Storage.")
    if options.discrepancy is None:
        return
    if options.storage and not options.storage.default_rows:
        raise ValueError("Invalid storage: of its options, shard and process_group are allowed with discrepancy.")
    defaults = {name: option.default for name, option in signature(Anderson.__init__).parameters.items()}
    for name, value in vars(options).items():
        if name not in ("discrepancy", "on_accept", "storage") and value != defaults[name]:
            raise ValueError(
                f"Invalid {name}: {value!r} has no effect with discrepancy. Allowed: on_accept; sizes and periods are "
                "set in Discrepancy(...)."
            )


def _check_base(base: Any, options: Options) -> None:
    if not isinstance(base, Optimizer):
        raise TypeError(f"Invalid base: {type(base).__name__}. Allowed: an instance of torch.optim.Optimizer.")
    if isinstance(base, Anderson):
        raise ValueError("Invalid base: it is accelerated already. Allowed: an optimizer that is not.")
    if isinstance(base, torch.optim.SparseAdam):
        raise ValueError("Invalid base: SparseAdam. Allowed: an optimizer of dense gradients.")
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(base).__mro__):
        raise ValueError(
            "Invalid base: ZeroRedundancyOptimizer, which hides its state from checkpoints. Allowed: the optimizer "
            "inside it; use fully_shard to shard its state, or Storage(shard=True) for the history."
        )
    _check_parameters(base, options)


def _check_parameters(base: Optimizer, options: Options) -> None:
    params = [param for _, param in accelerated(base.param_groups)]
    if not params:
        raise ValueError("Invalid base: it has no parameters to accelerate (all empty, frozen or opted out).")
    ranks = Ranks(options.storage.process_group if options.storage else None)
    for param in params:
        flat_view(part_of(param, ranks, shard=False).local(param))
    _check_meshes([param for param in params if is_dtensor(param)], ranks)


def _check_meshes(params: list[Any], ranks: Ranks) -> None:
    """The ranks that add up have to be those that share the model; some parameters may be on a part of them."""
    largest = max((param.device_mesh.size() for param in params), default=ranks.size)
    if largest != ranks.size:
        raise ValueError(
            f"Invalid parameters: they lie on a mesh of {largest} of {ranks.size} ranks. Give those that train this "
            "part of the model together (e.g. a pipeline stage) with Storage(process_group=...)."
        )
