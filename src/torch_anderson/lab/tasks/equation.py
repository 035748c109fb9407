"""What the Burgers tasks ask of an equation: ``cole_hopf`` and ``product`` have one each."""

from typing import Protocol

from torch import Tensor, nn

from ..task import Metrics


class Equation(Protocol):
    """What is to be solved, with its exact solution."""

    dimensions: int

    def exact(self, points: Tensor) -> Tensor:
        """The solution at points (n, d), in float64."""

    def forcing(self, points: Tensor) -> Tensor:
        """The right-hand side f at the points, in float64."""

    def errors(self, network: nn.Module) -> Metrics:
        """How far a network is from the solution."""

    def zero_errors(self) -> Metrics:
        """The same for a network that is zero."""
