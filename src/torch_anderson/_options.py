"""Checks of options: each returns the plain Python value, or raises a ValueError that names option, value and rule.

Numbers may come as NumPy scalars or as tensors and arrays without dimensions, as they do from a sweep over settings.
"""

import operator
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, Self, TypeVar

Choice = TypeVar("Choice")


def integer(name: str, value: Any, least: int) -> int:
    """Check that an option is an integer of at least ``least``.

    >>> integer("period", 3, least=1)
    3
    >>> integer("period", 2.0, least=1)
    Traceback (most recent call last):
    ValueError: Invalid period: 2.0. Allowed: an integer of at least 1.
    """
    number = _python_number(value)
    if not isinstance(number, Integral) or operator.index(number) < least:
        raise invalid(name, value, f"an integer of at least {least}")
    return operator.index(number)


def real(name: str, value: Any, allowed: Callable[[float], bool], described: str) -> float:
    """Check that an option is a number for which ``allowed`` holds; ``described`` says so in words.

    >>> real("relaxation", 1, lambda beta: 0 < beta <= 1, "a number above 0 and at most 1")
    1.0
    """
    number = _python_number(value)
    if not isinstance(number, Real) or not allowed(float(number)):
        raise invalid(name, value, described)
    return float(number)


def choice(name: str, value: Any, choices: Sequence[Choice]) -> Choice:
    """Check that an option is one of ``choices``, which are strings or None.

    >>> choice("safeguard", None, ("descent", "loss", None))
    """
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise invalid(name, value, " or ".join(map(repr, choices)))
    return choices[choices.index(value)]


def invalid(name: str, value: Any, described: str) -> ValueError:
    """The error to raise for an option that is wrong, alone or together with others."""
    return ValueError(f"Invalid {name}: {value!r}. Allowed: {described}.")


def _python_number(value: Any) -> Any:
    """The number in a NumPy scalar, an array or a tensor without dimensions; None for a truth value, which is none."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    return None if isinstance(value, bool) else value


def process_group_or_none(value: Any) -> None:
    """Check that an option is a process group of torch, or None for all ranks."""
    if value is not None and not hasattr(value, "rank"):
        raise invalid("process_group", value, "None or a process group of torch")


class Options:
    """Options as checked at construction: a frozen dataclass, shared by copies of an optimizer."""

    process_group: Any

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "An optimizer with a process_group cannot be pickled, as the group belongs to this process. "
                "Save optimizer.state_dict(), and build the optimizer anew."
            )
        return vars(self)
