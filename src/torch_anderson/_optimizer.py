"""``WrappedOptimizer``: the contract with PyTorch that both accelerators keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ._calls import BaseStep, global_hooks
from ._driver import Driver
from ._options import Options
from ._records import JumpRecord, Stats
from ._tensors import checkpoint
from ._tensors.blocks import Space
from ._tensors.members import all_parameters, check_base, check_parameters, takes_part
from ._tensors.state import StateView

FORWARDED = frozenset({"train", "eval"})
"""Modes of schedule-free bases."""


class WrappedOptimizer(Optimizer, ABC):
    """An optimizer around another one, the base, which makes the steps. A driver decides what else happens: it follows
    parameters that change, agrees with other ranks once, counts rests, and may undo a jump as gradients are cleared."""

    _driver: Driver

    def __init__(self, base: Optimizer, options: Options):
        check_base(base, options.process_group)
        if isinstance(base, WrappedOptimizer):
            raise ValueError("Invalid base: it is accelerated already. Allowed: an optimizer that is not.")
        super().__init__(base.param_groups or [{"params": []}], {})  # hooks; the groups are the base's
        self._driver = self._make_driver(base, options)
        self._enabled = True

    @staticmethod
    @abstractmethod
    def _make_driver(base: Optimizer, options: Any) -> Driver:
        """Build the driver, which is the algorithm of the subclass."""

    @classmethod
    def wrapping(cls, base_class: type[Optimizer], **options: Any) -> type[Self]:
        """Make a class that builds ``base_class`` and wraps it, for tools that want a class.

        >>> from torch_anderson import Anderson
        >>> import torch
        >>> AndersonAdam = Anderson.wrapping(torch.optim.Adam, period=5)
        >>> optimizer = AndersonAdam([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        >>> type(optimizer.base).__name__, isinstance(optimizer, Anderson)
        ('Adam', True)
        """

        made: Any = cls, base_class, tuple(options.items())
        return _wrapping(*made)  # type: ignore[no-any-return]

    # ----------------------------------------------------------------------------------------------------- training

    def _step(self, closure: Callable[[], Any] | None, given: Any) -> Any:
        """Make one base step, accelerated where that can change anything. Steps at rest cost next to nothing.

        ``given`` is the samples or the loss function for this step; None: what ``set_batch`` gave.
        """
        driver = self._driver
        before, driver.given = driver.given, None
        if not driver.resting or not driver.agreed or not self._enabled or is_compiling() or global_hooks():
            return self._accelerated_step(closure, before if given is None else given)
        driver.count_rest()
        return driver.base.step() if closure is None else driver.base.step(closure)

    @_disable_dynamo  # torch.compiler.disable, without importing the compiler before it is needed
    def _accelerated_step(self, closure: Callable[[], Any] | None, given: Any) -> Any:
        """Let the driver make the step, with memory that fits the parameters and options that fit those of other ranks.

        The driver calls ``base_step`` where its algorithm wants the base's step.
        """
        driver = self._driver
        base_step = BaseStep(driver, closure, given)
        if not self._enabled:
            return base_step()[0]
        if all(group.get("lr") == 0 for group in driver.base.param_groups):
            return driver.idle(base_step)
        if space := driver.space.if_changed(driver.base.param_groups):
            driver.follow(space)
        if not driver.agreed:
            driver.agree(given)
        return driver.step(base_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients as the base does."""
        driver = self._driver
        if not driver.resting:  # then no jump is pending
            driver.gradients_cleared()
        if driver.clears:
            driver.base.zero_grad(set_to_none=set_to_none)
        else:
            driver.base.zero_grad()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within this context every step is the base's own, bit for bit; stored pairs and a pending jump stay."""
        self._driver.cancel()
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def reset_history(self) -> None:
        """Forget all that was measured, e.g. after loading other weights into the model; the weights stay."""
        self._driver.reset_history()

    def register_acceleration_hook(self, hook: Callable[[JumpRecord], None]) -> RemovableHandle:
        """Call ``hook(record)`` after every acceleration that was computed: accepted, rejected or skipped.

        >>> import torch
        >>> from torch_anderson import Anderson
        >>> optimizer = Anderson(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
        >>> handle = optimizer.register_acceleration_hook(lambda record: print(record.gain, record.cause))
        >>> handle.remove()
        """
        handle = RemovableHandle(self._driver.hooks)
        self._driver.hooks[handle.id] = hook
        return handle

    @property
    def base(self) -> Optimizer:
        """The optimizer that makes the steps."""
        return self._driver.base

    @property
    def options(self) -> Any:
        """The options, as checked at construction."""
        return self._driver.options

    @property
    def stats(self) -> Stats:
        """What happened so far; ``stats.as_dict()`` for a logger."""
        return self._driver.stats

    # ------------------------------------------------------ what PyTorch and its tools expect of an optimizer
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
        """The base's state, in which our entries appear with names that begin with ``anderson_``."""
        return StateView(self.base, self._entries, partial(self._start_over, self.base, {}))

    @state.setter
    def state(self, state: Any) -> None:
        if self._built:
            view = self.state
            for key in [key for key in self.base.state if key not in state]:
                del self.base.state[key]
            for key, value in state.items():
                view[key] = value

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
        """Whether there is a driver. Before that, what ``Optimizer.__init__`` sets or adds is ignored."""
        return hasattr(self, "_driver")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base. The history restarts."""
        if self._built:
            self.base.add_param_group(param_group)
            try:
                check_parameters(self.base.param_groups, self.options.process_group)
            except ValueError:
                self.base.param_groups.pop()
                raise

    def __getattr__(self, name: str) -> Any:
        if name in FORWARDED:
            return getattr(self.base, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self.options).items())
        return f"{type(self).__name__}({options}) of {self.base!r}"

    # -------------------------------------------------------------------------------------------------- checkpoints

    def _entries(self, only: Tensor | None = None) -> dict[Tensor, checkpoint.Entries]:
        """What we keep for each parameter, or for one of them; nothing before there is any state."""
        if self.base.state or self._driver.entered or self._driver.steps:
            self._driver.look()
        return self._driver.entries(only)

    def state_dict(self) -> dict[str, Any]:
        """The base's state dict, with our entries in the state of each parameter."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state_dict = checkpoint.merge(self.base.state_dict(), self._entries(), self.base.param_groups)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of an unwrapped base: the history then starts empty.

        A checkpoint of another history size or another model raises ValueError and changes nothing. The weights may be
        loaded later: what is written to them before the next step counts as part of the checkpoint.
        """
        state_dict = state_dict.copy()  # hooks may write to it
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        base_part, found = checkpoint.split(state_dict, self.base.param_groups)
        self._driver.check(found)
        took_part = [takes_part(group) for group in self.base.param_groups]
        self.base.load_state_dict(base_part)
        for group, took in zip(self.base.param_groups, took_part, strict=True):
            if not took:
                group.setdefault("anderson", False)  # an unwrapped base does not know it
        self._start_over(self.base, found)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _start_over(self, base: Optimizer, found: dict[Tensor, checkpoint.Entries]) -> None:
        """Replace the driver by a new one that goes on from what was found; hooks stay."""
        options, hooks = self.options, self._driver.hooks
        self._driver = self._make_driver(base, options)
        self._driver.hooks = hooks
        if found:
            space = Space(base.param_groups, options.process_group, self._driver.shard)
            self._driver.enter(space, found)

    def __copy__(self) -> Self:
        """A shallow copy shares everything, the history included, as that of any optimizer does."""
        other = object.__new__(type(self))
        other.__dict__.update({name: value for name, value in vars(self).items() if name != "step"})
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Named keys only: an instance-level ``step``, as schedulers leave it, must not travel."""
        found = self._entries()
        kept = {i: _cloned(found[p]) for i, p in enumerate(all_parameters(self.param_groups)) if p in found}
        return {"base": self.base, "options": self.options, "enabled": self._enabled, "kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "base" not in state:  # from code that treats us as a plain optimizer
            self.base.__setstate__(state)
            return
        self.__dict__["_driver"] = self._make_driver(state["base"], state["options"])
        self._enabled = state["enabled"]
        params = all_parameters(state["base"].param_groups)
        self._start_over(state["base"], {params[i]: kept for i, kept in state["kept"].items()})
        self._driver.watch()
        super().__setstate__({})


def _cloned(entries: checkpoint.Entries) -> checkpoint.Entries:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in entries.items()}


@cache  # a copy is of the same class
def _wrapping(cls: Any, base_class: Any, options: Any) -> Any:
    def __init__(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, base_class(params, *args, **kwargs), **dict(options))

    def __reduce__(self: Any) -> tuple[Any, ...]:
        return _blank, (cls, base_class, options), self.__getstate__()

    members = {"__init__": __init__, "__reduce__": __reduce__, "__module__": cls.__module__}
    return type(f"{cls.__name__}{base_class.__name__}", (cls,), members)


def _blank(cls: Any, base_class: Any, options: Any) -> Any:
    return object.__new__(_wrapping(cls, base_class, options))
