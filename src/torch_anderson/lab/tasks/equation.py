"""The interface of the equations of the Burgers tasks: ``cole_hopf`` and ``product`` have one each."""

from typing import Protocol

from torch import Tensor, nn

from ..task import Metrics


class Equation(Protocol):
    """An equation with its exact solution."""

    dimensions: int

    def exact(self, points: Tensor) -> Tensor:
        """The solution at points (n, d), in float64."""

    def forcing(self, points: Tensor) -> Tensor:
        """The right-hand side f at the points, in float64."""

    def errors(self, network: nn.Module) -> Metrics:
        """How far a network is from the solution."""

    def zero_errors(self) -> Metrics:
        """The metrics of a network that is zero."""
