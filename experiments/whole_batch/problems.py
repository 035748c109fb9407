"""The family of problems: every gradient is computed on all samples, so there is no noise.

Most losses contain an L2 term, so that they have a minimum that is reached within a few hundred gradients; without it a
network that separates its classes would improve for ever, and "close to the lowest loss" would mean nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from ..data import load_fashion
from ..networks import perceptron as any_perceptron
from ..optimizers import LABELS
from ..tasks.burgers import Burgers2dFixed
from ..tasks.domains import generator as random

Loss = Callable[[Tensor | None], Tensor]
"""The loss on some rows of the data, or on all of them (None)."""
Misfit = Callable[[Tensor, Tensor], Tensor]
Data = tuple[Tensor, Tensor]
"""Inputs and targets."""
BASES = tuple(LABELS)
perceptron = partial(any_perceptron, activation=nn.Tanh, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A problem with one seed, ready to be trained."""

    parameters: list[nn.Parameter]
    loss: Loss
    samples: int
    optimum: float | None = None
    """The lowest loss there is, where a formula gives it."""


Build = Callable[[int], Case]


@dataclass(frozen=True)
class Problem:
    """A member of the family."""

    name: str
    title: str
    build: Build
    """From the seed, which draws the first weights, and the data where they are synthetic."""
    rates: Mapping[str, tuple[float, ...]]
    """Base optimizer -> learning rates over a factor of about 30."""
    gradients: int = 300
    """How many a method may compute."""
    excess: float | None = None
    """Target: this much above the optimum. None: within 10 % of the lowest loss that any method found."""
    held_out: bool = False
    """Whether nothing may be tuned on it."""


def rates(sgd: float, nesterov: float, adam: float = 0.03) -> dict[str, tuple[float, ...]]:
    """Four rates for each base, from its largest: near the base's limit of stability, but below it.

    >>> rates(sgd=3.0, nesterov=1.0)["sgd"]
    (0.1, 0.3, 1.0, 3.0)
    """
    return {"sgd": four_up_to(sgd), "nesterov": four_up_to(nesterov), "adam": four_up_to(adam)}


def four_up_to(largest: float) -> tuple[float, ...]:
    """Four rates in steps of about three."""
    grid = [float(f"{factor}e{power}") for power in range(-6, 4) for factor in (1, 3)]
    place = grid.index(largest)
    return tuple(grid[place - 3 : place + 1])


# Building blocks


def supervised(model: nn.Module, data: Data, misfit: Misfit, decay: float = 0.0) -> Case:
    """The mean misfit over the samples plus ``decay`` times the sum of squared weights."""
    inputs, targets = data
    parameters = list(model.parameters())

    def loss(rows: Tensor | None = None) -> Tensor:
        chosen = (inputs, targets) if rows is None else (inputs[rows], targets[rows])
        value = misfit(model(chosen[0]), chosen[1])
        return value + decay * sum(p.square().sum() for p in parameters) if decay else value

    return Case(parameters, loss, len(inputs))


def network_on(
    about: str, data: Callable[[], Data], misfit: Misfit, decay: float, *sizes: int, **options: Any
) -> Build:
    """A function with the docstring ``about`` that builds a perceptron, tanh unless told otherwise, on a data set."""

    def build(seed: int) -> Case:
        return supervised(perceptron(*sizes, **options), data(), misfit, decay)

    build.__doc__ = about
    return build


def standardised(values: Tensor) -> Tensor:
    """Columns with mean 0 and deviation 1; constant columns become 0."""
    centred = values - values.mean(0)
    return centred / centred.square().mean(0).sqrt().clamp_min(1e-12)


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal random numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber's loss: quadratic up to half a standard deviation of the targets, linear beyond."""
    return functional.huber_loss(outputs, targets, delta=0.5)


# Data


