"""The tables of options in the documentation have all options, with the defaults that hold."""

import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from torch_anderson import Anderson, Discrepancy

ROOT = Path(__file__).parent.parent


def documented(page: str, column: int) -> dict[str, Any]:
    """Option -> default, of the table in a page that begins with options; ``column`` is that of the defaults."""
    _, table = re.split(r"\| option \|.*\n", (ROOT / page).read_text(encoding="utf-8"))
    rows = [row.split("|") for row in table.split("\n\n")[0].splitlines()[1:]]
    return {row[1].strip(" `"): eval(row[column].strip(" `")) for row in rows}


@pytest.mark.parametrize(
    ("page", "column", "made"), [("README.md", 3, Anderson), ("docs/discrepancy.md", 2, Discrepancy)]
)
def test_the_table_of_options_is_that_of_the_code(page: str, column: int, made: Callable[..., Any]) -> None:
    _, *options = signature(made).parameters.values()
    assert documented(page, column) == {option.name: option.default for option in options}
