"""Anderson acceleration for PyTorch training."""

from .fixed_point import Solution, fixed_point
from .optimizer import Anderson
from .stats import Acceleration, Stats

__all__ = ["Acceleration", "Anderson", "Solution", "Stats", "fixed_point"]
