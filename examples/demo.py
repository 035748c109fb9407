"""Trains three of the lab's small tasks with and without acceleration, compares the methods, and writes a report page.

Equivalent to ``torch-anderson compare`` on the command line; a second call makes only the runs that are missing.
"""

import sys

from torch_anderson.lab.cli import main
from torch_anderson.lab.data import MissingData, load_admissions

METHODS = [
    "base",
    "anderson",
    "anderson+average",
    "anderson-default",
    "gauss-newton",
    "ema",
]


def table_task() -> str:
    """Name of the paper's task if its data are available, else of one whose data come with scikit-learn."""
    try:
        load_admissions()
    except MissingData as problem:
        print(f"{problem}\nContinuing with the diabetes data instead.\n")
        return "diabetes"
    return "admissions"


if __name__ == "__main__":
    tasks = ["burgers2d", table_task(), "digits"]
    sys.exit(main(["compare", *tasks, "--method", *METHODS, "--profile", "quick", "--results", "results/demo"]))
