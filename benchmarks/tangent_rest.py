"""What `GaussNewton(Adam)` along the tangent costs where it does not pay: small batches of digits, given step by step.

    OMP_NUM_THREADS=1 python -m benchmarks.tangent_rest

Processor time over that of Adam with the same objective, as the median of pairs of runs: of whole runs, without what a
process does once, and of the median step, which proposes no jump. The rest is milliseconds.
"""

import argparse
import time
from statistics import median

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer

from benchmarks.report import header, table
from torch_anderson import GaussNewton, Objective, Term

BATCH = 64


def output(model, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    return model(image), label


def train(steps: int, seed: int, *, wrapped: bool) -> tuple[list[float], list[int]]:
    """The processor time of each step, and the steps that proposed a jump."""
    data = load_digits()
    images, labels = torch.tensor(data.data / 16 - 0.5, dtype=torch.float32), torch.tensor(data.target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    objective = Objective(model, fit=Term(output, (images, labels), loss=cross_entropy))
    optimizer: Optimizer = Adam(model.parameters())
    if wrapped:
        optimizer = GaussNewton(optimizer)
    found, proposing = [], []
    for step in range(steps):
        some, before = torch.randint(len(images), (BATCH,)), attempts(optimizer)
        start = time.process_time()
        optimizer.step(objective(fit=(images[some], labels[some])))
        found.append(time.process_time() - start)
        if attempts(optimizer) > before:
            proposing.append(step)
    return found, proposing


def attempts(optimizer: Optimizer) -> int:
    return optimizer.stats.counts["attempted"] if isinstance(optimizer, GaussNewton) else 0


def main(lengths: list[int], pairs: int) -> None:
    torch.set_num_threads(1)
    for wrapped in (False, True):  # what a process does once
        train(20, seed=0, wrapped=wrapped)
    rows = []
    for steps in lengths:
        whole, single, plain, proposal, counts = [], [], [], [], []
        for seed in range(pairs):
            base, _ = train(steps, seed, wrapped=False)
            ours, proposing = train(steps, seed, wrapped=True)
            whole.append(sum(ours) / sum(base))
            single.append(median(ours) / median(base))
            plain.append(1e3 * median(base))
            proposal.append(1e3 * sum(ours[k] for k in proposing) / len(proposing))
            counts.append(len(proposing))
        numbers = f"{median(whole):.2f}", f"{median(single):.3f}", f"{median(plain):.2f}", f"{median(proposal):.0f}"
        rows.append([f"{steps:,}", *numbers, median(counts)])
    print(header())
    print(table(rows, ["steps", "whole run", "step at rest", "step of Adam", "step that proposes", "proposals"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", type=int, default=[600, 6000])
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.pairs)
