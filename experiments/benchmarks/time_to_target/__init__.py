"""Compares methods by the cost to reach the base's best, and by the result after equal time: ours against all peers.

    python -m experiments.benchmarks.time_to_target                everything; run it again to resume
    python -m experiments.benchmarks.time_to_target --tasks digits --methods ema soap --seeds 0:3
    python -m experiments.benchmarks.time_to_target --scale 0.05 --results /tmp/race --out /tmp/race    short runs

Stages, in order; `--only` makes one of them:

    calibrate   cost of a forward pass, relative to a gradient; measured once and kept with the results
    tune        each method at the same learning rates, on seeds that are not reported
    run         each method at its best rate, for as many steps as fit into the base's time
    table       tables and a performance profile from existing runs
"""
