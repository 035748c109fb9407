"""A small regression with `GaussNewton(Adam)`, and with Adam alone.

    OMP_NUM_THREADS=1 python -m experiments.benchmarks.regression

The example of docs/gauss-newton.md: mean squared errors on the training data and on new data, and processor seconds.
Adam's steps are cheaper, so that more of them fit into the same time.
"""

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Adam

from experiments.benchmarks.common import command
from experiments.networks import perceptron
from experiments.text import header, table
from torch_anderson import GaussNewton, Objective, Term

RUNS = [(True, 30), (True, 200), (False, 200), (False, 2000)]
"""Whether with `GaussNewton`, and the number of steps."""


def data(count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 10)
    return inputs, inputs.square().mean(1, keepdim=True)


def measure(seed: int, ours: bool, steps: int) -> tuple[float, float, float]:
    """The final loss on the training data and on new data, and the processor time."""
    torch.manual_seed(seed)
    model = perceptron(10, 20, 1, activation=nn.Tanh)
    inputs, targets = data(256)
    start = time.process_time()
    adam = Adam(model.parameters(), lr=2e-3)
    if ours:
        objective = Objective(model, fit=Term(lambda u, x, y: u(x) - y, (inputs, targets)))
        optimizer = GaussNewton(adam)
        for _ in range(steps):
            optimizer.step(objective)
    else:
        for _ in range(steps):
            adam.zero_grad()
            mse_loss(model(inputs), targets).backward()
            adam.step()
    spent = time.process_time() - start
    with torch.no_grad():
        train, new = (mse_loss(model(x), y).item() for x, y in ((inputs, targets), data(10_000)))
    return train, new, spent


def main(seeds: int = 3) -> None:
    torch.set_num_threads(1)
    rows = []
    for ours, steps in RUNS:
        measure(0, ours, 20)  # what a process does once
        columns = zip(*(measure(seed, ours, steps) for seed in range(seeds)), strict=True)
        name = "`GaussNewton` with an `Objective`" if ours else "Adam"
        rows.append([name, steps, *(f"{min(column):.1e} to {max(column):.1e}" for column in columns)])
    print(header())
    print(table(rows, ["", "steps", "training MSE", "MSE on new data", "processor seconds"]))


if __name__ == "__main__":
    command(main)
