"""Jumps that wait for their test, and the way back for the base if its step has to be undone."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._ranks.placement import is_dtensor, local_part
from .._records import NUMBERS, JumpRecord
from .._tensors.checkpoint import Entries, padded, unpadded
from .._tensors.members import members, takes_part

CONSTANT = frozenset({int, float, str, bool, type(None)})
"""Types that need no copy."""
BASE = "base_"
"""Begins the name of entries that hold the base's state before a pending jump."""


@dataclass
class Trial:
    """A jump that waits for its test, and what is needed to take it back.

    The test is the next gradient, which the base has not seen yet, or the next residual: the paper's test, which is
    noisy, since the two residuals come from two batches. Then the base has made a step, which is undone.
    """

    norm: float = 0.0
    """|r| / rate before the jump, if the next residual decides; otherwise 0."""
    state: "Snapshot" = field(default_factory=lambda: Snapshot())
    """The base's state at the jump, if the next residual decides."""
    record: JumpRecord | None = None
    """The record of the jump that waits; None if there is none."""

    @property
    def by_residual(self) -> bool:
        """Whether a jump waits for the next residual."""
        return self.record is not None and self.norm > 0

    @property
    def by_gradient(self) -> bool:
        """Whether a jump waits for the next gradient."""
        return self.record is not None and not self.norm

    def begin(self, record: JumpRecord, base: Optimizer | None = None, norm: float = 0.0) -> None:
        """Mark a jump as pending; with the base and the norm of the plain point's residual, the next one decides."""
        if base is not None:
            self.state.take(base)
        self.norm, self.record = norm, record

    def end(self) -> JumpRecord:
        """End the trial; returns its record."""
        assert self.record is not None
        record, self.record = self.record, None
        return record

    def take_back(self, base: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Return the base to where it was at the jump, and its groups to where they were before the last step."""
        self.state.restore(base)
        restore_groups(base, groups)

    def numbers(self) -> Tensor:
        """The pending record, for a checkpoint; NaN if there is none."""
        if self.record is None:
            return padded([], 1 + len(NUMBERS))
        return padded([self.norm, *(float(getattr(self.record, name)) for name in NUMBERS)], 1 + len(NUMBERS))

    def load(self, numbers: Tensor) -> None:
        """Undo ``numbers``."""
        values = unpadded(numbers)
        if values:
            self.norm, *numbers_of_record = values
            self.record = JumpRecord.from_numbers(numbers_of_record)

    def entries(self, base: Optimizer, param: Tensor) -> Entries:
        """What a checkpoint holds for a parameter: the base's state at the jump.

        If none is pending, a copy of the present state, since distributed checkpoints want names that do not change.
        """
        kept = (self.state.state if self.by_residual else base.state).get(param, {})
        return {BASE + str(name): _copied(x, None, []) for name, x in kept.items()} if isinstance(kept, dict) else {}

    def load_entries(self, param: Tensor, entries: Entries) -> None:
        """Undo ``entries``. State is converted to the parameter's type and device, as PyTorch does it for the base."""
        kept = {name.removeprefix(BASE): x for name, x in entries.items() if name.startswith(BASE)}
        found = {name: deepcopy(x) if name == "step" else _converted(deepcopy(x), param) for name, x in kept.items()}
        if found:
            self.state.state[param] = found


class Snapshot:
    """A copy of the base's state, in buffers that are used again.

    It covers the parameters that take part, and what the base keeps for all parameters together.
    """

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def take(self, base: Optimizer) -> None:
        """Copy the state. Entries absent now are absent in the copy, and vanish on ``restore``."""
        old, self.state = self.state, {}
        copies: list[tuple[Tensor, Tensor]] = []
        for key, kept in _taking_part(base):
            if isinstance(kept, dict):
                buffers = old.get(key, {})
                self.state[key] = {name: _copied(x, _fitting(x, buffers.get(name)), copies) for name, x in kept.items()}
            else:
                self.state[key] = _copied(kept, None, copies)
        _copy_all(copies)

    def restore(self, base: Optimizer) -> None:
        """Put the state back, in place where the tensors are still there, always on their device and in their type.

        A parameter that had no state has none again: many bases make it only where they find nothing.
        """
        copies: list[tuple[Tensor, Tensor]] = []
        for key, kept in _taking_part(base):
            if key not in self.state:
                if isinstance(key, Tensor):
                    del base.state[key]
            elif isinstance(kept, dict):
                saved = self.state[key]
                for name in kept.keys() - saved.keys():
                    del kept[name]
                for name, value in saved.items():
                    kept[name] = _copied(value, kept.get(name), copies)
            else:
                base.state[key] = _copied(self.state[key], None, copies)
        _copy_all(copies)


def _taking_part(base: Optimizer) -> Iterator[tuple[Any, Any]]:
    params = set(map(id, members(base.param_groups)))  # the hash of a tensor takes several times as long
    return ((key, kept) for key, kept in list(base.state.items()) if not isinstance(key, Tensor) or id(key) in params)


def _fitting(value: Any, buffer: Any) -> Any:
    """The buffer of a snapshot, if it can hold the value as it is."""
    alike = isinstance(value, Tensor) and isinstance(buffer, Tensor) and buffer.dtype == value.dtype
    return buffer if alike and buffer.device == value.device else None


def _copied(value: Any, buffer: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """A copy of nested containers of tensors; those that fit into ``buffer`` are copied later, all at once."""
    if isinstance(value, Tensor):
        if isinstance(buffer, Tensor) and buffer.shape == value.shape:
            if buffer is not value:
                copies.append((local_part(buffer), local_part(value)) if is_dtensor(buffer) else (buffer, value))
            return buffer
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(item, None, copies) for name, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, None, copies) for item in value]
    return value if type(value) in CONSTANT else deepcopy(value)


def _converted(value: Any, param: Tensor) -> Any:
    """Nested containers with their tensors on the parameter's device, and in its type if both are real."""
    if isinstance(value, Tensor):
        real = value.is_floating_point() and param.is_floating_point()
        return value.to(param.device, param.dtype) if real else value.to(param.device)
    if isinstance(value, dict):
        return {name: _converted(item, param) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_converted(item, param) for item in value)
    return value


def _copy_all(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Make the copies, with one call for all on the same device."""
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for target, source in copies:
        alike.setdefault((target.device, source.device), []).append((target, source))
    for (there, here), found in alike.items():
        targets, sources = zip(*found, strict=True)
        if there == here:
            torch._foreach_copy_(targets, sources)
        else:
            for target, source in found:
                target.copy_(source)


def group_values(base: Optimizer) -> list[dict[str, Any]]:
    """The groups' entries as they are now: some optimizers count their steps there."""
    return [
        {name: x if type(x) in CONSTANT else _copied(x, None, []) for name, x in group.items() if name != "params"}
        for group in base.param_groups
    ]


def restore_groups(base: Optimizer, values: list[dict[str, Any]]) -> None:
    """Undo what the base's step wrote into its groups."""
    copies: list[tuple[Tensor, Tensor]] = []
    for group, saved in zip(base.param_groups, values, strict=True):
        if not takes_part(group):
            continue
        for name in group.keys() - saved.keys() - {"params"}:
            del group[name]
        for name, value in saved.items():
            group[name] = _copied(value, group.get(name), copies)
    _copy_all(copies)
