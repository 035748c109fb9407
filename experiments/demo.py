"""Solves Burgers' equation with Adam, SOAP and ``GaussNewton`` in the same time; then trains three small tasks with and
without acceleration. Prints tables and writes pages.

Equivalent to ``python -m experiments equations`` and ``python -m experiments compare`` on the command line; a second
call makes only the runs that are missing.
"""

import sys

from experiments.cli import main
from experiments.data import ADMISSIONS, NO_ADMISSIONS, MissingData, load_admissions, present

METHODS = [
    "base",
    "anderson",
    "anderson+average",
    "anderson-default",
    "gauss-newton-tangent",
    "ema",
]


def table_task() -> str:
    """Name of the paper's task if its data are on this machine, else of one whose data come with scikit-learn."""
    try:
        if not present(ADMISSIONS):  # a demo downloads nothing
            raise MissingData(NO_ADMISSIONS)
        load_admissions()
    except MissingData as problem:
        print(f"{problem}\nContinuing with the diabetes data instead.\n")
        return "diabetes"
    return "admissions"


SOLVERS = ["gauss-newton-adam", "adam-cosine", "soap-cosine"]
RATE = "0.03"
"""The best of Adam's and of SOAP's rates on this equation."""
INTRODUCTION = "The next experiments repeat the paper's tasks with small budgets."


def solve_burgers() -> int:
    """Twenty seconds of one core for each method."""
    folder = "results/demo/equations"
    words = ["--problems", "burgers2d", "--methods", *SOLVERS, "--rates", RATE, "--seeds", "0", "--seconds", "20"]
    return main(["equations", *words, "--results", folder, "--out", folder])


if __name__ == "__main__":
    solved = solve_burgers()
    print(f"\n{INTRODUCTION}\n")
    tasks = ["burgers2d", table_task(), "digits"]
    compared = main(["compare", *tasks, "--method", *METHODS, "--profile", "quick", "--results", "results/demo"])
    sys.exit(solved or compared)
