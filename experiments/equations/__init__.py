"""Equations and surrogates: the error that optimizers reach in a given processor time.

``problems`` and ``surrogates`` define what is solved, ``references`` the solutions without a formula; ``methods`` and
``quasi_newton`` define the optimizers; ``race`` makes the runs and ``store`` finds them again; ``scores`` derives the
numbers, ``page`` and ``figures`` present them.
"""
