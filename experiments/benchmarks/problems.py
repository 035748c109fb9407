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

from experiments.networks import perceptron


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
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16 - 0.5, dtype=torch.float32)
    return network_problem(seed, inputs, torch.tensor(labels), 10, nn.functional.cross_entropy, 64, not matrices_only)


def diabetes(seed: int, *, matrices_only: bool = False) -> Problem:
    """Diabetes progression, 442 patients, a tanh network 10-32-1, batches of 32."""
    features, progress = load_diabetes(return_X_y=True)
    inputs = torch.tensor(features / features.std(0), dtype=torch.float32)
    targets = torch.tensor((progress - progress.mean()) / progress.std(), dtype=torch.float32)[:, None]
    return network_problem(seed, inputs, targets, 1, nn.functional.mse_loss, 32, not matrices_only)


def network_problem(
    seed: int,
    inputs: Tensor,
    targets: Tensor,
    outputs: int,
    criterion: Callable[..., Tensor],
    batch_size: int,
    bias: bool,
) -> Problem:
    """A network of 32 hidden neurons, on shuffled epochs, each without its incomplete last batch."""
    steps, per_epoch, generator = 500, len(inputs) // batch_size, torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = perceptron(inputs.shape[1], 32, outputs, activation=nn.Tanh, bias=bias)
    orders = [torch.randperm(len(inputs), generator=generator) for _ in range(-(-steps // per_epoch))]
    batches = [batch for order in orders for batch in order[: per_epoch * batch_size].split(batch_size)]

    def batch_loss(step: int) -> Tensor:
        return criterion(model(inputs[batches[step]]), targets[batches[step]])

    return Problem(list(model.parameters()), steps, batch_loss, lambda: criterion(model(inputs), targets))


@dataclass(frozen=True)
class LeastSquares:
    """min |A x - b|^2 / 2 with 200 unknowns, condition number of A about 30, and noise for every step."""

    A: Tensor
    b: Tensor
    noise: Tensor

    @classmethod
    def of(cls, seed: int, noise: float, steps: int = 1000) -> "LeastSquares":
        """The problem of a seed; ``noise`` is the deviation of each entry of A'(A x - b)."""
        generator = torch.Generator().manual_seed(seed)
        A = torch.randn(400, 200, dtype=torch.float64, generator=generator) * torch.from_numpy(
            np.logspace(0, -1.5, 200)
        )
        b = torch.randn(400, dtype=torch.float64, generator=generator)
        return cls(A, b, noise * torch.randn(steps, 200, dtype=torch.float64, generator=generator))

    @property
    def curvature(self) -> float:
        """The largest eigenvalue of A'A.

        Rounded: LAPACK's last bits change from call to call, and chaotic optimizers would blow that up to percents.
        """
        return round(torch.linalg.matrix_norm(self.A, ord=2).item() ** 2, 6)

    @property
    def solution(self) -> Tensor:
        """The minimizer."""
        return torch.linalg.lstsq(self.A, self.b).solution


def least_squares(seed: int, *, matrices_only: bool = False, noise: float = 0.0, steps: int = 1000) -> Problem:
    """200 unknowns in float64, exact gradients."""
    problem = LeastSquares.of(seed, noise, steps)
    curvature, minimizer = problem.curvature, problem.solution.round(decimals=9)
    x = torch.zeros(20, 10, dtype=torch.float64, requires_grad=True)

    def excess() -> Tensor:
        # Not |Ax - b|^2: its large minimum would hide every difference between optimizers.
        return (problem.A @ (x.flatten() - minimizer)).square().sum() / 2 / curvature

    def batch_loss(step: int) -> Tensor:
        return excess() + problem.noise[step] @ x.flatten() / curvature

    return Problem([x], steps, batch_loss, excess)


def noisy_least_squares(seed: int, *, matrices_only: bool = False, steps: int = 1000) -> Problem:
    """Least squares with 0.1 * randn added to each entry of the gradient of |Ax - b|^2 / 2."""
    return least_squares(seed, noise=0.1, steps=steps)


def rosenbrock(seed: int, *, matrices_only: bool = False) -> Problem:
    """The chained Rosenbrock function of 10 variables from near 0, float64; its minimum is 0 at 1."""
    generator = torch.Generator().manual_seed(seed)
    x = (0.1 * torch.randn(2, 5, dtype=torch.float64, generator=generator)).requires_grad_()

    def loss(step: int = 0) -> Tensor:
        head, tail = x.flatten()[:-1], x.flatten()[1:]
        return (100 * (tail - head**2).square().sum() + (1 - head).square().sum()) / 1000

    return Problem([x], steps=1000, batch_loss=loss, exact_loss=loss)


PROBLEMS: dict[str, Callable[..., Problem]] = {
    make.__name__: make for make in (digits, diabetes, least_squares, noisy_least_squares, rosenbrock)
}
"""All take a seed and `matrices_only`: no parameter but matrices, which is all that Muon accepts."""