@cache
def digits() -> Data:
    """1,797 images of 8 x 8 pixels, every pixel standardised."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return standardised(torch.tensor(images)), torch.tensor(labels)


@cache
def diabetes() -> Data:
    """442 patients with 10 features; the target is the progress of the disease."""
    from sklearn.datasets import load_diabetes

    features, progress = load_diabetes(return_X_y=True)
    return standardised(torch.tensor(features)), standardised(torch.tensor(progress)[:, None])


@cache
def breast_cancer() -> Data:
    """569 tumours with 30 features; the target is 1 for benign ones."""
    from sklearn.datasets import load_breast_cancer

    features, benign = load_breast_cancer(return_X_y=True)
    return standardised(torch.tensor(features)), torch.tensor(benign, dtype=torch.float64)[:, None]


def radius() -> Data:
    """The mean radius of the tumours from their 29 other features, which are strongly correlated."""
    features, _ = breast_cancer()
    return features[:, 1:], features[:, :1]


@cache
def fashion(images: int = 10_000) -> Data:
    """The first images of Fashion-MNIST in float32; raises ``MissingData``."""
    pixels, labels, _, _ = load_fashion()
    inputs = torch.tensor(pixels[:images], dtype=torch.float32).flatten(1) / 255
    return (inputs - inputs.mean()) / inputs.std(), torch.tensor(labels[:images], dtype=torch.int64)


# Convex problems


def least_squares(seed: int) -> Case:
    """Nine weights whose features differ in scale by a factor of 12; the optimum is known."""
    generator = random(seed, 9)
    scales = torch.logspace(0, -1, 9, dtype=torch.float64) * 1.2
    inputs = gaussian(generator, 200, 9) * scales
    targets = inputs @ gaussian(generator, 9, 1) + 0.1 * gaussian(generator, 200, 1)
    model = nn.Linear(9, 1, bias=False, dtype=torch.float64)
    case = supervised(model, (inputs, targets), mse_loss)
    best = torch.linalg.lstsq(inputs, targets).solution
    optimum = float((inputs @ best - targets).square().mean())
    return replace(case, optimum=optimum)


def robust(seed: int) -> Case:
    """Huber's loss on 65 linear and quadratic features of the patients."""
    features, progress = diabetes()
    pairs = torch.triu_indices(10, 10)
    quadratic = standardised(features[:, pairs[0]] * features[:, pairs[1]])
    return supervised(perceptron(65, 1), (torch.cat([features, quadratic], 1), progress), huber, decay=1e-3)


def synthetic_softmax(seed: int) -> Case:
    """Eight overlapping classes in 40 correlated dimensions."""
    generator = random(seed, 21)
    labels = torch.randint(8, (600,), generator=generator)
    centres = gaussian(generator, 8, 40)
    mixing = gaussian(generator, 40, 40) / 40**0.5
    inputs = standardised((centres[labels] + 1.5 * gaussian(generator, 600, 40)) @ mixing)
    return supervised(perceptron(40, 8), (inputs, labels), cross_entropy, decay=1e-3)


def synthetic_robust(seed: int) -> Case:
    """Huber's loss with Student's t noise of 1.5 degrees of freedom."""
    generator = random(seed, 23)
    inputs = gaussian(generator, 400, 30) * torch.logspace(0, -0.7, 30, dtype=torch.float64)
    normal, chi = gaussian(generator, 400, 1), gaussian(generator, 400, 3).square().sum(1, keepdim=True) / 2
    targets = inputs @ gaussian(generator, 30, 1) / 3 + 0.3 * normal / chi.sqrt()
    return supervised(perceptron(30, 1), (inputs, targets), huber, decay=1e-4)


# Problems that are not convex


class Factors(nn.Module):
    """Two factors of a matrix; given row and column numbers, the entries of their product."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(0.5 * torch.randn(rows, rank, dtype=torch.float64))
        self.right = nn.Parameter(0.5 * torch.randn(columns, rank, dtype=torch.float64))

    def forward(self, places: Tensor) -> Tensor:
        """One entry for each row of ``places``."""
        return (self.left[places[:, 0]] * self.right[places[:, 1]]).sum(1)


def factorisation(seed: int) -> Case:
    """A 60 x 40 matrix of rank 5 with noise, of which every second entry is known."""
    generator = random(seed, 7)
    matrix = gaussian(generator, 60, 5) @ gaussian(generator, 5, 40) + 0.3 * gaussian(generator, 60, 40)
    known = torch.rand(60, 40, generator=generator) < 0.5
    places = known.nonzero()
    return supervised(Factors(60, 40, 5), (places, matrix[known]), mse_loss, decay=1e-4)


def convolutional(seed: int) -> Case:
    """1,898 weights: two convolutions and a linear layer on digits."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).double()
    return supervised(model, digits(), cross_entropy, decay=1e-4)


