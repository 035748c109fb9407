"""Whole-batch training: how many gradients each optimizer needs on a family of problems without noise.

``problems`` defines the family, ``methods`` the optimizers; ``race`` makes the runs and ``store`` keeps them.
``scores`` derives the numbers, ``page`` and ``figures`` present them. ``batches`` studies how the gain depends on the batch
size.
"""
