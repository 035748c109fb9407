"""Handwritten digits, with and without Anderson acceleration: a table here, a plot in demo.png.

Every row trains the same model twice from the same weights on the same batches; the only difference is the line
``optimizer = Anderson(optimizer)``.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_anderson import Anderson

PICTURE = Path("demo.png")
STEPS = 400


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    name: str
    hidden: int
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int | None = None


CASES = [
    Case("softmax regression, SGD", 0, lambda p: torch.optim.SGD(p, lr=0.5)),
    Case("network 64-32-10, SGD", 32, lambda p: torch.optim.SGD(p, lr=0.5)),
    Case("network 64-32-10, Adam", 32, lambda p: torch.optim.Adam(p, lr=3e-3)),
    Case("the same, batches of 64", 32, lambda p: torch.optim.Adam(p, lr=3e-3), batch_size=64),
]


def load() -> tuple[Tensor, Tensor]:
    """All 1,797 images that scikit-learn brings along, standardized, and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32)
    return (images - images.mean(0)) / (images.std(0) + 1e-6), torch.tensor(digits.target)


def build(hidden: int) -> nn.Module:
    """A linear model, or a network with one hidden layer."""
    if not hidden:
        return nn.Linear(64, 10)
    return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))


def train(case: Case, accelerate: bool, seed: int = 0) -> tuple[list[float], float]:
    """Loss on all data after every step, and the seconds that the steps took."""
    torch.manual_seed(seed)
    images, digits = load()
    model = build(case.hidden)
    optimizer = case.make_optimizer(model.parameters())
    if accelerate:
        optimizer = Anderson(optimizer)

    def loss(rows: Tensor | slice) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return cross_entropy(model(images[rows]), digits[rows]) + 1e-4 * penalty

    losses, seconds = [], 0.0
    for _ in range(STEPS):
        rows = torch.randint(len(images), (case.batch_size,)) if case.batch_size else slice(None)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()
        seconds += time.perf_counter() - start
        with torch.no_grad():
            losses.append(loss(slice(None)).item())
    return losses, seconds


def main() -> None:
    """Train all cases, print the table, draw the picture."""
    torch.set_num_threads(1)
    console = Console()
    table = Table(title=f"Loss on digits after {STEPS} steps: base, and Anderson(base) with default options")
    for heading in ("case", "base", "accelerated", "reached after", "step time"):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    figure, axes = plt.subplots(1, len(CASES), figsize=(4 * len(CASES), 3.4), constrained_layout=True)
    for axis, case in zip(axes, track(CASES, "training", console=console), strict=True):
        base, base_seconds = train(case, accelerate=False)
        ours, our_seconds = train(case, accelerate=True)
        reached = next((step for step, value in enumerate(ours, 1) if value <= base[-1]), None)
        table.add_row(
            case.name,
            f"{base[-1]:.4f}",
            f"{ours[-1]:.4f}",
            f"{reached} steps" if reached else "not reached",
            f"{our_seconds / base_seconds:.2f} x",
        )
        axis.semilogy(ours, label="accelerated", color="tab:blue", linewidth=2.5)
        axis.semilogy(base, label="base", color="black", linestyle="--")
        axis.set(title=case.name, xlabel="step")
    axes[0].set_ylabel("loss on all data")
    axes[0].legend()
    figure.savefig(PICTURE, dpi=150)
    console.print(table)
    console.print(
        '"reached after": when the accelerated run had the loss that the base ends with. '
        "On full batches a few jumps replace many steps. On small batches the residuals are noise: "
        "the default then leaves training exactly as it is."
    )
    console.print(f"The curves are in {PICTURE}")


if __name__ == "__main__":
    main()
