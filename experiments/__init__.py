"""The paper's experiments and more as one command, with controls, figures and a page to read.

``python -m experiments`` in a clone, with the extra ``experiments`` installed; the wheel does not contain them. They
use nothing of the library but its public names; measurements of its parts, in ``benchmarks``, are exceptions.
"""
