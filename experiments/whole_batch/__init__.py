"""Whole-batch training: how many gradients each optimizer needs on a family of problems without noise.

``problems`` defines the family; ``race`` makes the runs; ``scores`` derives the numbers, ``page`` and ``figures``
present them. ``batches`` repeats a part of the comparison with smaller and smaller batches.
"""
