"""Small training problems that every benchmark shares; each runs in about a second.

`PROBLEMS[name](seed)` gives the same start, batches and noise for a seed, for any optimizer. Losses are scaled such
that a learning rate of 0.1 to 1 suits plain gradient descent on each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """A problem: `parameters` and `closure` for an optimizer, and `full_loss` to evaluate it."""

    parameters: list[Tensor]
    steps: int
    batch_loss: Callable[[int], Tensor]
    """The loss at step k, including mini-batch or gradient noise; gradients are not computed."""
    exact_loss: Callable[[], Tensor]

    def closure(self, step: int) -> Callable[[], Tensor]:
        """The closure of step k for `optimizer.step`: the loss of its batch, with gradients."""

        def evaluate() -> Tensor:
            for parameter in self.parameters:
                parameter.grad = None
            loss = self.batch_loss(step)
            loss.backward()
            return loss.detach()

        return evaluate

    @torch.no_grad()
    def full_loss(self) -> float:
        """The loss on all data without noise, minus its minimum if that is known."""
        return self.exact_loss().item()


def digits(seed: int, *, matrices_only: bool = False) -> Problem:
    """Handwritten digits, 1,797 images of 8 x 8, a tanh network 64-32-10, batches of 64."""
    data = load_digits()
    inputs = torch.tensor(data.data / 16 - 0.5, dtype=torch.float32)
    return _network_problem(
        seed,
        inputs,
        torch.tensor(data.target),
        10,
        nn.functional.cross_entropy,
        batch_size=64,
        bias=not matrices_only,
    )


def diabetes(seed: int, *, matrices_only: bool = False) -> Problem:
    """Diabetes progression, 442 patients, a tanh network 10-32-1, batches of 32."""
    data = load_diabetes()
    inputs = torch.tensor(data.data / data.data.std(0), dtype=torch.float32)
    targets = torch.tensor((data.target - data.target.mean()) / data.target.std(), dtype=torch.float32)[:, None]
    return _network_problem(seed, inputs, targets, 1, nn.functional.mse_loss, batch_size=32, bias=not matrices_only)


def least_squares(seed: int, *, matrices_only: bool = False) -> Problem:
    """200 unknowns, condition number of A about 30, float64, exact gradients."""
    return _least_squares_problem(seed, noise=0.0)


def noisy_least_squares(seed: int, *, matrices_only: bool = False, steps: int = 1000) -> Problem:
    """Least squares with 0.1 * randn added to each entry of the gradient of |Ax - b|^2 / 2."""
    return _least_squares_problem(seed, noise=0.1, steps=steps)


def rosenbrock(seed: int, *, matrices_only: bool = False) -> Problem:
    """The chained Rosenbrock function of 10 variables from near 0, float64; its minimum is 0 at 1."""
    start = 0.1 * torch.randn(2, 5, dtype=torch.float64, generator=_generator(seed))
    x = start.requires_grad_()

    def loss(step: int = 0) -> Tensor:
        head, tail = x.flatten()[:-1], x.flatten()[1:]
        return (100 * (tail - head**2).square().sum() + (1 - head).square().sum()) / 1000

    return Problem([x], steps=1000, batch_loss=loss, exact_loss=loss)


PROBLEMS: dict[str, Callable[..., Problem]] = {
    make.__name__: make for make in (digits, diabetes, least_squares, noisy_least_squares, rosenbrock)
}
"""All take a seed and `matrices_only`: no parameter but matrices, which is all that Muon accepts."""


def _network_problem(
    seed: int,
    inputs: Tensor,
    targets: Tensor,
    outputs: int,
    criterion: Callable[..., Tensor],
    *,
    batch_size: int,
    bias: bool,
) -> Problem:
    steps = 500
    model = _network(seed, (inputs.shape[1], 32, outputs), bias)
    batches = _batches(seed, len(inputs), batch_size, steps)

    def batch_loss(step: int) -> Tensor:
        return criterion(model(inputs[batches[step]]), targets[batches[step]])

    return Problem(list(model.parameters()), steps, batch_loss, lambda: criterion(model(inputs), targets))


def _network(seed: int, widths: tuple[int, int, int], bias: bool) -> nn.Module:
    inputs, hidden, outputs = widths
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden, bias=bias), nn.Tanh(), nn.Linear(hidden, outputs, bias=bias))


def _batches(seed: int, examples: int, batch_size: int, steps: int) -> list[Tensor]:
    """Shuffled epochs, each without its incomplete last batch."""
    generator = _generator(seed)
    per_epoch = examples // batch_size
    orders = [torch.randperm(examples, generator=generator) for _ in range(-(-steps // per_epoch))]
    batches = [batch for order in orders for batch in order[: per_epoch * batch_size].split(batch_size)]
    return batches[:steps]


def _least_squares_problem(seed: int, noise: float, steps: int = 1000) -> Problem:
    rows, n = 400, 200
    generator = _generator(seed)
    spectrum = torch.from_numpy(np.logspace(0, -1.5, n))
    A = torch.randn(rows, n, dtype=torch.float64, generator=generator) * spectrum
    b = torch.randn(rows, dtype=torch.float64, generator=generator)
    gradient_noise = noise * torch.randn(steps, n, dtype=torch.float64, generator=generator)
    # Rounded: LAPACK's last bits change from call to call, and chaotic optimizers would blow that up to percents.
    curvature = (torch.linalg.matrix_norm(A, ord=2) ** 2).round(decimals=6)
    minimizer = torch.linalg.lstsq(A, b).solution.round(decimals=9)
    x = torch.zeros(20, 10, dtype=torch.float64, requires_grad=True)

    def excess() -> Tensor:
        # Not |Ax - b|^2: its large minimum would hide every difference between optimizers.
        return (A @ (x.flatten() - minimizer)).square().sum() / 2 / curvature

    def batch_loss(step: int) -> Tensor:
        return excess() + gradient_noise[step] @ x.flatten() / curvature

    return Problem([x], steps, batch_loss, excess)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
