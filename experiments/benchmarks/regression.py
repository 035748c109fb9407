"""A small regression with `GaussNewton(Adam)`, and with Adam alone.

    OMP_NUM_THREADS=1 python -m experiments.benchmarks.regression

The example of docs/gauss-newton.md: mean squared errors on the training data and on new data, and processor seconds.
Adam's steps are cheaper, so that more of them fit into the same time.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Adam

from experiments.benchmarks.report import header, table
from torch_anderson import GaussNewton, Objective, Term


def with_objective(model: nn.Module, inputs: Tensor, targets: Tensor, steps: int) -> None:
    objective = Objective(model, fit=Term(lambda u, x, y: u(x) - y, (inputs, targets)))
    optimizer = GaussNewton(Adam(model.parameters(), lr=2e-3))
    for _ in range(steps):
        optimizer.step(objective)


def with_adam(model: nn.Module, inputs: Tensor, targets: Tensor, steps: int) -> None:
    optimizer = Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()


WAYS: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor, int], None], list[int]]] = {
    "`GaussNewton` with an `Objective`": (with_objective, [30, 200]),
    "Adam": (with_adam, [200, 2000]),
}
"""Ways to train, and numbers of steps."""


def data(count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 10)
    return inputs, inputs.square().mean(1, keepdim=True)


def measure(name: str, seed: int, steps: int) -> tuple[float, float, float]:
    """The final loss on the training data and on new data, and the processor time."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
    inputs, targets = data(256)
    start = time.process_time()
    WAYS[name][0](model, inputs, targets, steps)
    spent = time.process_time() - start
    with torch.no_grad():
        train, new = (mse_loss(model(x), y).item() for x, y in ((inputs, targets), data(10_000)))
    return train, new, spent


def main(seeds: int) -> None:
    torch.set_num_threads(1)
    rows = []
    for name, (_, lengths) in WAYS.items():
        measure(name, 0, 20)  # what a process does once
        for steps in lengths:
            columns = zip(*(measure(name, seed, steps) for seed in range(seeds)), strict=True)
            rows.append([name, steps, *(f"{min(column):.1e} to {max(column):.1e}" for column in columns)])
    print(header())
    print(table(rows, ["", "steps", "training MSE", "MSE on new data", "processor seconds"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    main(parser.parse_args().seeds)
