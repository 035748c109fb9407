"""The schema of checkpoints: what is kept for the parameters, as named tensors in the state of each.

Every parameter that takes part gets entries named ``anderson_...`` in addition to the base's: tensors in its shape
(with a leading dimension for rows), which are views of the flat buffers, and small float64 tensors with all other
numbers, repeated for every parameter. Distributed checkpoints keep nothing else: top-level keys, strings and lists
are lost.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import IntEnum
from math import isnan, nan
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from .._ranks.placement import Placement
from .blocks import Space
from .members import Group, all_parameters, real_view, shaped_like

PREFIX = "anderson_"
"""Begins the name of every entry that is not the base's."""
VERSION = 4.0
"""Version of the schema; a checkpoint of another one is refused."""
STATE = "state"

Entries = dict[str, Any]
"""What is kept for one parameter, by name, without the prefix."""
Vectors = dict[str, list[Tensor]]
"""What is kept in the length of the parameters, by name: vectors and matrices of rows, one for each block."""
S = TypeVar("S")


class Saved(NamedTuple):
    """All that an accelerator keeps: everything needed to go on bit by bit."""

    vectors: Vectors
    numbers: dict[str, Tensor]
    """The packed state, and small tensors."""
    own: Callable[[Tensor], Entries] = lambda _: {}
    """Further entries of one parameter."""


# ------------------------------------------------------------------------------------------- dataclasses as tensors


def pack(state: Any, kind: int) -> Tensor:
    """The fields of a dataclass as one tensor, behind the version and the kind of accelerator; None is NaN."""
    values = [getattr(state, field.name) for field in fields(state)]
    return torch.tensor([VERSION, kind, *(nan if x is None else float(x) for x in values)], dtype=torch.float64)


def unpack(cls: type[S], packed: Tensor) -> S:
    """Undo ``pack``."""
    hints = get_type_hints(cls)
    named = zip(fields(cls), packed.tolist()[2:], strict=True)  # type: ignore[arg-type]
    return cls(**{field.name: _converted(hints[field.name], value) for field, value in named})


def _converted(kind: Any, value: float) -> Any:
    if isnan(value) and kind not in (int, bool, float):
        return None
    if kind is bool or kind is int or (isinstance(kind, type) and issubclass(kind, IntEnum)):
        return kind(int(value))
    return value


def padded(values: Sequence[float], length: int) -> Tensor:
    """A list as a tensor of constant length, since distributed checkpoints want shapes that do not change."""
    return torch.tensor([*values, *[nan] * (length - len(values))], dtype=torch.float64)


def unpadded(values: Tensor) -> list[float]:
    """Undo ``padded``."""
    return [value for value in values.tolist() if not isnan(value)]


# ------------------------------------------------------------------------------------------------ entries by parameter


class _Piece(NamedTuple):
    """A parameter, and its part of every vector."""

    param: Tensor
    placement: Placement
    views: dict[str, Tensor]

    def ahead(self, name: str) -> int:
        """Number of dimensions before the parameter's."""
        return self.views[name].dim() - real_view(self.placement.local(self.param)).dim()


def _pieces(space: Space, vectors: Vectors, only: Tensor | None = None) -> Iterator[_Piece]:
    for i, block in enumerate(space.blocks):
        bounds = zip(block.params, block.placements, block.offsets, block.offsets[1:], strict=False)
        for param, placement, start, stop in bounds:
            if only is not None and param is not only:
                continue
            local = placement.local(param)
            views = {name: shaped_like(parts[i][..., start:stop], local) for name, parts in vectors.items()}
            yield _Piece(param, placement, views)


def entries(space: Space, saved: Saved, only: Tensor | None = None) -> dict[Tensor, Entries]:
    """What a checkpoint holds for each parameter, or for one; tensors are views of the vectors where they can be."""
    return {
        piece.param: {name: piece.placement.entry(view, piece.ahead(name)) for name, view in piece.views.items()}
        | saved.numbers
        | saved.own(piece.param)
        for piece in _pieces(space, saved.vectors, only)
    }


def adopt(space: Space, vectors: Vectors, found: dict[Tensor, Entries]) -> bool:
    """Copy entries into the vectors; False, with nothing copied, unless they are those of exactly these parameters."""
    if not found:
        return False
    pieces = list(_pieces(space, vectors))
    if {piece.param for piece in pieces} != set(found):
        return False
    if not all(name in found[piece.param] for piece in pieces for name in vectors):
        return False
    for piece in pieces:
        for name, view in piece.views.items():
            view.copy_(piece.placement.local_rows(found[piece.param][name], piece.ahead(name)))
    return True


# ------------------------------------------------------------------------------------------------------- state dicts


