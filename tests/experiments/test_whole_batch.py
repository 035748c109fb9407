"""The study of whole batches: the numbers on its page, smaller batches, the page and the command."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("joblib")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from experiments.results import append_line
from experiments.whole_batch.batches import JUDGED, STEPS, Batched, Ending, batched, rows
from experiments.whole_batch.page import build_page, ratio_table
from experiments.whole_batch.problems import PROBLEMS
from experiments.whole_batch.race import Entry
from experiments.whole_batch.scores import Scores, by_batch, gradient_ratio, loss_ratio, stable


def fake(problem, method, rate, seed, losses, **more):
    """A record with these losses; one second a gradient."""
    entry = {"problem": problem, "method": method, "rate": rate, "seed": seed, "losses": losses}
    measured = {"seconds": [float(i) for i in range(1, len(losses) + 1)], "cpu_seconds": float(len(losses))}
    return entry | measured | {"final": losses[-1], "optimum": None, "stats": {}} | more


def falling(to_target, allowed=300, high=1.0, low=0.5):
    """Losses that reach the low value with a given gradient."""
    return [high] * (to_target - 1) + [low] * (allowed - to_target + 1)


# Problems

# Numbers


def test_the_target_is_within_ten_per_cent_of_the_lowest_loss_of_any_method():
    records = [
        fake("softmax", "sgd", 1.0, 0, [1.0, 0.6, 0.55]),
        fake("softmax", "cg", None, 0, [1.0, 0.5]),
        fake("softmax", "sgd", 1.0, 1, [1.0, 0.9]),
        fake("least-squares", "sgd", 0.3, 0, [1.0, 0.25 + 5e-9], optimum=0.25),
    ]
    scores = Scores(records)
    assert scores.goals == {
        ("softmax", 0): pytest.approx(0.55), ("softmax", 1): pytest.approx(0.99), ("least-squares", 0): 0.25 + 1e-8
    }  # fmt: skip
    assert scores.counts("softmax", "sgd", 1.0) == {0: 3, 1: 2}
    assert scores.counts("least-squares", "sgd", 0.3) == {0: 2}


def family_records():
    """Softmax with two seeds: SGD needs 40 and 90 at its best rate, Adam fails, L-BFGS 10, ours 20 and 30, or fails."""
    records = []
    for seed, (sgd, ours) in enumerate([(40, 20), (90, 30)]):
        records += [fake("softmax", "sgd", 1.0, seed, [1.0] * 300), fake("softmax", "adam", 0.01, seed, [1.0] * 300)]
        records.append(fake("softmax", "sgd", 3.0, seed, falling(sgd)))
        records.append(fake("softmax", "lbfgs-10", None, seed, falling(10)))
        records.append(fake("softmax", "lbfgs-100", None, seed, falling(12)))
        records.append(fake("softmax", "anderson-sgd", 1.0, seed, falling(ours)))
    records.append(fake("softmax", "anderson-adam", 0.01, 0, [1.0] * 300))
    return records


def test_ratios_over_the_best_method_by_hand():
    scores = Scores(family_records())
    assert scores.best("softmax", ["sgd", "adam"]) == ("sgd", 3.0)
    assert scores.best("softmax", ["lbfgs-10", "lbfgs-100"]) == ("lbfgs-10", None)
    first_order = scores.over_best(["sgd", "adam"], scores.problems)
    # 20 / 40, 30 / 90, and a failure: twice 300 / 40
    assert first_order.mean == pytest.approx((1 / 2 * 1 / 3 * 15) ** (1 / 3))
    assert (first_order.worst, first_order.pairs, first_order.failed, first_order.left_out) == (15, 3, 1, 0)
    assert scores.over_best(["lbfgs-10", "lbfgs-100"], scores.problems).mean == pytest.approx((2 * 3 * 60) ** (1 / 3))
    # Adam alone fails as ours with Adam does: that pair says nothing. Ours with SGD: 20 / 300, 30 / 300.
    adam = scores.over_best(["adam"], scores.problems)
    assert adam.mean == pytest.approx((20 / 300 * 30 / 300) ** 0.5) and adam.left_out == 1


def test_the_base_at_the_same_rate_by_hand():
    base = fake("softmax", "sgd", 1.0, 0, [1.0, 0.8, 0.6, 0.5] + [0.5] * 10)
    ours = fake("softmax", "anderson-sgd", 1.0, 0, [1.0, 0.45] + [0.4] * 10 + [0.9, 3.0])
    assert loss_ratio(ours, base) == pytest.approx(0.8), "the last loss may be that of a jump on trial"
    assert gradient_ratio(ours, base) == 2 / 4
    never = fake("softmax", "anderson-sgd", 1.0, 0, [1.0] * 14)
    assert gradient_ratio(never, base) == 2 * 14 / 4 and loss_ratio(never, base) == 2


def test_an_unstable_base_is_no_yardstick():
    start = [2.0, 1.0] + [0.5] * 9
    assert stable(fake("softmax", "sgd", 1.0, 0, [*start, 0.7]))
    assert not stable(fake("softmax", "sgd", 1.0, 0, [*start, 0.8]))
    assert not stable(fake("softmax", "sgd", 1.0, 0, [*start, None]))


def test_the_table_of_ratios_by_hand():
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in ratio_table(Scores(family_records())).rows}
    ours = rows["the family, over the best first-order method at its best rate: gradients"]
    assert ours[0].startswith("1.36 (3 pairs")


# Smaller batches


def test_batches_are_drawn_without_replacement_and_for_each_seed_anew():
    drawn = [next(iter(rows(10, 5, seed))).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    source = rows(10, 4, 0)
    assert len({*next(source).tolist(), *next(source).tolist()}) == 8


def test_a_run_with_small_batches_is_judged_by_the_loss_of_all_samples():
    record = Batched("softmax", "sgd", 32, 0).measure()
    torch.manual_seed(0)
    case, source = PROBLEMS["softmax"].build(0), rows(1797, 32, 0)
    optimizer = torch.optim.SGD(case.parameters, lr=PROBLEMS["softmax"].rates["sgd"][1])
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        case.loss(next(source)).backward()
        optimizer.step()
        losses += [case.loss(None).item()] if step in JUDGED else []
    assert record["final"] == pytest.approx(np.median(losses), rel=1e-12)
    assert record["samples"] == 1797


def test_the_gain_at_a_batch_size_by_hand():
    common = {"problem": "softmax", "batch": None, "samples": 1797}
    records = [
        common | {"method": method, "seed": seed, "final": final, "cpu_seconds": time, "stats": stats}
        for method, seed, final, time, stats in [
            ("sgd", 0, 2.0, 1.0, {}), ("anderson-sgd", 0, 1.0, 1.5, {"accepted": 7.0}),
            ("sgd", 1, 2.0, 1.0, {}), ("anderson-sgd", 1, 3.0, 1.0, {}), ("anderson-sgd", 2, 3.0, 1.0, {}),
        ]
    ]  # fmt: skip
    assert by_batch(records) == {
        ("softmax", "sgd", 1797): {"loss": [0.5, 1.5], "accepted": [7.0, 0.0], "time": [1.5, 1.0]}
    }


def test_problems_without_samples_to_choose_from_are_no_part_of_the_study_of_batches():
    assert {job.problem for job in batched(["pinn", "softmax"], [0])} == {"softmax"}


# The page and the commands


def test_the_page_has_tables_and_figures_of_what_is_there(tmp_path):
    origin = {"date": "2026-01-02T03:04:05+00:00", "versions": {"torch": "2.13"}, "hardware": {"cpu": "Imaginary CPU"}}
    for record in family_records():
        entry = Entry(*(record[name] for name in ("problem", "method", "rate", "seed")))
        append_line(entry.line_file(tmp_path), record | origin)
    measured = {"first": 12, "noisy": 0, "cpu_seconds": 1.0, "stats": {}}
    ending = Ending("mlp", "anderson-sgd", 0)
    append_line(ending.line_file(tmp_path), ending.identity | measured | origin)
    for method in ("sgd", "anderson-sgd"):
        measured = {"final": 0.5, "samples": 1797, "cpu_seconds": 1.0, "stats": {}}
        batched_run = Batched("softmax", method, 64, 0)
        append_line(batched_run.line_file(tmp_path), batched_run.identity | measured | origin)
    page, problems = build_page(tmp_path, tmp_path / "page")
    text = page.read_text()
    assert not problems and {"rates.png", "batches.png"} <= {path.name for path in page.parent.iterdir()}
    assert "| SGD | 1 3 | - | 65 |  |  | - |" in text
    assert "| Anderson(SGD) | 1 | 25 |  |  |  | 30 |" in text
    assert "Imaginary CPU" in text and "`python -m experiments whole-batch --seeds 0:2`" in text
    assert "| mlp | Anderson(SGD) | 1 of 1 | 12 | 0.00 |" in text


def test_the_command_says_how_long_it_takes_before_it_starts(capsys, tmp_path):
    pytest.importorskip("tyro")
    from experiments.cli import main

    words = [
        "whole-batch",
        "--dry-run",
        "--jobs",
        "1",
        "--problems",
        "least-squares",
        "--results",
        str(tmp_path / "none"),
    ]
    assert main([*words, "--methods", "sgd", "cg"]) == 0
    out = capsys.readouterr().out
    assert "25 runs (0 done before)" in out and "on one core" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--methods", "sdg"], ["--problems", "softmx"], ["--jobs", "0"], ["--seeds", "x"]])
def test_what_cannot_be_meant_is_said_in_a_line(words, capsys, tmp_path):
    pytest.importorskip("tyro")
    from experiments.cli import main

    assert main(["whole-batch", "--dry-run", "--results", str(tmp_path), *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_command_makes_runs_and_a_page(capsys, tmp_path):
    pytest.importorskip("tyro")
    from experiments.cli import main

    words = ["whole-batch", "--problems", "least-squares", "--methods", "cg", "lbfgs-10", "--seeds", "0", "--jobs", "1"]
    assert main([*words, "--results", str(tmp_path / "runs"), "--out", str(tmp_path / "page")]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["method"] for line in printed] == ["cg", "lbfgs-10"]
    assert "nonlinear CG" in (tmp_path / "page" / "README.md").read_text()
