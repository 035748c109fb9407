"""Numbers that a function reads but is not given, such as a coefficient that training anneals.

A trace has them as constants. They are found without calling the function, by the names in its code: closures,
globals, attributes of objects and functions that it calls. What cannot be found in this way is noticed later, by a
comparison of traced residuals with plain ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

PLAIN = (int, float, complex, str, bytes, type(None))
FEW = 64
"""Entries of a container or an array that are compared."""
DEEPEST = 6
"""Objects on the way to a number."""
LIBRARIES = ("torch", "numpy", "scipy", "math", "builtins", "functools", "typing")
"""Their functions have no numbers of the user's."""


def numbers_of(functions: Iterable[Any], model: nn.Module) -> list[Any]:
    """The numbers that functions and a model's modules read; tensors count by identity, as traces see writes to them.

    >>> class Settings:
    ...     viscosity = 0.1
    >>> before = numbers_of([lambda u, x: u(x) - Settings.viscosity], nn.Tanh())
    >>> Settings.viscosity = 0.2
    >>> 0.1 in before, 0.2 in numbers_of([lambda u, x: u(x) - Settings.viscosity], nn.Tanh())
    (True, True)
    """
    search = _Search()
    for function in functions:
        search.look(function, frozenset(), 0)
    for module in model.modules():
        search.numbers += [value for value in vars(module).values() if isinstance(value, PLAIN)]
        if not _foreign(type(module)):
            search.look(MethodType(type(module).forward, module), frozenset(), 0)
    return search.numbers


class _Search:
    """Goes through objects; ``names`` are those in the code through which an object was found."""

    def __init__(self) -> None:
        self.numbers: list[Any] = []
        self._seen: set[tuple[int, frozenset[str]]] = set()

    def look(self, value: Any, names: frozenset[str], depth: int) -> None:
        """Note the numbers that an object has under these names, or is."""
        if isinstance(value, PLAIN):
            self.numbers.append(value)
            return
        if isinstance(value, Tensor):
            self.numbers.append(id(value))
            return
        if (id(value), names) in self._seen or depth > DEEPEST:
            return
        self._seen.add((id(value), names))
        if isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, MethodType):
            self.look(value.__func__, names, depth)
            self._attributes(value.__self__, _names(value.__func__), depth)
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self.look(part, names, depth)
        elif isinstance(value, (tuple, list, dict)):
            self.numbers.append(len(value))
            for part in list(value.values() if isinstance(value, dict) else value)[:FEW]:
                self.look(part, names, depth + 1)
        elif hasattr(value, "tolist") and not isinstance(value, type):  # a number or an array of NumPy
            self.numbers.append(value.tolist() if getattr(value, "size", FEW + 1) <= FEW else id(value))
        elif not _foreign(value if isinstance(value, (type, ModuleType)) else type(value)):
            called = vars(type(value)).get("__call__")
            if depth == 0 and isinstance(called, FunctionType):
                self.look(MethodType(called, value), names, depth)
            self._attributes(value, names, depth)

    def _function(self, function: FunctionType, depth: int) -> None:
        if _foreign(function):
            return
        names = _names(function)
        inside: list[Any] = [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            try:
                inside.append(cell.cell_contents)
            except ValueError:  # not set yet
                continue
        inside += [function.__globals__[name] for name in names if name in function.__globals__]
        for value in inside:
            self.look(value, names, depth + 1)

    def _attributes(self, owner: Any, names: frozenset[str], depth: int) -> None:
        """Note what the object has under these names; nothing is called."""
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        own = getattr(owner, "__dict__", {})
        for name in sorted(names):
            value = own[name] if name in own else next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
            if isinstance(value, MemberDescriptorType):  # a slot
                value = getattr(owner, name, None)
            elif isinstance(value, property):
                value = value.fget
            if isinstance(value, FunctionType) and name not in own:
                value = MethodType(value, owner)
            if value is not None:
                self.look(value, names, depth + 1)


@cache
def _code_names(code: CodeType) -> frozenset[str]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*map(_code_names, inner))


def _names(function: Any) -> frozenset[str]:
    """The names of globals and attributes in the code of a function, and of functions within it."""
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else _code_names(code)


def _foreign(thing: Any) -> bool:
    """Whether a class, module or function is part of a library without numbers of the user's."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or ""
    return name.partition(".")[0] in LIBRARIES
