"""From command-line arguments to runs. Invalid arguments raise ``BadInput`` or ``UnknownName``."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .methods import METHODS
from .runner import Spec, named
from .screen import BadInput, UserError, complain
from .studies import STUDIES
from .task import Task
from .tasks import TASKS

ALL = "all"
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
T = TypeVar("T")


def parse_seeds(text: str) -> list[int]:
    """Seeds from numbers and half-open ranges.

    >>> parse_seeds("0:3,7")
    [0, 1, 2, 7]
    """
    try:
        seeds = [seed for part in text.split(",") for seed in _seed_range(part)]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or max(seeds) >= 2**32:
        allowed = "numbers from 0 to 2^32 - 1 and ranges, as in 7 or 0,3,5 or 0:20"
        raise BadInput(f"Invalid seeds: {text!r}. Allowed: {allowed}.")
    return list(dict.fromkeys(seeds))


def _seed_range(part: str) -> Iterable[int]:
    first, colon, end = part.partition(":")
    return range(int(first or 0), int(end)) if colon else [int(first)]


def parse_value(kind: Any, text: str) -> Any:
    """A setting's value by its type.

    >>> parse_value(float | None, "1e-3"), parse_value(float | None, "none")
    (0.001, None)
    """
    if get_origin(kind) in (Union, UnionType):
        if NoneType in get_args(kind) and text.lower() == "none":
            return None
        return parse_value(next(each for each in get_args(kind) if each is not NoneType), text)
    if get_origin(kind) is tuple:
        return tuple(parse_value(get_args(kind)[0], part) for part in text.strip("()").split(",") if part)
    if kind is bool:
        return BOOLEANS[text.lower()]
    return kind(text)


def parse_setting(task: type[Task], name: str, text: str) -> Any:
    """The value of a field of the task. Unknown names are returned unchanged and refused by ``Spec.resolve``."""
    if name not in setting_names(task):
        return text
    kind = get_type_hints(task)[name]
    try:
        value = parse_value(kind, text)
        if isinstance(value, float) and math.isnan(value):
            raise ValueError
    except (ValueError, KeyError):
        wanted = getattr(kind, "__name__", str(kind))
        raise BadInput(f"Invalid {name}: {text!r}. {task.name} takes {wanted} there.") from None
    return value


def setting_names(task: type[Task]) -> list[str]:
    """The settings that a task has."""
    return [field.name for field in fields(task)]


def split_setting(text: str) -> tuple[str, str]:
    """Name and value; dashes in the name become underscores: ``history-size=5`` is accepted."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise BadInput(f"Invalid setting: {text!r}. Write it as name=value, as in history_size=5.")
    return name.strip().replace("-", "_"), value.strip()


def variations(
    task: type[Task], settings: Sequence[str], sweeps: Sequence[str], where_known: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The settings of each variant: the fixed ones, with every combination of the swept ones.

    Settings in ``where_known`` are ignored for tasks that do not have them.
    """
    words = [f"{name}={value}" for name, value in (where_known or {}).items() if name in setting_names(task)]
    fixed = {name: parse_setting(task, name, value) for name, value in map(split_setting, [*words, *settings])}
    swept = []
    for name, values in map(split_setting, sweeps):
        swept.append([(name, parse_setting(task, name, value)) for value in values.split(",")])
    return [fixed | dict(choice) for choice in product(*swept)]


def task_names(names: Sequence[str]) -> list[str]:
    """The named tasks, each once; raises for unknown names."""
    wanted = list(dict.fromkeys(name for word in names for name in (TASKS if word == ALL else [word])))
    if not wanted:
        raise BadInput(f"Which task? There are {', '.join(TASKS)}, and {ALL} for all of them.")
    return [named("task", name, TASKS).name for name in wanted]


def chosen(kind: str, names: Sequence[str], table: Mapping[str, T]) -> list[T]:
    """The named entries of a table, or all of it."""
    return [named(kind, name, table) for name in names or table]


def available(entries: Sequence[T], missing: Callable[[T], str]) -> list[T]:
    """The entries that can run here; complains about those for which ``missing`` says what they lack."""
    absent = [missing(entry) for entry in entries]
    complain(*filter(None, absent))
    return [entry for entry, message in zip(entries, absent, strict=True) if not message]


def study_specs(names: Sequence[str]) -> list[Spec]:
    """The runs of these studies, without duplicates."""
    if not names:
        raise BadInput(f"Which study? There are {', '.join(STUDIES)}, and {ALL} for all of them.")
    studies = STUDIES.values() if ALL in names else [named("study", name, STUDIES) for name in names]
    return list({spec.folder(Path()): spec for study in studies for spec in study.specs()}.values())


def specs(
    variants: Mapping[str, Sequence[Mapping[str, Any]]],
    methods: Sequence[str],
    seeds: Sequence[int],
    profile: str,
    kinds: Sequence[str] = (),
    tensorboard: bool = False,
) -> list[Spec]:
    """All runs, with seeds in the outermost loop, so that an incomplete set can be compared.

    ``variants`` has the settings of each variant of each task. Without names of methods, those of the given kinds are
    used. Methods that do not apply to a task are left out; a named method that applies to none is an error.
    """
    names = methods or [method.name for method in METHODS.values() if not kinds or method.kind in kinds]
    pairs = [(task, change) for task, changes in variants.items() for change in changes]
    every = [Spec(task, name, 0, profile, change, tensorboard) for task, change in pairs for name in names]
    fitting = [spec for spec in every if fits(spec)]
    for name in methods:
        if not any(spec.method == name for spec in fitting):
            tasks = ", ".join(variants)
            raise BadInput(f"{name} does not apply to {tasks} with these settings: see `python -m experiments list`.")
    return [replace(spec, seed=seed) for seed in seeds for spec in fitting]


def fits(spec: Spec) -> bool:
    """Whether the method applies to the task; raises ``BadInput`` for settings that the task refuses."""
    try:
        task = spec.resolve()
    except ValueError as error:
        raise error if isinstance(error, UserError) else BadInput(str(error)) from error
    return METHODS[spec.method].applies(task)
