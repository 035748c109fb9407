"""Where the acceleration's memory lives in the optimizer's state, so that every checkpoint tool carries it.

Each parameter's state gets entries named ``anderson_...`` beside the base's own: tensors shaped like the
parameter (with a leading dimension for rows), which are views of the flat buffers, and small float64 tensors
with the rest, repeated for every parameter. Distributed checkpoints keep nothing else: top-level keys, strings
and lists would be lost.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .base_state import PREFIX
from .flat import shaped_like
from .layout import Group
from .options import Options
from .parameters import Views
from .shards import Part, is_dtensor

if TYPE_CHECKING:
    from .driver import Driver

BASE_PREFIX = PREFIX + "base_"
Entries = dict[Any, dict[str, Any]]


class Entry(NamedTuple):
    """What is kept for a parameter."""

    param: Tensor
    part: Part
    views: dict[str, Tensor]
    """Of the block's vectors by name, in the shape of the part of the parameter that this rank keeps."""

    def ahead(self, name: str) -> int:
        """Dimensions before the parameter's."""
        return self.views[name].dim() - _real(self.part.local(self.param)).dim()


def entries(block: Views) -> Iterator[Entry]:
    """Of all parameters of a block."""
    vectors = block.vectors()
    ends = zip(block.params, block.parts, block.offsets, block.offsets[1:], strict=False)
    for param, part, start, stop in ends:
        local = part.local(param)
        yield Entry(
            param,
            part,
            {PREFIX + name: shaped_like(rows[..., start:stop], local) for name, rows in vectors.items()},
        )


def publish(run: "Driver[Any]", stepped: bool) -> list[Tensor]:
    """Put the entries into the base's state; returns the parameters that have to wait.

    A parameter whose base state is still to be made must wait: several optimizers make it only where they find
    none at all. A gradient tells that it is made if the base has just ``stepped``. Where the base keeps no
    dictionary, there is no place for entries: such a history is not part of a checkpoint.
    """
    waiting = []
    for block in run.blocks:
        numbers = torch.tensor(run.numbers(block), dtype=torch.float64)
        run.mark = numbers if block is run.blocks[0] else run.mark
        for entry in entries(block):
            param = entry.param
            state = run.base.state.get(param, {})
            if not isinstance(state, dict):
                continue
            if not state and not (stepped and param.grad is not None):
                waiting.append(param)
                continue
            state = run.base.state[param]
            for name in _names(state, BASE_PREFIX):
                del state[name]
            state.update({name: entry.part.entry(view, entry.ahead(name)) for name, view in entry.views.items()})
            state.update({BASE_PREFIX + name: value for name, value in run.base_entries(param).items()})
            state[PREFIX + "numbers"] = numbers
    return waiting


def withdraw(base: Optimizer) -> None:
    """Take all entries out of the base's state."""
    for state in base.state.values():
        for name in _names(state, PREFIX):
            del state[name]


def in_place(run: "Driver[Any]") -> bool:
    """Whether the base's state still holds the entries that were put there."""
    if not run.blocks or run.waiting:
        return True
    state = run.base.state.get(run.blocks[0].params[0], {})
    return not isinstance(state, dict) or state.get(PREFIX + "numbers") is run.mark


def _names(state: Any, prefix: str) -> list[str]:
    return [name for name in state if str(name).startswith(prefix)] if isinstance(state, dict) else []


def adopt(run: "Driver[Any]") -> None:
    """Take over the entries found in the base's state: from a checkpoint, a copy, or another device.

    A parameter without entries has had no gradient so far: its residuals are zero, and ``stand_still`` does the rest.
    """
    known = [block for block in run.blocks if _adopt_block(run, block)]
    for block in run.blocks if known else []:
        if block not in known:
            block.take_progress(known[0])


def stand_still(run: "Driver[Any]") -> None:
    """Let the map, the anchor and the window of parameters without entries be where these stand.

    Done before a step, not when a checkpoint is loaded: the weights may be loaded later.
    """
    for block in run.blocks:
        for param, part, views in entries(block):
            state = run.base.state.get(param, {})
            if isinstance(state, dict) and PREFIX + "numbers" not in state:
                for name in run.points:
                    if PREFIX + name in views:
                        views[PREFIX + name].copy_(_real(part.local(param)))


