"""The folders of the study and what their records hold."""

from pathlib import Path

from ..lines import Record
from ..lines import load as load_lines

FAMILY_FOLDER, BATCHES_FOLDER, ENDINGS_FOLDER = "family", "batches", "endings"
"""Below the folder of results, one for each study."""
KINDS: dict[str, type] = {"problem": str, "method": str, "seed": int, "cpu_seconds": float, "stats": dict}
FURTHER_KINDS: dict[str, dict[str, type]] = {
    FAMILY_FOLDER: {"losses": list, "seconds": list},
    BATCHES_FOLDER: {"final": float, "samples": int},
}
"""What a line holds at least: key -> kind of the value."""


def load(folder: Path) -> tuple[list[Record], list[str]]:
    """All runs of a study, and a message for each line or file that cannot be read."""
    return load_lines(folder, KINDS | FURTHER_KINDS.get(folder.name, {}))
