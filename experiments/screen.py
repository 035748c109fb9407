"""Output of the command line: sentences, errors and tables, for people or for other programs."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

Rows = Iterable[Sequence[str]]


class UserError(Exception):
    """An error that users can fix: it is printed without a traceback."""


class BadInput(UserError, ValueError):
    """An invalid argument on the command line; the message says what is allowed."""


def complain(*messages: str) -> None:
    """Print to standard error without wrapping, so that other programs can read it."""
    for message in messages:
        Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)


def tell(console: Console, message: str) -> None:
    """Print a sentence."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def raw(console: Console, text: str) -> None:
    """Print lines for other programs unchanged; rich would replace tabs."""
    console.file.write(f"{text}\n")
    console.file.flush()


def show_table(console: Console, title: str, columns: Sequence[str], rows: Rows) -> None:
    """Print a table on a terminal; otherwise one line per row, with tabs."""
    if not console.is_terminal:
        lines = ["\t".join(cells) for cells in (columns, *rows)]
        raw(console, "\n".join([f"# {title}", *lines]))
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def duration(seconds: float) -> str:
    """In words.

    >>> duration(8), duration(200), duration(9000)
    ('8 s', '3 min 20 s', '2 h 30 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