def merge(state_dict: dict[str, Any], found: dict[Tensor, Entries], groups: Sequence[Group]) -> dict[str, Any]:
    """Add entries to the base's state dict; those of parameters whose state is not a dictionary are left out.

    If the base's state dict does not have PyTorch's layout, it becomes one entry of a new dictionary.
    """
    ours = {index: found[param] for index, param in enumerate(all_parameters(groups)) if param in found}
    if not is_standard(state_dict):
        return {"base": state_dict, "accelerator": ours}
    state = dict(state_dict["state"])
    for index, kept in ours.items():
        theirs = state.get(index, {})
        if isinstance(theirs, dict):
            state[index] = theirs | {PREFIX + name: value for name, value in kept.items()}
    return {**state_dict, "state": state}


def split(state_dict: dict[str, Any], groups: Sequence[Group]) -> tuple[dict[str, Any], dict[Tensor, Entries]]:
    """The base's part of a checkpoint, and our entries by parameter. Nothing in ``state_dict`` is changed."""
    params = all_parameters(groups)
    if "accelerator" in state_dict:
        return state_dict["base"], {params[index]: kept for index, kept in state_dict["accelerator"].items()}
    if not is_standard(state_dict):
        return state_dict, {}
    saved_keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    by_key = dict(zip(saved_keys, params, strict=False))
    theirs: dict[Any, Any] = {}
    ours: dict[Tensor, Entries] = {}
    for key, state in state_dict["state"].items():
        found = own_entries(state)
        if found:
            if key not in by_key:
                raise ValueError(f"The checkpoint is of another model: there is no parameter {key} here.")
            ours[by_key[key]] = found
            state = base_entries(state)
        if state or not found:
            theirs[key] = state
    return {**state_dict, "state": theirs}, ours


def is_standard(state_dict: Any) -> bool:
    """Whether an optimizer's state dict has the layout of torch's own."""
    return isinstance(state_dict.get("state"), dict) and isinstance(state_dict.get("param_groups"), list)


def own_entries(state: Any) -> Entries:
    """Our entries in the state of one parameter, without their prefix."""
    if not isinstance(state, dict):
        return {}
    return {str(name).removeprefix(PREFIX): x for name, x in state.items() if str(name).startswith(PREFIX)}


def base_entries(state: dict[Any, Any]) -> dict[Any, Any]:
    """The base's entries in the state of one parameter."""
    return {name: value for name, value in state.items() if not str(name).startswith(PREFIX)}


Shapes = dict[str, tuple[str, tuple[int, ...] | None]]
"""For each name: the option that it depends on, and its dimensions before the parameter's; None if it is not kept."""


def check(found: dict[Tensor, Entries], kind: int, shapes: Shapes, numbers: dict[str, Tensor]) -> None:
    """Raise ValueError if entries do not fit the accelerator, its options or the parameters, or are damaged.

    ``numbers`` are small tensors of the shapes that entries of these names must have.
    """
    for param, kept in found.items():
        state = kept.get(STATE)
        if not isinstance(state, Tensor) or state.dim() != 1 or len(state) < 2:
            raise damaged(STATE)
        if state[0] != VERSION:
            raise ValueError(
                f"The checkpoint has version {float(state[0]):g}, and this torch-anderson reads version {VERSION:g}. "
                "Resume it with the torch-anderson that made it."
            )
        if state[1] != kind:
            raise ValueError(
                "The checkpoint was made by another accelerator, or with another residual. Build the one that made it."
            )
        shape = tuple(real_view(param).shape)
        for name, (option, ahead) in shapes.items():
            if name in kept and not isinstance(kept[name], Tensor):
                raise damaged(name)
            there = tuple(kept[name].shape) if name in kept else None
            if there is not None and there[len(ahead or ()) :] != shape and ahead is not None:
                found_shape = there[len(ahead) :]
                raise ValueError(
                    f"The checkpoint is of another model: a parameter has shape {found_shape} there, {shape} here."
                )
            if there is None and ahead == ():
                raise damaged(name)
            if there != (None if ahead is None else (*ahead, *shape)):
                raise ValueError(
                    f"The checkpoint was made with another {option}: {name} has {_rows(there, shape)} rows there, "
                    f"{ahead[0] if ahead else 0} here. Build the optimizer with the options of the checkpoint."
                )
        for name, expected in numbers.items():
            if not isinstance(kept.get(name), Tensor) or kept[name].shape != expected.shape:
                raise damaged(name)


def damaged(name: str, problem: str = "is missing, or has another shape") -> ValueError:
    """The error to raise for an entry that no torch-anderson wrote in this form."""
    return ValueError(f"The checkpoint is damaged: the entry {PREFIX}{name} {problem}.")


def _rows(found: tuple[int, ...] | None, shape: tuple[int, ...]) -> int:
    return found[0] if found is not None and len(found) > len(shape) else 0
