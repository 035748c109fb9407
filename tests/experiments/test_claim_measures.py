"""Measures of runs, trends and formulas from which verdicts on the paper's claims are made."""

from math import inf

import numpy as np
import pytest

pytest.importorskip("plotly")

from fake_runs import METRIC, STEPS, fake, seeds

from experiments.claims import averaging, cost, evidence, figures, measures
from experiments.results import DIVERGED


def test_no_oscillation_at_all_is_a_small_one():
    steady = fake(wobble=0.0, speed=100.0)
    assert measures.amplitude(steady) == measures.LEAST_AMPLITUDE


def test_amplitude_is_the_noise_around_a_trend():
    steady = fake(wobble=0.1, final=1.0)
    assert measures.amplitude(steady) == pytest.approx(0.1, rel=0.5)
    drifting = fake(wobble=0.1, final=1.0)
    drifting.steps[METRIC] *= np.exp(-drifting.steps["step"] / 1000)
    assert measures.amplitude(drifting) == pytest.approx(measures.amplitude(steady), rel=0.1)
    assert measures.amplitude(fake(status=DIVERGED)) == inf


def test_the_time_of_a_step_leaves_out_how_a_process_warms_up():
    run = fake(cpu=2.0)
    run.steps["cpu_seconds"] += 5.0 * (run.steps["step"] > 1)
    assert measures.seconds_per_step(run) == pytest.approx(2.0 / STEPS)


def test_a_trend_finds_the_exponent_of_a_power():
    groups = {x: {seed: fake(seed=seed, final=x**-1.5) for seed in range(4)} for x in (1.0, 2.0, 4.0)}
    found = evidence.trend(groups, lambda run: run.steps["loss"].iloc[-1])
    assert found.slope.mean == pytest.approx(-1.5) and found.slope.half == pytest.approx(0, abs=1e-12)


def test_a_sweep_keeps_settings_apart():
    runs = seeds(batch_size=10) + seeds(batch_size=40) + seeds(batch_size=80, width=8)
    found = evidence.sweep(runs, "batch_size")
    assert list(found) == [10, 40]


def test_a_rise_at_each_change_is_measured():
    assert figures.excess_rise(fake(wobble=0.0, jump=0.7, speed=10, task="burgers2d")) == pytest.approx(0.7, abs=1e-6)
    assert figures.excess_rise(fake(wobble=0.0, jump=0.0, speed=10, task="burgers2d")) == pytest.approx(0.0, abs=1e-6)


def test_the_variance_formulas_agree_with_sums():
    for t in (2, 5, 10):
        paper = sum((t - i) ** 2 / t**2 for i in range(1, t)) / t
        assert averaging.variance_ratio(t) == pytest.approx(paper)
        walk = np.cumsum(np.eye(t), axis=0)  # iterates as sums of unit noises
        assert averaging.walk_variance_ratio(t) == pytest.approx((walk.mean(0) ** 2).sum() / (walk[-1] ** 2).sum())


def test_cost_constants_are_found_again():
    points = [cost.Point(0, 1, 2.0), cost.Point(4, 1, 2 + 0.3 * 16), cost.Point(8, 4, 2 + 0.3 * 16)]
    assert cost.fit(points, cost.paper_formula) == pytest.approx((2.0, 0.3, 0.0), abs=1e-9)
