"""Anderson acceleration for PyTorch training."""

from .discrepancy import Discrepancy
from .fixed_point import Solution, fixed_point
from .optimizer import Anderson
from .stats import Acceleration, Stats
from .storage import Storage

__version__ = "0.1.0"
__all__ = ["Acceleration", "Anderson", "Discrepancy", "Solution", "Stats", "Storage", "fixed_point"]
