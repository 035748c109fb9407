"""Gauss-Newton jumps, driven by the model's outputs: the public classes (``door``), the algorithms, and their parts."""
