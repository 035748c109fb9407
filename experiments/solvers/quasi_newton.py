"""Quasi-Newton peers in float64: Adam then L-BFGS, and Adam then self-scaled Broyden.

Both fit points that stay for some iterations, on traced losses. When points are drawn anew, those with large residuals
stay: without that, self-scaled Broyden was far worse on Burgers' equation (one seed).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torch_anderson import Objective, Term

from . import Case, Clock
from .traced import TracedLoss

Vector = NDArray[np.float64]
Closure = Callable[[], Tensor]
WARM_UP = 500
"""Steps of Adam before."""
WARM_UP_RATE = 1e-3
CALL = 20
"""Iterations of L-BFGS between two looks at the clock."""
LBFGS_HISTORY = 100
PERIOD = 100
"""Iterations for which points stay."""


def warmed_up(clock: Clock) -> "Points":
    """Points to fit, after some steps of Adam on others."""
    points = Points(clock.case, retaining(clock.case.terms))
    adam = torch.optim.Adam(clock.case.model.parameters(), lr=WARM_UP_RATE)
    for _ in range(WARM_UP):
        clock.tick(adam.step(points.draw(keep=False)))
    return points


def retaining(terms: Mapping[str, Term]) -> dict[str, Term]:
    """The terms with samples that stay where residuals are large."""
    return {name: term if term.fixed else replace(term, retain=True) for name, term in terms.items()}


class Points:
    """Draws points for the terms of a case, on traced losses."""

    def __init__(self, case: Case, terms: Mapping[str, Term]) -> None:
        self.objective = Objective(case.model, **terms)
        self.traced = TracedLoss(self.objective)
        self.drawn: Any = None

    @property
    def fixed(self) -> bool:
        """Whether there is nothing to draw."""
        return all(term.fixed for term in self.objective.terms.values())

    @torch.no_grad()
    def draw(self, keep: bool = True) -> Closure:
        """A closure for other points, among which those with large residuals stay if wanted."""
        if keep and self.drawn is not None:
            self.drawn.loss()  # tells the objective the residuals at the present weights
        self.drawn = self.objective.draw()
        return self.traced.on(self.drawn.draw())


def lbfgs(clock: Clock, rate: float) -> None:
    """Adam, then torch's L-BFGS with strong Wolfe line search; other points and no history after each period."""
    points = warmed_up(clock)
    while True:
        closure = points.draw()
        optimizer = torch.optim.LBFGS(
            clock.case.model.parameters(), lr=1.0, max_iter=CALL, history_size=LBFGS_HISTORY, tolerance_grad=0.0,
            tolerance_change=0.0, line_search_fn="strong_wolfe",
        )  # fmt: skip
        before, iterations = -1, 0
        # A call that makes no iteration has nothing left to do on these points.
        while before < iterations and (points.fixed or iterations < PERIOD):
            before = iterations
            loss = optimizer.step(closure)  # type: ignore[arg-type]
            iterations = next(iter(optimizer.state.values()))["n_iter"]
            clock.tick(loss)


def ssbroyden(clock: Clock, rate: float) -> None:
    """Adam, then self-scaled Broyden; other points after each period, with the same approximate Hessian."""
    points = warmed_up(clock)
    parameters = list(clock.case.model.parameters())
    point = nn.utils.parameters_to_vector(parameters).detach().numpy()
    inverse: Vector | None = None
    while True:
        surface = Surface(points.draw(), parameters)
        if inverse is None:
            # The first step has length 1: the scaling below lets the matrix grow, but not shrink.
            inverse = np.eye(len(point)) / max(1.0, float(np.linalg.norm(surface.gradient(point))))
        count = 0
        for count, state in enumerate(broyden_iterations(surface, point, inverse), 1):
            surface.go_to(state.point)
            point = state.point
            clock.tick(state.value)
            if count == PERIOD and not points.fixed:
                break
        if count < 2:  # no progress along the quasi-Newton direction: begin again
            inverse = None
            clock.tick()


