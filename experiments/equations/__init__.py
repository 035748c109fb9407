"""Equations and surrogates: the error that optimizers reach in a given processor time.

``problems`` and ``surrogates`` define what is solved; ``race`` makes the runs, ``clock`` measures them; ``scores``
derives the numbers, ``page`` and ``figures`` present them.
"""