def sine(seed: int) -> Case:
    """A network 1-20-20-1 fitted to sin(6 x) at 200 points."""
    inputs = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    data = inputs, torch.sin(6 * inputs)
    case = supervised(perceptron(1, 20, 20, 1), data, mse_loss)
    return replace(case, optimum=0.0)


def pinn(seed: int) -> Case:
    """Burgers' equation with 80 boundary and 800 interior points, fixed for the whole run."""
    task = Burgers2dFixed(depth=3, boundary_points=100, interior_points=1000, viscosity=0.1)
    problem = task.start(seed)
    return Case(list(problem.model.parameters()), lambda rows: problem.loss(0), 880, optimum=0.0)


def synthetic_mlp(seed: int) -> Case:
    """A network 12-20-4 that learns the classes a random network of the same shape assigns."""
    generator = random(seed, 22)
    inputs = gaussian(generator, 500, 12)
    hidden = torch.tanh(inputs @ gaussian(generator, 12, 20) / 2)
    labels = (hidden @ gaussian(generator, 20, 4)).argmax(1)
    return supervised(perceptron(12, 20, 4), (inputs, labels), cross_entropy, decay=3e-4)


WIDE = (784, 128, 128, 10)
FAMILY = (
    Problem("least-squares", "least squares, 9 weights", least_squares, rates(0.3, 0.3), excess=1e-8),
    Problem("softmax", "softmax regression, digits",
            network_on("650 weights on digits.", digits, cross_entropy, 1e-3, 64, 10), rates(3.0, 1.0)),
    Problem("logistic", "logistic regression, tumours",
            network_on("31 weights on the tumours.", breast_cancer, binary_cross_entropy_with_logits, 1e-3, 30, 1),
            rates(3.0, 3.0, 0.1)),
    Problem("ridge", "ridge regression, tumours",
            network_on(radius.__doc__ or "", radius, mse_loss, 1e-3, 29, 1), rates(0.03, 0.03)),
    Problem("huber", "robust regression, patients", robust, rates(0.1, 0.1)),
    Problem("factors", "matrix factorisation", factorisation, rates(10.0, 3.0, 0.1)),
    Problem("mlp", "MLP 64-32-10 tanh, digits",
            network_on("2,410 weights on digits.", digits, cross_entropy, 1e-4, 64, 32, 10), rates(3.0, 1.0),
            gradients=400),
    Problem("relu", "MLP ReLU, patients",
            network_on("1,441 weights on the patients.", diabetes, mse_loss, 3e-3, 10, 32, 32, 1, activation=nn.ReLU),
            rates(0.3, 0.1), gradients=400),
    Problem("conv", "convolutional net, digits", convolutional, rates(3.0, 3.0)),
    Problem("fashion", "MLP, Fashion-MNIST",
            network_on("118,282 weights with tanh on 10,000 images in float32.", fashion, cross_entropy, 1e-3, *WIDE,
                       dtype=torch.float32),
            rates(0.1, 0.03, 0.003)),
    Problem("fashion-relu", "MLP ReLU, Fashion-MNIST",
            network_on("118,282 weights with ReLU on 4,000 images in float32.", partial(fashion, 4_000), cross_entropy,
                       1e-3, *WIDE, activation=nn.ReLU, dtype=torch.float32),
            rates(0.1, 0.03, 0.003)),
    Problem("sine", "sine regression", sine, rates(0.3, 0.03), gradients=400, excess=1e-2),
    Problem("pinn", "PINN, Burgers' equation", pinn, rates(0.03, 0.03), gradients=400, excess=2e-2),
    Problem("softmax-2", "softmax regression, synthetic", synthetic_softmax, rates(10.0, 3.0, 0.1), held_out=True),
    Problem("mlp-2", "MLP 12-20-4 tanh, synthetic", synthetic_mlp, rates(3.0, 3.0, 0.1), gradients=400, held_out=True),
    Problem("huber-2", "robust regression, synthetic", synthetic_robust, rates(1.0, 1.0), held_out=True),
)  # fmt: skip
PROBLEMS = {problem.name: problem for problem in FAMILY}
