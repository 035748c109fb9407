"""Tuning: on seeds of its own, at the same rates for all, by the lowest mean, and a diverged rate is out."""

import json

import pytest
from fake_results import write_run

from experiments import tune, tuning
from experiments.cli import main
from experiments.tasks import TASKS


def write_tuning_runs(results, finals):
    """A run for each spec of the task; ``finals`` gives the metric from method, rate and seed, None for diverged."""
    for spec in tune.specs("digits"):
        final = finals(spec.method, spec.overrides["learning_rate"], spec.seed)
        status = "finished" if final is not None else "diverged"
        rows = [{"step": 1, "seconds": 0.1, "cpu_seconds": 0.1, "loss": 1.0, "validation_loss": final or 9.0}]
        write_run(results, spec.task, spec.variant, spec.seed, status=status, metrics=rows)


def test_every_method_gets_the_same_rates_and_seeds_that_are_not_reported():
    specs = tune.specs("digits")
    per_method = {}
    for spec in specs:
        per_method.setdefault(spec.method, set()).add((spec.seed, spec.overrides["learning_rate"]))
    assert {"base-tuned", "ema", "swa", "lookahead", "schedule-free", "adamw-cosine", "soap", "muon"} <= set(per_method)
    assert "lbfgs" not in per_method, "for PINNs alone"
    assert len({frozenset(tried) for tried in per_method.values()}) == 1
    assert {spec.seed for spec in specs} == {100, 101, 102, 103, 104}
    assert {(spec.overrides["steps"], spec.overrides["decay_every"]) for spec in specs} == {(1250, 500)}


def test_the_lowest_mean_wins_and_one_diverged_seed_rules_a_rate_out(tmp_path):
    def finals(method, rate, seed):
        if method == "ema" and rate == 0.009 and seed == 103:
            return None
        return {0.0003: 4.0, 0.0009: 3.0, 0.003: 2.0 + (seed == 100), 0.009: 1.0}[rate]

    write_tuning_runs(tmp_path, finals)
    entry = tune.best_rates("digits", tmp_path)
    assert entry["rates"]["swa"] == 0.009
    assert entry["rates"]["ema"] == 0.003
    assert entry["tried"]["ema"] == {"0.0003": 4.0, "0.0009": 3.0, "0.003": pytest.approx(2.2), "0.009": None}


def test_the_command_saves_what_it_found_from_runs_that_are_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.runner.run", lambda spec, results, *_: spec.folder(results))
    write_tuning_runs(tmp_path / "runs", lambda method, rate, seed: rate)
    saved = tmp_path / "tuned.json"
    saved.write_text(json.dumps({"diabetes": {"rates": {"ema": 1.0}}}))
    assert main(["tune", "digits", "--results", str(tmp_path / "runs"), "--save", str(saved)]) == 0
    table = json.loads(saved.read_text())
    assert table["digits"]["rates"]["lookahead"] == 0.0003
    assert table["diabetes"] == {"rates": {"ema": 1.0}}, "what was there stays"


def test_a_tuned_rate_is_used_unless_another_is_set(monkeypatch):
    monkeypatch.setattr(tuning, "table", lambda: {"digits": {"rates": {"ema": 0.5}}})
    assert tuning.tuned_rate(TASKS["digits"](), "ema") == 0.5
    assert tuning.tuned_rate(TASKS["digits"](), "swa") == TASKS["digits"]().learning_rate
    assert tuning.tuned_rate(TASKS["digits"](learning_rate=0.1), "ema") == 0.1


def test_the_table_that_comes_along_names_tasks_and_methods_that_exist():
    from experiments.methods import METHODS

    for task, entry in json.loads(tuning.TABLE.read_text()).items():
        assert task in TASKS
        assert all(METHODS[name].tuned for name in entry["rates"])
        assert not set(entry["seeds"]) & set(range(20))
