"""``python -m experiments race``: the cost to reach the base's best, and the result after equal time.

Its parts, in order:

- calibration: cost of a forward pass, relative to a gradient; measured once and kept with the results
- tuning: each method at the same learning rates, on seeds that are not reported
- runs: each method at its best rate, for as many steps as fit into the base's time
- page: tables and a performance profile from existing runs
"""
