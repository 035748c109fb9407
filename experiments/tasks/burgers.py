"""Burgers' equation solved by physics-informed networks: the paper's two cases and two companions.

L(u) = u_t + u (u_{x_1} + ... + u_{x_{d-1}}) - viscosity * Laplacian of u = f on [-1, 1]^{d-1} x [0, 1]. A batch has
points where u is given (t = 0 and the boundary of space) and points inside; the loss is MSE_u on the former plus MSE_f
on the latter.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import pi
from typing import Any, ClassVar, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, jvp

from torch_anderson import Objective, Term

from ..solutions import burgers
from ..task import Metrics, Problem, Task
from .domains import Product, SineWave, boundary_points, generator, uniform_points
from .pinn import Network, Operator

Equation = SineWave | Product

TRAINING, VALIDATION, ERROR = range(3)
"""Uses of random points: each has separate random numbers."""
PRECISIONS = ("float32", "float64")


class Batch(NamedTuple):
    """Points, and the known values there."""

    boundary: Tensor
    solution: Tensor
    interior: Tensor
    forcing: Tensor


class BurgersProblem(Problem):
    """A network that learns the solution from random points."""

    model: Network

    def __init__(self, task: "Burgers", seed: int) -> None:
        self.task, self.seed = task, seed
        self.equation = task.equation(seed)
        self.model = Network(self.equation.dimensions, task.width, task.depth, task.activation, task.dtype)
        self.operator = Operator(self.model, task.viscosity)
        self.validation = self._draw(1 - task.training_share, VALIDATION)
        self._drawn = lru_cache(maxsize=2)(self._draw)
        self.objective = self._objective()

    def loss(self, step: int) -> Tensor:
        """MSE_u + MSE_f on the batch."""
        mse_u, mse_f = self._errors(self.batch(step))
        return mse_u + mse_f

    def batch(self, step: int) -> Batch:
        """The points of this step."""
        number = step // self.task.hold if self.task.hold else 0
        return self._drawn(self.task.training_share, TRAINING, number)

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """The loss and its parts on the validation points, and the distance from the solution."""
        return _losses(*self._errors(self.validation)) | self.equation.errors(self.model)

    def references(self) -> dict[str, Metrics]:
        """The network that is zero everywhere."""
        squares = self.validation.solution.square(), self.validation.forcing.square()
        return {"zero predictor": _losses(*(square.mean() for square in squares)) | self.equation.zero_errors}

    @torch.no_grad()
    def pictures(self) -> dict[str, NDArray[Any]]:
        """Those of the equation: solution and network, where space and time make a plane."""
        return self.equation.pictures(self.model)

    def _errors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        mse_u = (self.model(batch.boundary).double() - batch.solution).square().mean()
        return mse_u, self.operator.mean_square(batch.interior, batch.forcing)

    def _objective(self) -> Objective:
        """Residuals at single points: those of the batch if it never changes (``hold`` 0), otherwise new ones."""
        residual = partial(burgers_residual, self.task.viscosity)
        if not self.task.hold:
            boundary, solution, interior, forcing = self.batch(0)
            terms = {"boundary": Term(given, (boundary, solution)), "interior": Term(residual, (interior, forcing))}
        else:
            on_boundary, inside = self._counts(self.task.training_share)
            terms = {
                "boundary": Term(given, self._boundary, count=on_boundary),
                "interior": Term(residual, self._interior, count=inside),
            }
        return Objective(self.model, **terms)

    def _draw(self, share: float, *use: int) -> Batch:
        """So large a share of a batch, of points that nothing else uses."""
        random = generator(self.seed, *use)
        on_boundary, inside = self._counts(share)
        return Batch(*self._boundary(on_boundary, random), *self._interior(inside, random))

    def _counts(self, share: float) -> tuple[int, int]:
        return round(share * self.task.boundary_points), round(share * self.task.interior_points)

    def _boundary(self, count: int, random: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        points = boundary_points(count, self.equation.dimensions, random).to(self.task.dtype)
        return points, self.equation.exact(points)

    def _interior(self, count: int, random: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        points = uniform_points(count, self.equation.dimensions, random).to(self.task.dtype)
        return points, self.equation.forcing(points)


def burgers_residual(viscosity: float, u: Callable[[Tensor], Tensor], point: Tensor, forcing: Tensor) -> Tensor:
    """L(u) - f at one point."""
    *space, _ = torch.eye(len(point), dtype=point.dtype)
    slopes, bends = zip(*(jvp(grad(u), (point,), (axis,)) for axis in space), strict=True)
    laplacian = torch.stack([bend @ axis for bend, axis in zip(bends, space, strict=True)]).sum()
    slope: Tensor = slopes[0]
    return burgers(viscosity, u(point), slope[-1], slope[:-1].sum(), laplacian) - forcing


def given(u: Callable[[Tensor], Tensor], point: Tensor, solution: Tensor) -> Tensor:
    """u minus the solution at one point."""
    return u(point) - solution


def _losses(mse_u: Tensor, mse_f: Tensor) -> Metrics:
    return {"validation_mse": float(mse_u + mse_f), "mse_u": float(mse_u), "mse_f": float(mse_f)}


@dataclass(frozen=True, kw_only=True)
class Burgers(Task):
    """Settings that all cases have in common."""

    metric: ClassVar[str] = "validation_mse"
    metrics: ClassVar[Mapping[str, str]] = {
        "validation_mse": "validation MSE",
        "mse_u": "MSE of u at the boundary",
        "mse_f": "MSE of the equation",
        "relative_l2": "relative L2 error",
    }
    pinn: ClassVar[bool] = True

    steps: int = 3000
    width: int
    """Neurons in a hidden layer."""
    depth: int
    """Hidden layers."""
    activation: str = "tanh"
    """tanh, or relu as in the paper: its second derivatives are zero, the viscosity then has no effect."""
    boundary_points: int = 400
    """Points of a batch where the solution is given: half at t = 0, half on the boundary of space."""
    interior_points: int = 4000
    """Points of a batch where the residual of the equation is taken."""
    training_share: float = 0.8
    """Share of a batch that is used for training; the other points, drawn once per seed, are for validation."""
    hold: int = 100
    """Steps for which a batch is kept; 0 for ever."""
    viscosity: float = 0.01 / pi
    precision: str = "float32"
    """Precision of the network: float32 or float64. Solutions and errors are in float64."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in PRECISIONS:
            raise ValueError(f"Invalid precision: {self.precision!r}. Allowed: {', '.join(PRECISIONS)}.")
        for name in ("boundary_points", "interior_points"):
            count = getattr(self, name)
            if not 0 < round(self.training_share * count) < count:
                raise ValueError(f"Invalid {name}: {count}. Some are needed to train on, and some to validate on.")

    @property
    def dtype(self) -> torch.dtype:
        """The precision as a torch dtype."""
        return getattr(torch, self.precision)

    @abstractmethod
    def equation(self, seed: int) -> Equation:
        """The equation to solve."""

    def start(self, seed: int) -> BurgersProblem:
        """The network and its points."""
        return BurgersProblem(self, seed)


