"""The wrapped optimizer's own state: going back to it, and forgetting its momentum."""

from collections.abc import MutableMapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .layout import accelerated

PREFIX = "anderson_"
"""Begins the name of every entry that we keep beside the base's own in its state."""

FIRST_MOMENTS = ("momentum_buffer", "exp_avg")

NOT_PROPORTIONAL = (torch.optim.Rprop, torch.optim.LBFGS, torch.optim.ASGD, torch.optim.Adafactor)
"""Optimizers whose step is not proportional to the learning rate."""

State = MutableMapping[Any, Any]


def own_entries(state: State) -> dict[str, Any]:
    """The base's entries for one parameter, without ours."""
    return {key: value for key, value in state.items() if not str(key).startswith(PREFIX)}


def learning_rate(group: dict[str, Any]) -> float:
    """The group's learning rate; 1 where the base chooses it by itself."""
    rate = group.get("lr")
    return 1.0 if rate is None else float(rate)


class Snapshot:
    """A copy of the base's state in buffers that are used again: what it keeps for the parameters that take part,
    and for all parameters together."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def take(self, base: Optimizer) -> None:
        """Copy the state. Entries absent now are absent in the copy, and vanish on ``restore``."""
        old, self.state = self.state, {}
        for key, entries in _taking_part(base):
            if isinstance(entries, dict):
                buffers = old.get(key, {})
                own = own_entries(entries)
                self.state[key] = {name: _copied(value, buffers.get(name)) for name, value in own.items()}
            else:
                self.state[key] = _copied(entries, None)

    def restore(self, base: Optimizer) -> None:
        """Put the state back, in place where the tensors are still there.

        A parameter that had none is without ours too, since many a base makes its own only where it finds nothing.
        """
        for key, entries in _taking_part(base):
            if key not in self.state:
                if isinstance(key, Tensor):
                    del base.state[key]
            elif isinstance(entries, dict):
                saved = self.state[key]
                for name in own_entries(entries).keys() - saved.keys():
                    del entries[name]
                for name, value in saved.items():
                    entries[name] = _copied(value, entries.get(name))
            else:
                base.state[key] = _copied(self.state[key], None)


def _taking_part(base: Optimizer) -> list[tuple[Any, Any]]:
    params = {param for _, param in accelerated(base.param_groups)}
    return [(key, entries) for key, entries in base.state.items() if not isinstance(key, Tensor) or key in params]


def _copied(value: Any, buffer: Any) -> Any:
    """A copy of nested containers of tensors, in ``buffer``'s memory where it fits."""
    if isinstance(value, Tensor):
        fits = isinstance(buffer, Tensor) and buffer.shape == value.shape and buffer.dtype == value.dtype
        if fits and buffer.device == value.device and buffer is not value:
            return buffer.copy_(value)
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(item, None) for name, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, None) for item in value]
    return deepcopy(value)


def group_values(base: Optimizer) -> list[dict[str, Any]]:
    """The groups' entries as they are now: some optimizers count their steps there."""
    return [
        {name: _copied(value, None) for name, value in group.items() if name != "params"} for group in base.param_groups
    ]


def restore_group_values(base: Optimizer, values: list[dict[str, Any]]) -> None:
    """Undo what the base's step wrote into its groups."""
    for group, saved in zip(base.param_groups, values, strict=True):
        if not group.get("anderson", True):
            continue
        for name in group.keys() - saved.keys() - {"params"}:
            del group[name]
        for name, value in saved.items():
            group[name] = _copied(value, group.get(name))


def reset_momentum(base: Optimizer) -> bool:
    """Zero the first moments of the parameters that take part; step counts and second moments stay. False if the
    base keeps none that we know of."""
    known = False
    for _, entries in _taking_part(base):
        for name in FIRST_MOMENTS if isinstance(entries, dict) else ():
            if isinstance(entries.get(name), Tensor):
                entries[name].zero_()
                known = True
    return known
