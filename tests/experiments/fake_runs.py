"""Runs of the paper's tasks that are made up, without files."""

from math import nan
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.claims import CLAIMS
from experiments.results import DIVERGED, FINISHED, Run

STEPS, EVERY = 1000, 2
PAPER = {"admissions": (1, 10, 0.1), "burgers2d": (10, 5, 1.0), "burgers100d": (1, 20, 1.0)}
METRIC = "validation_mse"


def fake(
    method="base", seed=0, *, task="admissions", final=0.01, wobble=0.05, profile="paper", status=FINISHED, speed=1.0,
    stats=None, cpu=1.0, loss=None, jump=0.0, overrides=None, **settings,
):  # fmt: skip
    """A run whose metric falls to ``final`` and then wobbles by so much; ``jump`` is how it rises at each new batch."""
    noise = np.random.default_rng([seed, len(method)])
    period, size, relaxation = PAPER[task]
    settings = {
        "steps": STEPS, "evaluate_every": EVERY, "batch_size": 40, "width": 64, "hold": 100, "period": period,
        "store_period": 1, "history_size": size, "relaxation": relaxation, "safeguard": "residual",
        "average_window": 10, "average_tolerance": 0.1,
    } | settings  # fmt: skip
    steps = np.arange(1, STEPS + 1)
    values = final * (1 + 100 * np.exp(-steps * speed / 20)) * np.exp(noise.normal(0, wobble, STEPS))
    values *= np.exp(jump * ((steps - 1) % 100 < 20) * (steps > 100))
    seconds = cpu * steps / STEPS
    frame = pd.DataFrame(
        {"step": steps, "cpu_seconds": seconds, "loss": final if loss is None else loss, METRIC: values}
    )
    frame.loc[steps % EVERY != 0, METRIC] = nan
    last = None if status == DIVERGED else final * np.exp(noise.normal(0, 0.01))
    end = {METRIC: last} | ({} if task == "admissions" else {"relative_l2": last})
    config = {
        "task": task, "method": method, "variant": f"{method}{settings}", "seed": seed, "profile": profile,
        "settings": settings, "overrides": overrides or {},
    }  # fmt: skip
    summary = {
        "status": status, "steps": STEPS, "seconds": cpu, "cpu_seconds": cpu, "final": end, "best": end,
        "stats": stats or {},
        "references": {"ordinary least squares": {METRIC: 0.0036}, "zero predictor": {METRIC: 0.1}},
    }  # fmt: skip
    run = Run(Path(f"{task}/{method}/seed-{seed:03d}"), config, summary)
    run.__dict__["steps"] = frame
    return run


def seeds(method="base", count=5, **options):
    return [fake(method, seed, **options) for seed in range(count)]


def judged(name, runs):
    return next(claim for claim in CLAIMS if claim.name == name).judge(runs)


def sweep(method, name, values, of, **options):
    """Five seeds at each value; ``of`` gives what the run is like there."""
    return [run for value in values for run in seeds(method, **{name: value}, **of(value), **options)]


def three_tasks(**options):
    """Base and both kinds of Anderson on the paper's tasks; options by method, an underscore for its plus."""
    every = {"base": {}, "anderson": {}, "anderson+average": {}} | {k.replace("_", "+"): v for k, v in options.items()}
    return [run for task in PAPER for method, more in every.items() for run in seeds(method, task=task, **more)]


def windows(of, wobble=0.05):
    """Base with so much noise, and the average at three windows."""
    return seeds(wobble=wobble) + sweep("average", "average_window", (2, 5, 10), of)


def noisy(wobble):
    return {"wobble": wobble}


def gain(size):
    return seeds(batch_size=size, loss=1.0) + seeds("anderson", batch_size=size, loss=2 / size, period=10)


def timed(of):
    """A base step of 1 ms, and what ``of`` says that an acceleration adds."""
    runs = seeds(cpu=1.0)
    for size, period in ((4, 1), (8, 1), (16, 1), (32, 1), (8, 4), (8, 16), (8, 64)):
        options = {"history_size": size, "period": period, "store_period": period}
        runs += seeds("anderson", cpu=1 + of(size, period), **options)
    return runs


def scattered(method, ratio, **options):
    """Runs that end at so many times what base does, give or take a factor of two."""
    return [fake(method, seed, final=0.01 * ratio * 2.0 ** (1 - seed % 3), **options) for seed in range(5)]


def tilted(method, name, values, of):
    """Runs whose trend differs from seed to seed: ``of`` gets the value and an exponent between -0.4 and 0.4."""
    return [fake(method, seed, **{name: value}, **of(value, 0.2 * (seed - 2))) for value in values for seed in range(5)]


def limit(method, final, **settings):
    """Runs that end at exactly this."""
    runs = seeds(method, **settings)
    for run in runs:
        run.summary["final"][METRIC] = final
    return runs
