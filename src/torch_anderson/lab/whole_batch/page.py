"""The page."""

from pathlib import Path

from rich.console import Console


def show_page(console: Console, results: Path, out: Path) -> None:
    """Make the page."""
