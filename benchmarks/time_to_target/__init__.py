"""Who reaches the base's best soonest, and who gets furthest in the same time: ours against every peer.

    python -m benchmarks.time_to_target                all of it; the same command again goes on where it stopped
    python -m benchmarks.time_to_target --tasks digits --methods ema soap --seeds 0:3
    python -m benchmarks.time_to_target --scale 0.05 --results /tmp/race --out /tmp/race    a trial with short runs

Stages, in order; `--only` makes one of them:

    calibrate   what a forward pass costs, in gradients; measured once, then kept with the results
    tune        each method at the same learning rates, on seeds that are not reported
    run         each method at its best rate, for as long as it needs to take the base's time
    table       tables and a performance profile from what is there
"""
