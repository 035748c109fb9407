"""How steps are called: ours with its hooks, and the base's without them, its gradient measured on the way."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def with_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Make a step call its hooks, as torch does for every optimizer, but leave the profiler's record to the base.

    That record takes as long as all else that a resting step of ours does.
    """

    @wraps(step)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        self = args[0]
        if _global_optimizer_pre_hooks or self._optimizer_step_pre_hooks:  # an empty loop takes longer
            args, kwargs = _changed_by_hooks(step, args, kwargs)
        found = step(*args, **kwargs)
        if self._optimizer_step_post_hooks or _global_optimizer_post_hooks:
            for after in (*self._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
                after(self, args, kwargs)
        return found

    hooked.hooked = True  # type: ignore[attr-defined]  # torch looks for this before it adds its own
    return hooked


def _changed_by_hooks(step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The arguments of a step, after the hooks that are called before it."""
    self = args[0]
    for hook in (*_global_optimizer_pre_hooks.values(), *self._optimizer_step_pre_hooks.values()):
        replaced = hook(self, args, kwargs)
        if replaced is not None:
            if not isinstance(replaced, tuple) or len(replaced) != 2:
                raise RuntimeError(f"{step} must return None or a tuple of (new_args, new_kwargs), got {replaced}.")
            args, kwargs = replaced
    return args, kwargs


def global_hooks() -> bool:
    """Whether anybody listens to the steps of all optimizers."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


class JumpRefused(Exception):
    """The gradient has taken back a jump instead of moving the base."""

    loss: Any = None
    """What the closure returned."""


class Driven(Protocol):
    """What a base step needs to know of the driver."""

    base: Optimizer
    given: Any


class BaseStep:
    """One step of the base, which a driver makes where its algorithm wants it."""

    def __init__(self, driver: Driven, closure: Callable[[], Any] | None, given: Any):
        self.driver = driver
        self.closure = closure
        self.given = given
        """The samples or the loss function of this step, as far as they were given before it."""

    def __call__(self, measure: Callable[[], None] | None = None) -> tuple[Any, Any]:
        """Make the step; returns what the base returns, and what was given for this step, before or during it.

        ``measure`` is called once when the gradient is there, before the base sees it: after the first evaluation of
        the closure, if there is one. If it raises ``JumpRefused``, the base makes no step. Global step hooks see the
        outer optimizer; the base's step would call them again.
        """
        base, closure = self.driver.base, self.closure
        if measure and closure is None:
            measure()
        elif measure and closure is not None:
            closure = _measuring(closure, measure)
        arguments = () if closure is None else (closure,)  # some bases take none
        try:
            loss = _without_global_hooks(base, arguments) if global_hooks() else base.step(*arguments)
        finally:
            during, self.driver.given = self.driver.given, None  # some frameworks call set_batch in the closure
        return loss, self.given if during is None else during


def _without_global_hooks(base: Optimizer, arguments: tuple[Any, ...]) -> Any:
    pre, post = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    kept = dict(pre), dict(post)
    pre.clear()
    post.clear()
    try:
        return base.step(*arguments)
    finally:
        pre.update(kept[0])
        post.update(kept[1])


def _measuring(closure: Callable[[], Any], measure: Callable[[], None]) -> Callable[[], Any]:
    """A closure whose first evaluation is measured. A refusal ends the base's step before it has changed anything."""
    waiting = True

    def measured() -> Any:
        nonlocal waiting
        loss = closure()
        if waiting:
            waiting = False
            try:
                measure()
            except JumpRefused as refused:
                refused.loss = loss
                raise
        return loss

    return measured
