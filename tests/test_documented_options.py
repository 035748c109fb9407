"""The tables of options in the documentation have all options, with the defaults that hold."""

import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from torch_anderson import Anderson, GaussNewton, Storage, fixed_point

ROOT = Path(__file__).parent.parent
TABLES = [
    ("docs/options.md", "option", Anderson),
    ("docs/options.md", "name", fixed_point),
    ("docs/gauss-newton.md", "option", GaussNewton),
    ("docs/distributed.md", "option", Storage),
]


def documented(page: str, first: str) -> dict[str, Any]:
    """Option -> default, of the table in a page whose first column has this title."""
    _, table = re.split(rf"(?<=\n)(?=\| {first} \|)", (ROOT / page).read_text(encoding="utf-8"))
    head, _, *rows = [[cell.strip(" `") for cell in row.split("|")] for row in table.split("\n\n")[0].splitlines()]
    return {row[1]: eval(row[head.index("default")]) for row in rows}


@pytest.mark.parametrize(("page", "first", "made"), TABLES)
def test_the_table_of_options_is_that_of_the_code(page: str, first: str, made: Callable[..., Any]) -> None:
    options = [option for option in signature(made).parameters.values() if option.kind is option.KEYWORD_ONLY]
    assert documented(page, first) == {option.name: option.default for option in options}


@pytest.mark.parametrize(("made", "most"), [(Anderson, 13), (GaussNewton, 1), (Storage, 3)])
def test_options_are_few(made: Callable[..., Any], most: int) -> None:
    assert len([option for option in signature(made).parameters.values() if option.kind is option.KEYWORD_ONLY]) <= most
