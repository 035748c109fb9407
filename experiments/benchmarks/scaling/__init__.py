"""The cost of the acceleration on many ranks: memory, messages and arithmetic.

    python -m experiments.benchmarks.scaling

``costs`` is the model: small functions of the shapes of the parameters, m, p, q, t, the layout and the ranks N.
``simulation`` is the check: the library on one rank of a simulated world of up to 1,536 ranks (torch's ``fake``
backend). Every number of the model that can be simulated is compared; the command fails if they differ.
``estimates`` converts bytes and flops to times, for assumed machines. Nothing is timed here.

The page, its table as CSV and its figure are written to docs/results/scaling.
"""
