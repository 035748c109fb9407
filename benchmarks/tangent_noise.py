"""`GaussNewton(Adam)` along the tangent against Adam on small batches of noisy data, given step by step.

    OMP_NUM_THREADS=1 python -m benchmarks.tangent_noise

Ratios of validation losses after training and of processor times, over runs with the same weights and batches, seed by
seed, and accepted jumps. Fashion-MNIST is left out where it is not on the machine.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from benchmarks.report import header, table
from torch_anderson import GaussNewton, Objective, Term
from torch_anderson.lab.data import MissingData, load_fashion

VALIDATION = 0.2


class Task(NamedTuple):
    name: str
    inputs: Tensor
    targets: Tensor
    loss: Callable[..., Tensor] | None
    width: int
    rate: float
    batch: int
    epochs: int


def tasks() -> Iterator[Task]:
    digits, diabetes = load_digits(), load_diabetes()
    images = torch.tensor(digits.data / 16 - 0.5, dtype=torch.float32)
    yield Task("digits", images, torch.tensor(digits.target), cross_entropy, 32, 1e-3, 64, 40)
    values = torch.tensor((diabetes.target - diabetes.target.mean()) / diabetes.target.std(), dtype=torch.float32)
    features = torch.tensor(diabetes.data / diabetes.data.std(0), dtype=torch.float32)
    yield Task("diabetes", features, values, None, 32, 1e-3, 32, 100)
    try:
        images, labels, *_ = load_fashion()
    except MissingData as problem:
        print(problem)
        return
    pixels = torch.tensor(images[:20_000].reshape(20_000, -1) / 255 - 0.3, dtype=torch.float32)
    yield Task("Fashion-MNIST", pixels, torch.tensor(labels[:20_000].astype(int)), cross_entropy, 64, 1e-3, 128, 4)


def train(task: Task, seed: int, *, wrapped: bool) -> tuple[float, float, int]:
    """The validation loss, the processor time, and accepted jumps."""
    torch.manual_seed(seed)
    order = torch.randperm(len(task.inputs))
    test, rest = order.split([round(VALIDATION * len(order)), len(order) - round(VALIDATION * len(order))])
    outputs = 1 if task.loss is None else 10
    model = nn.Sequential(nn.Linear(task.inputs.shape[1], task.width), nn.Tanh(), nn.Linear(task.width, outputs))

    def residual(u, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return u(x) - y if task.loss is None else (u(x), y)

    objective = Objective(model, fit=Term(residual, (task.inputs[rest], task.targets[rest]), loss=task.loss))
    base = Adam(model.parameters(), lr=task.rate)
    optimizer = GaussNewton(base) if wrapped else base
    random = torch.Generator().manual_seed(seed)
    start = time.process_time()
    for _ in range(task.epochs):
        for some in rest[torch.randperm(len(rest), generator=random)].split(task.batch):
            optimizer.step(objective(fit=(task.inputs[some], task.targets[some])))
    spent = time.process_time() - start
    accepted = optimizer.stats.counts["accepted"] if isinstance(optimizer, GaussNewton) else 0
    with torch.no_grad():
        closure = objective.bind(fit=(task.inputs[test], task.targets[test]))
        return float(closure.loss()), spent, accepted


def main(seeds: list[int]) -> None:
    torch.set_num_threads(1)
    rows = []
    for task in tasks():
        losses, times, jumps = [], [], []
        for seed in seeds:
            (ours, ours_time, accepted), (base, base_time, _) = (train(task, seed, wrapped=x) for x in (True, False))
            losses.append(f"{ours / base:.2f}")
            times.append(f"{ours_time / base_time:.2f}")
            jumps.append(str(accepted))
        rows.append([task.name, *(", ".join(x) for x in (losses, times, jumps))])
    print(header())
    print(table(rows, ["data", "validation loss", "time", "accepted jumps"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12, 13, 14])
    main(parser.parse_args().seeds)
