"""What the acceleration costs on many ranks: memory, messages and arithmetic.

    python -m benchmarks.scaling

``costs`` is the model: small functions of the shapes of the parameters, m, p, q, t, the layout and the ranks N.
``simulation`` is the check: the library itself on one rank of a world of up to 1,536 that is only pretended (torch's
``fake`` backend). Every number of the model that can be simulated is; the command fails where they differ.
``estimates`` turns bytes and flops into times, for machines that are assumed. Nothing is timed here.

The page, its table as CSV and its figure are written to docs/results/scaling.
"""
