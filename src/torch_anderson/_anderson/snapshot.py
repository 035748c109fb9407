"""A copy of the base's state, by which a step of the base is undone: the paper's test needs a step to decide."""

from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .._tensors.checkpoint import Entries
from .._tensors.members import members, takes_part

BASE = "base_"
"""Begins the name of entries of a checkpoint that hold the base's state at a pending jump."""


class Snapshot:
    """The state of the parameters that take part, and what the base keeps for all parameters together."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def take(self, base: Optimizer) -> None:
        """Copy the state."""
        self.state = {key: cloned(base.state[key]) for key in _keys(base)}

    def restore(self, base: Optimizer) -> None:
        """Put the state back. A parameter that had none has none again: many bases make it only where there is none."""
        for key in _keys(base):
            if key in self.state:
                base.state[key] = self.state[key]
            elif isinstance(key, Tensor):
                del base.state[key]
        self.state = {}

    def entries(self, base: Optimizer, param: Tensor) -> Entries:
        """What a checkpoint holds for a parameter.

        If no jump is pending, a copy of the present state, since distributed checkpoints want names that do not change.
        """
        kept = (self.state or base.state).get(param, {})
        return {BASE + str(name): cloned(value) for name, value in kept.items()} if isinstance(kept, dict) else {}

    def load_entries(self, param: Tensor, entries: Entries) -> None:
        """Undo ``entries``; tensors are converted to the parameter's type and device, as PyTorch does for the base."""
        kept = {name.removeprefix(BASE): cloned(x) for name, x in entries.items() if name.startswith(BASE)}
        if kept:
            self.state[param] = {name: x if name == "step" else _fitted(x, param) for name, x in kept.items()}


def _keys(base: Optimizer) -> list[Any]:
    params = set(map(id, members(base.param_groups)))  # the hash of a tensor takes several times as long
    return [key for key in base.state if not isinstance(key, Tensor) or id(key) in params]


def cloned(value: Any) -> Any:
    """A copy of nested containers of tensors."""
    match value:
        case Tensor():
            return value.detach().clone()
        case dict():
            return {name: cloned(item) for name, item in value.items()}
        case list():
            return [cloned(item) for item in value]
    return deepcopy(value)


def _fitted(value: Any, param: Tensor) -> Any:
    """Nested containers with their tensors on the parameter's device, and in its type if both are real."""
    match value:
        case Tensor():
            real = value.is_floating_point() and param.is_floating_point()
            return value.to(param.device, param.dtype if real else None)
        case dict():
            return {name: _fitted(item, param) for name, item in value.items()}
        case list() | tuple():
            return type(value)(_fitted(item, param) for item in value)
    return value


def group_values(base: Optimizer) -> list[dict[str, Any]]:
    """The groups' entries as they are now: some optimizers count their steps there."""
    return [{name: cloned(x) for name, x in group.items() if name != "params"} for group in base.param_groups]


def restore_groups(base: Optimizer, values: list[dict[str, Any]]) -> None:
    """Undo what the base's step wrote into its groups; tensors, such as a learning rate, stay the same objects."""
    for group, saved in zip(base.param_groups, values, strict=True):
        if takes_part(group):
            for name in group.keys() - saved.keys() - {"params"}:
                del group[name]
            for name, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
