"""The runs of the study of equations: the clock, the store, scores and the page."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from experiments.equations import race
from experiments.equations.clock import Clock, Spent, marks
from experiments.equations.page import build_page
from experiments.equations.problems import PROBLEMS
from experiments.equations.race import Entry
from experiments.equations.scores import Scores, best_rates, error_at
from experiments.jobs import ARRAYS, unfinished
from experiments.methods import SOLVERS, Method
from experiments.results import append_line, write_arrays
from experiments.sweep import ERROR, sweep

# The clock


def test_the_evaluation_of_the_error_takes_no_time(monkeypatch):
    now = 5.0

    def burn(seconds):
        nonlocal now
        now += seconds

    class Slow:
        def error(self):
            burn(0.02)
            return 1.0

    monkeypatch.setattr(time, "process_time", lambda: now)
    clock = Clock(Slow(), 0.1)
    with pytest.raises(Spent):
        while True:
            burn(0.004)
            clock.tick()
    assert clock.elapsed == pytest.approx(0.104) and now == pytest.approx(5.104 + 0.02 * len(clock.errors))
    assert len(clock.errors) > 5 and clock.times == sorted(clock.times)


def test_a_run_that_diverges_ends():
    class Broken:
        def error(self):
            return math.nan

    clock = Clock(Broken(), 1000.0)
    clock.waiting = [0.0]
    with pytest.raises(Spent):
        clock.tick()


def test_errors_are_taken_at_the_times_of_the_tables():
    assert {20.0, 60.0, 120.0} <= set(marks(120.0)) and max(marks(120.0)) == 120.0
    assert {20.0, 60.0, 120.0, 600.0} <= set(marks(600.0)) and 20 <= len(marks(600.0)) <= 24


# The store


def test_runs_that_are_there_are_not_made_again(tiny, tmp_path):
    asked = [Entry("tiny", "adam", rate, seed, 0.05) for seed in (0, 1) for rate in (0.001, 0.01)]

    def make():
        outcomes = sweep(asked, tmp_path)
        assert not any(outcome.failed for outcome in outcomes)
        return [outcome.job for outcome in outcomes if not outcome.done_before]

    assert make() == asked and make() == []
    path = asked[0].line_file(tmp_path)
    whole = path.read_text().splitlines()
    path.write_text("\n".join([*whole[:2], whole[2][:50], whole[3]]))
    assert Entry.load(tmp_path)[1] and make() == [asked[2]]
    assert all({"date", "versions", "hardware", "times"} <= each.keys() for each in Entry.load(tmp_path)[0])


def test_a_long_run_contains_the_short_one_unless_its_rate_is_scheduled(tmp_path):
    def asked(method, seconds):
        return Entry("reaction", method, 0.01, 0, seconds)

    for method in ("adam", "adam-cosine"):
        keep(tmp_path, fake("reaction", method, 0.01, 0, 120, [0.5]))
    wanted = [asked("adam", 60.0), asked("adam", 600.0), asked("adam-cosine", 60.0), asked("adam-cosine", 120.0)]
    assert unfinished(wanted, tmp_path) == [wanted[1], wanted[2]]


def test_error_maps_are_kept_beside_the_record(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(PROBLEMS, "tiny", replace(PROBLEMS["tiny"], picture=(5, 6)))
    job = Entry("tiny", "adam", 0.01, 0, 0.05)
    sweep([job], tmp_path)
    (record,), _ = Entry.load(tmp_path)
    assert ARRAYS not in record
    with np.load(job.arrays_file(tmp_path)) as arrays:
        size = PROBLEMS["tiny"].build().size
        assert np.linalg.norm(arrays["0.05"]) / size == pytest.approx(record["errors"][-1], rel=1e-5)


# Scores and the page


def fake(problem, method, rate, seed, seconds, errors):
    """A record with errors at 20, 60 and 120 s."""
    times = [20.1, 60.2, 120.3][: len(errors)]
    return {
        "problem": problem, "method": method, "rate": rate, "seed": seed, "seconds": float(seconds), "times": times,
        "errors": errors, "losses": errors, "steps": 7, "cpu_seconds": float(seconds), "stats": {},
        "date": "2026-01-02T03:04:05+00:00", "versions": {"torch": "2.13"}, "hardware": {"cpu": "Imaginary CPU"},
    }  # fmt: skip


def keep(results, record):
    append_line(results / record["problem"] / f"{record['method']}.jsonl", record)


def study():
    records = []
    for seed, factor in ((0, 1.0), (1, 4.0)):
        for problem in ("burgers2d", "helmholtz", "fluid"):
            records += [
                fake(problem, "gauss-newton-adam", 0.001, seed, 120, [1e-4 * factor, 1e-5 * factor, 1e-6 * factor]),
                fake(problem, "adam", 0.001, seed, 120, [0.9, 0.8, 0.7]),
                fake(problem, "adam", 0.01, seed, 120, [0.5, 0.4, None]),
                fake(problem, "adam-cosine", 0.01, seed, 60, [0.6, 0.1]),
                fake(problem, "ssbroyden", None, seed, 120, [0.3, 1e-6, 1e-7]),
            ]
    records.append(fake("burgers2d", "soap", 0.01, 100, 120, [1e-9, 1e-9, 1e-9]))
    return records


def test_scores_by_hand():
    scores = Scores(study())
    adam = scores.family("burgers2d", "adam")
    assert adam == ["adam", "adam-cosine"]
    picks = {t: scores.at("burgers2d", adam, t) for t in (20, 60, 120, 600)}
    assert (picks[20].method, picks[20].rate) == ("adam", 0.01) and picks[20].mean == pytest.approx(0.5)
    assert (picks[60].method, picks[60].length) == ("adam-cosine", 60.0)
    assert picks[120].rate == 0.001 and picks[600] is None, "the other rate diverged"
    ours = scores.at("burgers2d", ["gauss-newton-adam"], 20)
    assert ours.mean == pytest.approx(2e-4) and ours.spread == pytest.approx(4)
    assert scores.ratio("burgers2d", adam, 60) == pytest.approx(2e-5 / 0.1)
    assert scores.ratio("burgers2d", scores.peers("burgers2d"), 60) == pytest.approx(20), "a loss is a loss"
    assert not scores.family("burgers2d", "soap"), "seeds for tuning are not reported"


def test_long_runs_contain_short_ones_unless_their_rate_is_scheduled():
    records = [fake("kdv", "gauss-newton-adam", 0.001, 0, 120, [0.4, 0.3, 0.2])]
    records += [
        fake("kdv", "gauss-newton-adam", 0.001, 1, 20, [0.1]),
        fake("kdv", "soap-cosine", 0.01, 0, 60, [0.5, 0.1]),
    ]
    scores = Scores(records)
    assert scores.at("kdv", ["gauss-newton-adam"], 20).errors == {0: 0.4, 1: 0.1}
    assert scores.at("kdv", ["gauss-newton-adam"], 60).errors == {0: 0.3}
    assert scores.at("kdv", ["soap-cosine"], 20) is None and scores.at("kdv", ["soap-cosine"], 60).errors == {0: 0.1}


def test_rates_with_fewer_seeds_do_not_count():
    records = [fake("kdv", "adam", 0.01, seed, 120, [0.5, 0.5, 0.5]) for seed in (0, 1)]
    records.append(fake("kdv", "adam", 0.001, 0, 120, [0.1, 0.1, 0.1]))
    assert Scores(records).at("kdv", ["adam"], 60).rate == 0.01


def test_a_diverged_run_has_no_finite_error():
    record = fake("kdv", "adam", 0.01, 0, 120, [0.5, None])
    assert error_at(record, 20) == 0.5 and error_at(record, 60) == error_at(record, 120) == math.inf


def test_the_best_rate_is_that_of_the_longest_runs():
    records = [fake("kdv", "adam", rate, 100, 120, [0.1, 0.1, last]) for rate, last in ((0.001, 0.3), (0.01, 0.2))]
    records.append(fake("kdv", "adam", 0.003, 100, 20, [1e-9]))
    assert best_rates(records) == {("kdv", "adam"): 0.01}
    asked = race.plan(["kdv"], ["adam", "soap"], [0], 60.0, best=best_rates(records))
    assert [job.rate for job in asked if job.method == "adam"] == [0.01]
    assert len([job for job in asked if job.method == "soap"]) == len(SOLVERS["soap"].rates), "nothing is known"


def test_the_page_shows_losses_as_openly_as_wins(tmp_path):
    for record in study():
        keep(tmp_path, record)
    for method, length in (("gauss-newton-adam-0.001", 120.0), ("adam-0.01", 120.0)):
        path = tmp_path / "burgers2d" / f"{method}-0-{length}.npz"
        write_arrays(path, {"20": np.full((101, 256), 1e-3, dtype=np.float32)})
    page, problems = build_page(tmp_path, tmp_path / "page")
    text = page.read_text()
    assert not problems and {"burgers.png", "stationary.png", "surrogates.png"} <= {
        p.name for p in page.parent.iterdir()
    }
    assert "picture.png" not in text, "there is no SOAP to draw"
    assert "| GaussNewton(Adam) | 0.001 | 2 | 7 | 2.0e-4 (4) | 2.0e-5 (4) | 2.0e-6 (4) |" in text
    assert "| Adam, cosine | 0.01 | 2 | 7 | – | 1.0e-1 (1) | – |" in text
    assert "| Burgers | 60 | 2.0e-4 | – | **2.0e1** | Adam, then self-scaled Broyden |" in text
    assert "Imaginary CPU" in text and "--seeds 0:2" in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith(("|", "- ")))


def test_the_picture_is_drawn_from_error_maps_at_the_same_time(tmp_path):
    records = [*study(), *(fake("burgers2d", "soap", 0.01, seed, 20, [0.2]) for seed in (0, 1))]
    for record in records:
        keep(tmp_path, record)
    for name in ("gauss-newton-adam-0.001-0-120.0", "adam-0.01-0-120.0", "soap-0.01-0-20.0"):
        write_arrays(tmp_path / "burgers2d" / f"{name}.npz", {"20": np.full((101, 256), 1e-3, dtype=np.float32)})
    page, _ = build_page(tmp_path, tmp_path / "page")
    assert "picture.png" in page.read_text() and (page.parent / "picture.png").exists()


def test_the_command_makes_runs_and_a_page(tiny, capsys, tmp_path):
    pytest.importorskip("tyro")
    from experiments.cli import main

    words = ["equations", "--problems", "tiny", "--methods", "adam", "--seeds", "0", "--seconds", "0.05", "--jobs", "1"]
    words += ["--results", str(tmp_path / "runs")]
    assert main([*words, "--dry-run"]) == 0
    assert f"{len(SOLVERS['adam'].rates)} runs (0 done before)" in capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "page")]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["rate"] for line in printed] == list(SOLVERS["adam"].rates)
    assert "| Adam |" in (tmp_path / "page" / "README.md").read_text()


@pytest.mark.parametrize(
    "words",
    [["--methods", "adma"], ["--problems", "burger"], ["--jobs", "0"], ["--seeds", "x"], ["--seconds", "0"]],
)
def test_what_cannot_be_meant_is_said_in_a_line(words, capsys, tmp_path):
    pytest.importorskip("tyro")
    from experiments.cli import main

    assert main(["equations", "--dry-run", "--results", str(tmp_path), *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_failing_run_does_not_stop_the_others(tiny, tmp_path, monkeypatch):
    real = race.run
    monkeypatch.setattr(race, "run", lambda entry: 1 / 0 if entry.seed == 0 else real(entry))
    asked = [Entry("tiny", "adam", 0.01, seed, 0.05) for seed in (0, 1)]
    assert [outcome.failed for outcome in sweep(asked, tmp_path)] == [True, False]
    assert "ZeroDivisionError" in (asked[0].folder(tmp_path) / ERROR).read_text()
    monkeypatch.setattr(race, "run", real)
    assert not any(outcome.failed for outcome in sweep(asked, tmp_path))
    assert not asked[0].folder(tmp_path).exists()


def test_methods_have_labels_of_their_own():
    assert len({method.label for method in SOLVERS.values()}) == len(SOLVERS)
    assert all(isinstance(method, Method) for method in SOLVERS.values())
