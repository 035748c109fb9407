"""Gauss-Newton jumps, driven by the model's outputs: the doors, the algorithm, and one module for each part of it."""
