"""Anderson acceleration, driven by residuals: the door, the algorithm, and one module for each part of it."""