def _adopt_block(run: "Driver[Any]", block: Views) -> bool:
    found = False
    for entry in entries(block):
        param, part, views = entry
        state = run.base.state.get(param, {})
        if not isinstance(state, dict) or not all(name in state for name in views):
            continue
        found_here = {name: part.local_rows(state[name], entry.ahead(name)) for name in views}
        if not all(found_here[name].shape == view.shape for name, view in views.items()):
            continue
        for name, view in views.items():
            view.copy_(found_here[name])
        saved = {name.removeprefix(BASE_PREFIX): deepcopy(state[name]) for name in _names(state, BASE_PREFIX)}
        if saved:
            run.take_base_entries(param, saved)
        if not found:
            run.set_numbers(block, state[PREFIX + "numbers"].tolist())
        found = True
    if found:
        block.after_adoption()
    return found


def split(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Entries]:
    """The base's part of a checkpoint, and ours by parameter. Nothing in ``state_dict`` is changed."""
    base_state, ours = {}, {}
    for key, state in state_dict["state"].items():
        if isinstance(state, dict):
            ours[key] = {name: value for name, value in state.items() if str(name).startswith(PREFIX)}
            state = {name: value for name, value in state.items() if name not in ours[key]}
        if state or not ours.get(key):
            base_state[key] = state
    return {**state_dict, "state": base_state}, {key: found for key, found in ours.items() if found}


def broadcastable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint whose plain entries of ours are contiguous: torch broadcasts others wrongly. It costs a copy."""
    state = {
        key: {name: _contiguous(name, value) for name, value in found.items()} if isinstance(found, dict) else found
        for key, found in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _contiguous(name: Any, value: Any) -> Any:
    plain = isinstance(value, Tensor) and not is_dtensor(value)
    return value.contiguous() if plain and str(name).startswith(PREFIX) else value


def check(ours: Entries, groups: Sequence[Group], saved_groups: Sequence[Group], options: Options) -> None:
    """Raise if a checkpoint's entries do not fit the parameters or the options."""
    params = _by_key(groups, saved_groups)
    for key, found in ours.items():
        shape = _real(params[key]).shape if key in params else None
        iterate = found.get(PREFIX + "iterate")
        if iterate is None or iterate.shape != shape:
            there = "none" if iterate is None else str(tuple(iterate.shape))
            here = "none" if shape is None else str(tuple(shape))
            raise ValueError(
                f"The checkpoint is of another model: parameter {key} has shape {there} there, {here} here."
            )
        cycle_length = int(found[PREFIX + "numbers"][0])
        rows = options.rows.items() if (cycle_length < 0) == (options.cycle_length < 0) else ()
        for name, (option, count) in rows:
            _check_rows(found, name, option, count)
        if cycle_length != options.cycle_length:
            raise ValueError(
                "The checkpoint was made with another driver, another residual, or other cycles. "
                "Build Anderson with the options of the checkpoint."
            )


def _check_rows(found: dict[str, Any], name: str, option: str, expected: int) -> None:
    have = len(found[PREFIX + name]) if PREFIX + name in found else 0
    if have != expected:
        raise ValueError(
            f"The checkpoint was made with another {option}: it has {have} rows of {name}, this optimizer {expected}. "
            "Build Anderson with the options of the checkpoint."
        )


def insert(base: Optimizer, ours: Entries, saved_groups: Sequence[Group]) -> None:
    """Put our part of a checkpoint into the base's state, from where ``adopt`` takes it."""
    params = _by_key(base.param_groups, saved_groups)
    withdraw(base)
    for key, found in ours.items():
        base.state[params[key]].update(found)


def _by_key(groups: Sequence[Group], saved_groups: Sequence[Group]) -> dict[Any, Tensor]:
    saved = [key for group in saved_groups for key in group["params"]]
    return dict(zip(saved, (param for group in groups for param in group["params"]), strict=False))


def _real(param: Tensor) -> Tensor:
    return torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
