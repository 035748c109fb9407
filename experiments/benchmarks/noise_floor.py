"""What becomes of a base, alone and wrapped, after it has reached the noise of its gradients?

    python -m experiments.benchmarks.noise_floor                 RAdam and Adagrad on noisy least squares, 6,000 steps
    python -m experiments.benchmarks.noise_floor --bases Adam Muon

A cell is the loss without noise, as a mean over seeds and over the steps up to the number above it. In `never_worse`
some bases end a little higher when wrapped; this shows whether jumps did harm, or led sooner to where the base ends.
"""

import argparse
from typing import Any

import torch

from experiments.benchmarks.never_worse import BASES, Case, tuned_rate
from experiments.benchmarks.problems import noisy_least_squares
from experiments.benchmarks.report import header, table
from torch_anderson import Anderson

LENGTH = 500
"""Steps that a cell is the mean of."""


def losses(name: str, seed: int, steps: int, *, wrapped: bool) -> list[float]:
    """Mean losses without noise of each `LENGTH` steps, at the learning rate of `never_worse`."""
    base = BASES[name]
    problem = noisy_least_squares(seed, matrices_only=base.matrices_only, steps=steps)
    optimizer: Any = base.make(problem.parameters, lr=tuned_rate(Case(name, "noisy_least_squares", seed)))
    if wrapped:
        optimizer = Anderson(optimizer)
    found = []
    for k in range(steps):
        optimizer.step(problem.closure(k))
        found.append(problem.full_loss())
    return torch.tensor(found).reshape(-1, LENGTH).mean(1).tolist()


def main(bases: list[str], seeds: list[int], steps: int) -> None:
    torch.set_num_threads(1)
    rows = []
    for name in bases:
        for wrapped in (False, True):
            runs = torch.tensor([losses(name, seed, steps, wrapped=wrapped) for seed in seeds])
            rows.append([f"Anderson({name})" if wrapped else name, *(f"{x:.1e}" for x in runs.mean(0).tolist())])
    print(header())
    print(table(rows, ["mean loss up to step", *map(str, range(LENGTH, steps + 1, LENGTH))]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bases", nargs="+", default=["RAdam", "Adagrad"], choices={*BASES} - {"LBFGS"}, metavar="BASE"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=6000, help=f"a multiple of {LENGTH}")
    arguments = parser.parse_args()
    if arguments.steps % LENGTH:
        parser.error(f"--steps must be a multiple of {LENGTH}")
    main(arguments.bases, arguments.seeds, arguments.steps)
