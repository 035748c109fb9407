"""Whole-batch training: how many gradients each optimizer needs on a family of problems without noise.

``problems`` defines the family and ``methods`` the optimizers; ``race`` makes the runs and ``store`` keeps them;
``scores`` derives the numbers, ``page`` and ``figures`` present them. ``batches`` repeats a part of the comparison with
smaller and smaller batches.
"""
