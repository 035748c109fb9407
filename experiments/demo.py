"""Solves Burgers' equation with Adam, SOAP and ``GaussNewton`` in the same time; then trains three small tasks with and
without acceleration. Prints tables and writes pages; a second call makes only the runs that are missing.
"""

import sys

from experiments.cli import main
from experiments.data import ADMISSIONS, NO_ADMISSIONS, present

# Twenty seconds of one core for each method, at the best of Adam's and of SOAP's rates on this equation.
SOLVE = """equations --problems burgers2d --methods gauss-newton-adam adam-cosine soap-cosine --rates 0.03 --seeds 0
--seconds 20 --results results/demo/equations --out results/demo/equations"""
COMPARE = """compare burgers2d digits {table} --profile quick --results results/demo
--method base anderson anderson+average anderson-default gauss-newton-tangent ema"""

if __name__ == "__main__":
    solved = main(SOLVE.split())
    print("\nThe next experiments repeat the paper's tasks with small budgets.\n")
    table = "admissions" if present(ADMISSIONS) else "diabetes"  # a demo downloads nothing
    if table == "diabetes":
        print(f"{NO_ADMISSIONS}\nContinuing with the diabetes data instead.\n")
    compared = main(COMPARE.format(table=table).split())
    sys.exit(solved or compared)
