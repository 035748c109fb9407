"""The race: equal effort for all, shares and ranks by hand, and the whole of it in small as a process."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_results import write_run

from experiments.benchmarks.time_to_target import calibration
from experiments.benchmarks.time_to_target.field import BASE, SETTINGS, entrants, tuning_specs
from experiments.benchmarks.time_to_target.scores import COST, TIME, reach, scores
from experiments.benchmarks.time_to_target.tables import reached_text
from experiments.benchmarks.time_to_target.tuning import NotTuned, race_spec, tuned
from experiments.results import load_run
from experiments.statistics import profile
from experiments.tune import rates

ROOT = Path(__file__).parents[2]
METRIC = "validation_loss"


def digits_run(folder, method, seed, losses, seconds=1.0, status="finished"):
    """A run that was evaluated every ten steps."""
    rows = [
        {"step": 10 * k, "seconds": seconds * k, "cpu_seconds": seconds * k, "loss": 1.0, METRIC: loss}
        for k, loss in enumerate(losses, 1)
    ]
    return load_run(write_run(folder, "digits", method, seed, metrics=rows, status=status))


@pytest.mark.parametrize("task", SETTINGS)
def test_every_method_gets_the_same_tuning_runs_on_seeds_of_their_own(task):
    methods = entrants(task)
    tries = {method: [] for method in methods}
    for spec in tuning_specs(task, methods, SETTINGS[task]):
        assert spec.rate == spec.overrides["learning_rate"], "the rate that is tried is the one that is used"
        tries[spec.method].append((spec.seed, tuple(spec.overrides.items())))
    assert {BASE, "adamw-cosine", "ema", "swa", "lookahead", "schedule-free", "soap", "muon"} <= tries.keys()
    assert ("lbfgs" in tries) == task.startswith("burgers")
    assert all(tried == tries[BASE] and len(tried) == 8 for tried in tries.values())
    assert not {seed for seed, _ in tries[BASE]} & set(range(100))


def test_no_method_of_the_paper_and_no_control_takes_part_but_the_base_always_does():
    assert not {"base", "anderson", "average", "matched-average"} & set(entrants("digits"))
    assert entrants("digits", ["ema"]) == [BASE, "ema"]


def test_the_target_is_reached_at_the_first_evaluation_that_is_not_above_it(tmp_path):
    run = digits_run(tmp_path, "ema", 0, [0.9, 0.5, 0.7, 0.4], seconds=2.0)
    assert reach(run, METRIC, 0.5, COST) == 20
    assert reach(run, METRIC, 0.49, TIME) == 8.0
    assert reach(run, METRIC, 0.39, COST) == math.inf


def test_shares_of_the_base_seed_by_seed_and_what_was_never_reached_is_not_dropped(tmp_path):
    base = {seed: digits_run(tmp_path, BASE, seed, [0.9, 0.6, 0.5, 0.8]) for seed in range(3)}
    ema = {
        0: digits_run(tmp_path, "ema", 0, [0.5, 0.4, 0.4, 0.4], seconds=1.5),
        1: digits_run(tmp_path, "ema", 1, [0.9, 0.9, 0.9, 0.9], seconds=1.5),
        2: digits_run(tmp_path, "ema", 2, [0.9, 0.9, 0.9, 0.9], seconds=1.5),
    }
    found = {score.method: score for score in scores("digits", {BASE: base, "ema": ema})}
    assert found["ema"].reached[COST].shares == (pytest.approx(1 / 3), math.inf, math.inf)
    assert found["ema"].reached[TIME].shares[0] == pytest.approx(1.5 / 3)
    assert reached_text(found["ema"].reached[COST]) == "not reached (1/3)"
    assert reached_text(found[BASE].reached[COST]) == "1.00 (3/3)"
    assert found["ema"].time.mean == pytest.approx(1.5)
    assert found["ema"].final.estimate.mean == pytest.approx((0.4 * 0.9 * 0.9 / 0.8**3) ** (1 / 3))
    assert found["ema"].best.estimate.mean == pytest.approx((0.4 * 0.9 * 0.9 / 0.5**3) ** (1 / 3))


def test_ranks_go_by_the_end_and_only_what_the_interval_cannot_tell_from_the_first_is_level(tmp_path):
    ends = {
        BASE: [1.0, 1.1, 0.9, 1.0],
        "ema": [0.5, 0.56, 0.45, 0.5],
        "swa": [0.4, 0.7, 0.4, 0.6],
        "soap": [0.49, 0.55, 0.44, None],
    }
    methods = {
        name: {
            seed: digits_run(tmp_path, name, seed, [end or 9.0], status="finished" if end else "diverged")
            for seed, end in enumerate(values)
        }
        for name, values in ends.items()
    }
    found = scores("digits", methods)
    assert [(score.method, score.level) for score in found] == [
        ("ema", True), ("swa", True), (BASE, False), ("soap", False),
    ]  # fmt: skip
    assert found[-1].final.diverged == 1


def test_a_profile_counts_what_is_unsolved_and_compares_with_the_best_of_each_problem():
    a, b, c = ("digits", 0), ("digits", 1), ("fashion", 0)
    found = profile({"x": {a: 2.0, b: 8.0, c: math.inf}, "y": {a: 4.0, b: 4.0, c: 5.0}, "z": {a: 2.0}})
    assert found["x"] == ([1.0, 2.0], [1 / 3, 2 / 3])
    assert found["y"] == ([1.0, 1.0, 2.0], [1 / 3, 2 / 3, 1.0])
    assert found["z"] == ([1.0], [1.0])


def write_tuning_runs(folder, final, pace):
    """A run for each tuning spec of digits; functions give the metric (None: diverged) and the seconds of a step."""
    for spec in tuning_specs("digits", [BASE, "ema"], SETTINGS["digits"]):
        end = final(spec.method, spec.rate, spec.seed)
        seconds = 100 * pace(spec.method, spec.rate)
        rows = [{"step": 100, "seconds": 9.0, "cpu_seconds": seconds, "loss": 1.0, METRIC: end or 9.0}]
        status = "finished" if end is not None else "diverged"
        write_run(folder, "digits", spec.variant, spec.seed, metrics=rows, status=status)


def test_the_lowest_geometric_mean_wins_and_a_rate_that_diverged_is_out(tmp_path):
    ends = {0.0003: (4.0, 4.0), 0.0009: (0.1, 8.0), 0.003: (1.0, 1.0), 0.009: (0.01, None)}
    assert list(ends) == rates(0.003)
    write_tuning_runs(tmp_path, lambda _, rate, seed: ends[rate][seed - 100], lambda *_: 1.0)
    found = tuned("digits", "ema", SETTINGS["digits"], tmp_path)
    assert found.rate == 0.0009, "0.1 and 8 have the mean 4.05, their geometric mean is 0.89"
    assert found.tried[0.009] == math.inf
    assert not found.at_edge


def test_a_slower_method_gets_fewer_steps_and_a_schedule_that_fits_them(tmp_path):
    slow = {0.0003: 2.0, 0.0009: 2.0, 0.003: 2.0, 0.009: 40.0}
    write_tuning_runs(tmp_path, lambda *_: 1.0, lambda method, rate: slow[rate] if method == "ema" else 1.0)
    settings = {"steps": 3000, "decay_every": 1200, "evaluate_every": 10, "width": 32, "forward_cost": 0.3}
    with pytest.raises(NotTuned, match="ema is not tuned for digits"):
        tuned("digits", "ema", settings, tmp_path)
    found = tuned("digits", "ema", SETTINGS["digits"], tmp_path)
    assert found.slowness == 2.0, "the median: one outlier does not count"
    spec = race_spec("digits", "ema", 3, settings, found)
    assert dict(spec.overrides) == {
        "steps": 1500, "decay_every": 600, "evaluate_every": 5,
        "width": 32, "forward_cost": 0.3, "learning_rate": 0.0003,
    }  # fmt: skip


def test_a_forward_pass_is_measured_once_and_cheaper_than_a_gradient(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "ROUND", 0.005)
    first = calibration.calibration(["diabetes"], tmp_path)
    assert 0 < first["diabetes"]["forward_cost"] < 1
    monkeypatch.setattr(calibration, "measure", lambda task: pytest.fail("it is known"))
    assert calibration.calibration(["diabetes"], tmp_path) == first


def race(folder, *words):
    """The benchmark as a process; returns what it said."""
    program = [sys.executable, "-m", "experiments", "race"]
    command = [*program, "--results", "runs", "--out", "page", *words]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_whole_race_in_small_and_again_without_a_new_run(tmp_path):
    words = ["--tasks", "diabetes", "burgers2d", "--methods", "ema", "lbfgs", "--seeds", "0:2", "--scale", "0.01"]
    estimate = race(tmp_path, *words, "--dry-run")
    assert "40 runs to tune and 10 to compare are left. Estimated time:" in estimate.stdout
    early = race(tmp_path, *words, "--only", "page")
    assert early.returncode == 2 and "not tuned" in early.stderr and "Traceback" not in early.stderr
    first = race(tmp_path, *words)
    assert first.returncode == 0, first.stderr
    page = (tmp_path / "page" / "README.md").read_text()
    assert all(words in page for words in ("Burgers' equation in 2 dimensions", "base, then L-BFGS", "relative L2"))
    assert (tmp_path / "page" / "profile.png").stat().st_size > 10_000
    assert len((tmp_path / "page" / "runs.csv").read_text().splitlines()) == 1 + 10
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("**/*") if path.is_file()}
    again = race(tmp_path, *words)
    assert again.returncode == 0 and "0 runs to tune and 0 to compare are left" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("**/*") if path.is_file()} == before
    assert (tmp_path / "page" / "README.md").read_text() == page


@pytest.mark.slow
def test_a_wrong_name_is_answered_with_the_nearest(tmp_path):
    said = race(tmp_path, "--tasks", "digit")
    assert said.returncode == 2
    assert "Did you mean digits" in said.stderr and "Traceback" not in said.stderr
    assert "Did you mean" in race(tmp_path, "--tasks", "digits", "--methods", "sopa").stderr
