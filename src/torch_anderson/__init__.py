"""Second-order training of physics-informed networks, and Anderson acceleration of any optimizer, for PyTorch."""

from ._anderson.average import MovingAverage
from ._anderson.optimizer import Anderson
from ._anderson.storage import Storage
from ._fixed_point import Solution, fixed_point
from ._gauss_newton.objective import Objective, Term
from ._gauss_newton.optimizer import GaussNewton
from ._records import JumpRecord, Stats

__version__ = "0.2.0.dev0"
__all__ = [
    "Anderson",
    "GaussNewton",
    "JumpRecord",
    "MovingAverage",
    "Objective",
    "Solution",
    "Stats",
    "Storage",
    "Term",
    "fixed_point",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