@dataclass(frozen=True, kw_only=True)
class Burgers2d(Burgers):
    """One dimension of space: a sine wave that steepens to a shock. No forcing."""

    name: ClassVar[str] = "burgers2d"
    title: ClassVar[str] = "Burgers' equation in 2 dimensions"
    quick: ClassVar[Mapping[str, Any]] = {
        "steps": 1200, "boundary_points": 100, "interior_points": 1000, "hold": 50, "decay_every": 200
    }  # fmt: skip

    width: int = 20
    depth: int = 8
    learning_rate: float = 0.01
    decay_factor: float = 0.2
    decay_every: int = 500
    history_size: int = 5
    period: int = 10
    store_period: int = 5
    relaxation: float = 1.0
    average_window: int = 9

    def equation(self, seed: int) -> Equation:
        """The one of Cole and Hopf."""
        return SineWave(self.viscosity, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Burgers2dFixed(Burgers2d):
    """Burgers' equation without noise: one batch for the whole run, in double precision."""

    name: ClassVar[str] = "burgers2d-fixed"
    title: ClassVar[str] = "Burgers' equation in 2 dimensions, fixed points"
    quick: ClassVar[Mapping[str, Any]] = {name: value for name, value in Burgers2d.quick.items() if name != "hold"}

    hold: int = 0
    precision: str = "float64"


@dataclass(frozen=True, kw_only=True)
class Burgers100d(Burgers):
    """Ninety-nine dimensions of space, where the solution is practically zero at random points."""

    name: ClassVar[str] = "burgers100d"
    title: ClassVar[str] = "Burgers' equation in 100 dimensions"
    metrics: ClassVar[Mapping[str, str]] = {**Burgers.metrics, "u_origin": "u at the origin, t = 0"}
    quick: ClassVar[Mapping[str, Any]] = {
        "steps": 300, "boundary_points": 40, "interior_points": 200, "hold": 10, "decay_every": 100
    }  # fmt: skip

    dimensions: int = 100
    """Dimensions of space and time together."""
    allowed_dimensions: ClassVar[range] = range(2, 1001)
    width: int = 50
    depth: int = 4
    learning_rate: float = 0.05
    decay_factor: float = 0.5
    decay_every: int = 1000
    history_size: int = 20
    period: int = 1
    store_period: int = 1
    relaxation: float = 1.0
    average_window: int = 20
    safeguard: str | None = None
    """The paper's residual test, which defers each jump by a step, would leave no step to average at period 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dimensions not in (allowed := self.allowed_dimensions):
            raise ValueError(f"Invalid dimensions: {self.dimensions}. Allowed: {allowed[0]} to {allowed[-1]}.")

    def equation(self, seed: int) -> Equation:
        """The one whose solution is a product of parabolas."""
        return Product(self.dimensions, self.viscosity, self.dtype, samples=4000, random=generator(seed, ERROR))


@dataclass(frozen=True, kw_only=True)
class BurgersNd(Burgers100d):
    """The equation of ``burgers100d`` in few dimensions, where the solution is of order one."""

    name: ClassVar[str] = "burgers-nd"
    title: ClassVar[str] = "Burgers' equation in a few dimensions"
    quick: ClassVar[Mapping[str, Any]] = {
        "steps": 600, "boundary_points": 100, "interior_points": 500, "hold": 20, "decay_every": 200
    }  # fmt: skip

    dimensions: int = 3
    """Dimensions of space and time together: 2 to 6."""
    allowed_dimensions: ClassVar[range] = range(2, 7)
