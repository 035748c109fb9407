"""Three of the lab's experiments in small: train with and without Anderson, compare, and make a page to read.

The same as ``torch-anderson compare`` on the command line; run it again and it only makes what is missing.
"""

import sys

from torch_anderson.lab.cli import main
from torch_anderson.lab.data import MissingData, load_admissions

METHODS = [
    "base",
    "anderson",
    "anderson+average",
    "anderson-default",
    "discrepancy",
    "discrepancy-weights",
    "ema",
]


def table_task() -> str:
    """The paper's table where its data can be had; else one that comes with scikit-learn, and how to get the other."""
    try:
        load_admissions()
    except MissingData as problem:
        print(f"{problem}\nGoing on with the diabetes data instead.\n")
        return "diabetes"
    return "admissions"


if __name__ == "__main__":
    tasks = ["burgers2d", table_task(), "digits"]
    sys.exit(main(["compare", *tasks, "--method", *METHODS, "--profile", "quick", "--results", "results/demo"]))