class Surface:
    """A loss as a function of all weights in one vector."""

    def __init__(self, closure: Closure, parameters: list[nn.Parameter]) -> None:
        self.closure, self.parameters = closure, parameters
        self.known: dict[bytes, tuple[float, Vector]] = {}

    def go_to(self, point: Vector) -> None:
        """Set the weights."""
        nn.utils.vector_to_parameters(torch.from_numpy(point), self.parameters)

    def both(self, point: Vector) -> tuple[float, Vector]:
        """Loss and gradient; the last few are remembered, as line searches ask for them one by one."""
        name = point.tobytes()
        if name not in self.known:
            self.go_to(point)
            value = float(self.closure())
            gradient = nn.utils.parameters_to_vector([p.grad for p in self.parameters if p.grad is not None]).numpy()
            self.known = dict([*self.known.items()][-3:]) | {name: (value, gradient)}
        return self.known[name]

    def value(self, point: Vector) -> float:
        """The loss."""
        return self.both(point)[0]

    def gradient(self, point: Vector) -> Vector:
        """The gradient."""
        return self.both(point)[1]


@dataclass(frozen=True)
class State:
    """Where the iteration is."""

    point: Vector
    value: float
    gradient: Vector


def broyden_iterations(surface: Surface, start: Vector, inverse: Vector) -> Iterator[State]:
    """Self-scaled Broyden (Al-Baali 1998, Urbán et al. 2024) from a point; ends where no step lowers the loss.

    ``inverse``, the approximate inverse Hessian, is changed in place.
    """
    state = State(start, *surface.both(start))
    while True:
        direction = -inverse @ state.gradient
        length = step_length(surface, state, direction)
        if length is None:
            return
        step = length * direction
        after = State(state.point + step, *surface.both(state.point + step))
        change = after.gradient - state.gradient
        if step @ change > 0:
            update(inverse, step, change, float(-length * (step @ state.gradient)))
        state = after
        yield state


def step_length(surface: Surface, state: State, direction: Vector) -> float | None:
    """By the strong Wolfe conditions, or by halving where SciPy's search fails; None if the loss does not fall."""
    import warnings

    from scipy.optimize import line_search

    slope = float(state.gradient @ direction)
    if not slope < 0:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        length = line_search(
            surface.value, surface.gradient, state.point, direction, state.gradient, state.value, c2=0.9, maxiter=20
        )[0]
    if length is not None:
        return float(length)
    lengths = (0.5**power for power in range(20))
    return next(
        (a for a in lengths if surface.value(state.point + a * direction) < state.value + 1e-4 * a * slope), None
    )


def update(inverse: Vector, step: Vector, change: Vector, bent: float) -> None:
    """H <- (H - Hyy'H / y'Hy + phi vv') / tau + ss' / s'y, with v = sqrt(y'Hy) (s / s'y - Hy / y'Hy), in place.

    s is the step, y the change of the gradient, and ``bent`` is s'Bs, where B is the inverse of H.
    """
    image = inverse @ change
    curvature, size = float(step @ change), float(change @ image)
    tau, phi = self_scaling(bent / curvature, size / curvature, len(step))
    v = math.sqrt(size) * (step / curvature - image / size)
    columns = np.stack([image, v, step], 1)
    factors = np.array([-1 / (size * tau), phi / tau, 1 / curvature])
    matrix, left, right = (torch.from_numpy(array) for array in (inverse, columns * factors, columns))
    matrix.addmm_(left, right.T, beta=1 / tau)  # one pass over the matrix


def self_scaling(b: float, h: float, weights: int) -> tuple[float, float]:
    """The factor tau and the member phi of Broyden's family, from b = s'Bs / s'y and h = y'Hy / s'y.

    Symbols as in Urbán et al. (2024), equations 13 to 23.

    >>> self_scaling(1.0, 1.0, 10)  # where the Hessian is right along the step: BFGS without scaling
    (1.0, 1.0)
    """
    a = max(h * b - 1, 1e-16)  # not negative, by the Cauchy-Schwarz inequality
    rho = min(1.0, h * (1 - math.sqrt(a / (a + 1))))
    theta = max((rho - 1) / a, min(1 / rho, (1 - b) / b))
    sigma = 1 + a * theta
    root = abs(sigma) ** (1 / (1 - weights))
    first = min(1.0, 1 / b)
    tau = first * min(root, 1 / theta) if theta > 0 else min(first * root, sigma)
    return tau, (1 - theta) / sigma
