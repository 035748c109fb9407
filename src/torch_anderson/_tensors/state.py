"""The state of a wrapped optimizer: the base's entries and ours, as one mapping that writes through."""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .checkpoint import PREFIX, Entries, base_entries


class StateView(MutableMapping[Any, Any]):
    """``base.state`` with our entries in the state of each parameter, made on demand.

    Tools read the names of entries here (distributed checkpoints) or replace all tensors by copies on another device
    (Lightning, Fabric). What is written goes to the base's state, or into our buffers.
    """

    def __init__(
        self, base: Optimizer, entries: Callable[..., dict[Tensor, Entries]], forget: Callable[[], None] = lambda: None
    ):
        self._base = base
        self._entries = entries
        self._forget = forget

    def __getitem__(self, key: Any) -> Any:
        ours = self._entries(key).get(key) if isinstance(key, Tensor) else None
        theirs = self._base.state[key]
        return theirs if ours is None or not isinstance(theirs, dict) else ParameterState(theirs, ours)

    def __setitem__(self, key: Any, state: Any) -> None:
        if not isinstance(state, dict):
            self._base.state[key] = state
            return
        merged = self[key]
        theirs = base_entries(state)
        if theirs or key in self._base.state:
            self._base.state[key] = theirs
        if isinstance(merged, ParameterState):
            merged.take(state)

    def __delitem__(self, key: Any) -> None:
        del self._base.state[key]

    def clear(self) -> None:
        """Empty the base's state, and forget all that was measured."""
        self._base.state.clear()
        self._forget()

    def __iter__(self) -> Iterator[Any]:
        yield from self._base.state
        yield from (param for param in self._entries() if param not in self._base.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: Any) -> bool:
        return key in self._base.state or (isinstance(key, Tensor) and key in self._entries(key))

    def __repr__(self) -> str:
        return f"StateView({dict(self)})"


class ParameterState(dict[Any, Any]):
    """The state of one parameter: a dictionary of the base's entries and ours that writes through to both."""

    def __init__(self, theirs: dict[Any, Any], ours: Entries | None = None):
        ours = {PREFIX + name: value for name, value in (ours or {}).items()}
        super().__init__({**theirs, **ours})
        self._theirs, self._ours = theirs, ours

    def __setitem__(self, name: Any, value: Any) -> None:
        super().__setitem__(name, value)
        if str(name).startswith(PREFIX):
            self.take({name: value})
        else:
            self._theirs[name] = value

    def __delitem__(self, name: Any) -> None:
        super().__delitem__(name)
        self._theirs.pop(name, None)

    def pop(self, name: Any, *default: Any) -> Any:
        """Remove an entry of the base's."""
        self._theirs.pop(name, None)
        return super().pop(name, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Write several entries."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def take(self, values: dict[Any, Any]) -> None:
        """Copy new values of our entries into the buffers."""
        for name, buffer in self._ours.items():
            value = values.get(name)
            if isinstance(value, Tensor) and value is not buffer and value.shape == buffer.shape:
                buffer.copy_(value)
