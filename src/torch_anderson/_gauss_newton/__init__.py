"""Gauss-Newton jumps: the public classes (``optimizer``, ``objective``), the algorithm (``driver``), and its parts."""
