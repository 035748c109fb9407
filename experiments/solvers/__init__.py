"""How methods train until their time or their gradients are used up: on a clock, or on a meter.

``loops`` has the first-order methods and those of other packages, ``quasi_newton`` L-BFGS and self-scaled Broyden on
points that stay, ``levenberg_marquardt`` the peer of that name; ``traced`` gives peers the loss as a graph.
"""

from typing import Any, Protocol

Case = Any
"""An ``experiments.equations.case.Case``: a model and the terms of its loss."""


class Clock(Protocol):
    """What a method needs of ``experiments.equations.clock.Clock``, which ends a run when its time is used up."""

    case: Case
    optimizer: Any

    @property
    def share(self) -> float:
        """The share of the time that is used up."""

    def tick(self, loss: Any = ...) -> None:
        """Called after every step; raises an exception at the end."""
