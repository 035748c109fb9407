"""The report: its statistics against SciPy and numbers worked out by hand, and what it says about odd folders."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_results import decay, write_run
from scipy import stats

from experiments import statistics as st
from experiments.comparison import Comparison, collect
from experiments.curves import MOST_POINTS, diverged_curves, draw_metric, mean_curve
from experiments.figures import STYLES
from experiments.methods import METHODS
from experiments.page import NothingToReport
from experiments.pictures import pictures
from experiments.provenance import commands
from experiments.report import build_report, gather, render
from experiments.results import load_runs
from experiments.tables import acceptance_table, comparison_table, paired_table, paired_text

VALUES = [0.0041, 0.0035, 0.0052, 0.0047]
OTHERS = [0.0050, 0.0049, 0.0050, 0.0061]


def test_interval_is_students():
    ours = st.interval([*VALUES, math.nan])
    low, high = stats.t.interval(0.95, df=3, loc=np.mean(VALUES), scale=stats.sem(VALUES))
    assert (ours.mean, ours.low, ours.high) == pytest.approx((np.mean(VALUES), low, high))
    assert ours.count == 4


def test_one_value_has_no_interval_and_none_no_mean():
    assert st.interval([2.0]).mean == 2.0
    assert math.isnan(st.interval([2.0]).half)
    assert math.isnan(st.interval([]).mean)


def test_band_is_the_interval_of_each_column():
    table = np.random.default_rng(0).uniform(5, 6, (7, 3))
    table[2, 1] = np.nan
    mean, low, high = st.band(table)
    for column in range(3):
        expected = st.interval(table[:, column])
        assert (mean[column], low[column], high[column]) == pytest.approx((expected.mean, expected.low, expected.high))


def test_band_of_positive_values_stays_positive():
    _, low, _ = st.band([[1.0, -1.0], [100.0, 100.0]])
    assert low[0] == 1.0
    assert low[1] < -1.0


def test_paired_ratio_is_the_paired_t_test_on_logarithms():
    result = st.paired(VALUES, OTHERS)
    expected = stats.ttest_rel(np.log(VALUES), np.log(OTHERS)).confidence_interval(0.95)
    assert (result.estimate.low, result.estimate.high) == pytest.approx(
        (math.exp(expected.low), math.exp(expected.high))
    )
    assert result.estimate.mean == pytest.approx(stats.gmean(np.divide(VALUES, OTHERS)))
    assert (result.better, result.worse) == (3, 1)
    assert result.p_value == pytest.approx(stats.wilcoxon(np.log(np.divide(VALUES, OTHERS))).pvalue)


def test_a_diverged_run_loses_and_is_no_part_of_the_ratio():
    result = st.paired([1.0, math.nan, 2.0, 1.0], [2.0, 1.0, math.nan, 2.0])
    assert (result.better, result.worse, result.estimate.count) == (3, 1, 2)
    assert (result.diverged, result.others_diverged) == (1, 1)
    assert result.estimate.mean == pytest.approx(0.5)


def test_metrics_that_reach_zero_are_compared_by_difference():
    result = st.paired([0.0, 1.0], [1.0, 3.0])
    assert not result.is_ratio
    assert result.estimate.mean == -1.5


def test_an_interval_decides_or_leaves_open():
    apart, across, point = st.Interval(0.5, 0.4, 0.6, 5), st.Interval(1.0, 0.5, 2.0, 5), st.Interval(0, 0, 0, 5)
    assert (apart.below(1), apart.above(1), apart.within(0.4, 0.6)) == (True, False, True)
    assert (across.below(1), across.above(1), across.within(0.8, 1.25)) == (None, None, None)
    assert (point.below(0), point.above(0), apart.within(0.8, 1.25)) == (False, False, False)
    assert st.interval([1.0]).below(2) is None


def test_equal_runs_do_not_differ():
    assert st.paired([1.0, 2.0], [1.0, 2.0]).p_value == 1.0


def test_thinned_keeps_few_points_as_they_are():
    assert st.thinned([3, 1, 2], 5).tolist() == [1, 2, 3]
    assert st.thinned(range(10_000), 300).size == 300


# From folders to tables


def comparison(results: Path) -> Comparison:
    runs, problems = load_runs(results)
    tasks, more = collect(runs)
    assert not problems + more
    return tasks[0]


def test_equal_time_takes_what_the_slower_one_had_by_then(tmp_path):
    """Base 1 s, Anderson 2 s for the same 100 steps: by 1 s Anderson has made 50, and is at the root of its end."""
    for seed in range(3):
        write_run(tmp_path, "foreign", "base", seed, metrics=decay(final=1e-2, seconds=1.0))
        write_run(tmp_path, "foreign", "anderson", seed, metrics=decay(final=1e-4, seconds=2.0))
    table = paired_table(comparison(tmp_path)).set_index("equal")
    assert table.loc["gradient evaluations", "estimate"] == pytest.approx(1e-4 / 1e-2)
    assert table.loc["time", "estimate"] == pytest.approx(1e-2 / 1e-2)
    assert comparison_table(comparison(tmp_path)).set_index("method").loc["anderson", "time_ratio"] == pytest.approx(2)


def test_a_run_that_stopped_early_is_compared_where_it_stopped(tmp_path):
    write_run(tmp_path, "foreign", "base", 0, metrics=decay(steps=100, final=1e-4))
    write_run(tmp_path, "foreign", "anderson", 0, metrics=decay(steps=50, final=1e-4))
    table = paired_table(comparison(tmp_path)).set_index("equal")
    assert table.loc["gradient evaluations", "estimate"] == pytest.approx(1e-4 / 1e-2)


def test_variants_are_compared_with_the_base_on_the_same_problem(tmp_path):
    """Settings of Anderson aside, all are the same; a base with others is no base to compare with."""
    width, size = {"width": 8}, {"history_size": 5}
    for variant, changes in {
        "base": {}, "base[width=8]": width, "anderson[width=8]": width, "anderson[history_size=5]": size,
        "anderson[history_size=5,width=8]": size | width, "anderson[width=16]": {"width": 16},
    }.items():  # fmt: skip
        write_run(tmp_path, "foreign", variant, 0, settings={"width": 64, "history_size": 10} | changes)
    table = paired_table(comparison(tmp_path)).drop_duplicates("method").set_index("method")
    assert table["against"].to_dict() == {
        "anderson[history_size=5,width=8]": "base[width=8]",
        "anderson[history_size=5]": "base",
        "anderson[width=8]": "base[width=8]",
    }


def test_runs_with_other_settings_are_not_taken_for_seeds_of_the_same_variant(tmp_path):
    for seed, steps in enumerate((100, 100, 50)):
        write_run(tmp_path, "foreign", "base", seed, settings={"steps": steps})
    tasks, problems = collect(load_runs(tmp_path)[0])
    assert tasks[0].groups[0].seeds == [0, 1]
    assert len(problems) == 1 and "seed-002: left out, its settings are not those of" in problems[0]


def test_a_ratio_without_the_runs_that_diverged_is_no_success(tmp_path):
    """Anderson ends lower where it ends, but seldom does."""
    for seed in range(6):
        write_run(tmp_path, "foreign", "base", seed, metrics=decay(final=1e-2))
        status = "finished" if seed < 2 else "diverged"
        write_run(tmp_path, "foreign", "anderson", seed, metrics=decay(final=1e-4), status=status)
        write_run(tmp_path, "foreign", "ema", seed, metrics=decay(final=1e-4))
    anderson, ema = paired_text(comparison(tmp_path)).rows
    assert [(cell.text, cell.meaning) for cell in anderson[2:5]] == [
        ("0.0100 [0.0100, 0.0100]", ""), ("2 (diverged 4)", ""), ("2 : 4", "")
    ]  # fmt: skip
    assert ema[2].meaning == "better" and ema[3].text == "6"


def test_settings_that_all_variants_share_are_said_once(tmp_path):
    for variant in ("base[steps=20]", "anderson[steps=20]"):
        write_run(tmp_path, "foreign", variant, 0)
    task = comparison(tmp_path)
    assert [group.label for group in task.groups] == ["base", "Anderson (paper)"]
    assert task.title == "foreign [steps=20]"
    assert [group.kind for group in task.groups] == ["paper", "paper"]


def test_a_run_not_yet_evaluated_at_equal_time_is_not_taken_for_diverged(tmp_path):
    write_run(tmp_path, "foreign", "base", 0, metrics=decay(seconds=0.01))
    write_run(tmp_path, "foreign", "anderson", 0, metrics=decay(seconds=10.0))
    row = paired_table(comparison(tmp_path)).set_index("equal").loc["time"]
    assert (row["pairs"], row["better"], row["worse"]) == (0, 0, 0)


def test_diverged_runs_are_counted_and_end_where_they_diverged(tmp_path):
    for seed, status in enumerate(["finished", "diverged", "finished"]):
        steps = 40 if status == "diverged" else 100
        write_run(tmp_path, "foreign", "base", seed, status=status, metrics=decay(steps=steps, final=10.0**-seed))
    task = comparison(tmp_path)
    row = comparison_table(task).iloc[0]
    assert (row["seeds"], row["diverged"]) == (3, 1)
    assert row["final"] == pytest.approx((1 + 1e-2) / 2)
    assert task.groups[0].remark == "diverged 1 of 3, mean of the 2 that finished"
    assert [curve.steps[-1] for curve in diverged_curves(task.groups[0], "mse")] == [40]


def test_curves_of_different_grids_and_lengths_have_a_common_one(tmp_path):
    write_run(tmp_path, "foreign", "lbfgs", 0, metrics=decay(steps=900, every=1))
    write_run(tmp_path, "foreign", "lbfgs", 1, metrics=decay(steps=200, every=7, final=0.5, seconds=3.0))
    curve = mean_curve(comparison(tmp_path).groups[0], "mse")
    assert curve.steps.size <= MOST_POINTS
    assert curve.steps[-1] == 900
    assert curve.mean[-1] == pytest.approx((1e-3 + 0.5) / 2)
    assert curve.seconds[-1] == pytest.approx((1 + 3) / 2)


def test_acceptance_leaves_out_methods_without_and_causes_that_never_occurred(tmp_path):
    write_run(tmp_path, "foreign", "base", 0)
    for seed, accepted in enumerate([4, 6]):
        counts = {"attempted": 10, "accepted": accepted, "rejected_loss": 10 - accepted, "rejected_gradient": 0}
        write_run(tmp_path, "foreign", "anderson", seed, stats=counts)
    table = acceptance_table(comparison(tmp_path))
    assert table.drop(columns=["task", "label"]).to_dict("records") == [
        {"method": "anderson", "attempted": 10, "accepted": 5, "rejected_loss": 5}
    ]


def test_pictures_are_of_the_base_and_the_best_other(tmp_path):
    image = {"x": np.arange(3.0), "t": np.arange(2.0), "exact": np.ones((3, 2)), "predicted": np.zeros((3, 2))}
    for variant, final in (("base", 1e-4), ("anderson", 1e-2), ("ema", 1e-3)):
        write_run(tmp_path, "foreign", variant, 4, metrics=decay(final=final), pictures=image)
    assert [picture.label for picture in pictures(comparison(tmp_path))] == ["base", METHODS["ema"].label]


def test_every_method_has_a_look_of_its_own():
    assert METHODS.keys() <= STYLES.keys()
    assert len(set(STYLES.values())) == len(STYLES)


def test_commands_are_ones_that_the_command_line_takes(tmp_path):
    for variant in ("base", "anderson", "anderson[history_size=5]"):
        for seed in (0, 1, 2, 5):
            write_run(tmp_path, "digits", variant, seed)
    assert list(commands(comparison(tmp_path))) == [
        "python -m experiments run digits --method base anderson --seeds 0:3,5 --profile quick",
        "python -m experiments run digits --method anderson --seeds 0:3,5 --profile quick --set history_size=5",
    ]


# The whole report


def page_data(html: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html.read_text(), re.DOTALL)
    return json.loads(found.group(1))


def test_report_has_page_figures_and_tables(tmp_path):
    for variant in ("base", "anderson", "anderson+average"):
        for seed in range(3):
            rows = decay(name="validation_mse", final=10.0 ** -(seed + 1))
            references = {"ordinary least squares": {"validation_mse": 0.0036}}
            write_run(tmp_path / "in", "diabetes", variant, seed, metrics=rows, references=references)
    html, problems = build_report(tmp_path / "in", tmp_path / "out")
    assert html == tmp_path / "out" / "report.html" and not problems
    figures = list((tmp_path / "out" / "figures").iterdir())
    names = {path.name for path in figures}
    assert {f"diabetes-validation_mse-{x}.{e}" for x in ("steps", "time") for e in ("png", "pdf")} <= names
    assert all(path.stat().st_size > 1000 for path in figures)
    for name in ("comparison", "paired", "claims"):
        with (tmp_path / "out" / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file)), name
        assert (tmp_path / "out" / f"{name}.md").read_text().count("| ---") >= 1
    table = pd.read_csv(tmp_path / "out" / "comparison.csv").set_index("method")
    assert table.loc["anderson", "final"] == pytest.approx((0.1 + 0.01 + 0.001) / 3)
    assert table.loc["ordinary least squares", "final"] == pytest.approx(0.0036)
    runs = pd.read_csv(tmp_path / "out" / "runs.csv")
    assert len(runs) == 9
    assert sorted(runs.groupby("seed").final_validation_mse.first()) == pytest.approx([0.001, 0.01, 0.1])
    data = page_data(html)["tasks"]["diabetes"]
    assert data["metrics"]["validation_mse"]["log"]
    budgets = set(re.findall('data-budget="(.+?)"', html.read_text()))
    assert budgets == data["axes"].keys() < data["metrics"]["validation_mse"]["curves"]["base"]["0"]["mean"].keys()
    assert not re.search(r"(src|href)=.?https?:", html.read_text().replace(page_script(html), ""))


def page_script(html: Path) -> str:
    """The largest script: plotly."""
    return max(re.findall(r"<script>(.*?)</script>", html.read_text(), re.DOTALL), key=len)


def test_damaged_folders_are_named_and_the_rest_is_shown(tmp_path):
    write_run(tmp_path, "foreign", "base", 0)
    broken = {
        "metrics.jsonl": b'{"step": 1, "sec',
        "summary.json": b"[]",
        "config.json": b"{}",
    }
    for seed, (name, content) in enumerate(broken.items(), start=1):
        (write_run(tmp_path, "foreign", "base", seed) / name).write_bytes(content)
    unlike = write_run(tmp_path, "foreign", "base", 7)
    (unlike / "metrics.jsonl").write_text('{"epoch": 1, "accuracy": "good"}\n')
    empty = write_run(tmp_path, "foreign", "base", 8)
    (empty / "metrics.jsonl").write_text("")
    html = render(gather(tmp_path))
    for seed, name in enumerate(broken, start=1):
        assert f"seed-00{seed}/{name}" in html
    assert "seed-007/metrics.jsonl" in html
    assert "seed-008/metrics.jsonl" in html
    assert "1 run on 1 task" in html


def test_damaged_picture_costs_the_picture_alone(tmp_path):
    folder = write_run(tmp_path, "foreign", "base", 0, pictures={"x": np.ones(2)})
    assert f"{folder}/pictures.npz: no t, exact, predicted in it" in render(gather(tmp_path))
    (folder / "pictures.npz").write_bytes(b"PK")
    assert "pictures.npz: damaged" in render(gather(tmp_path))


def test_missing_and_unfinished_seeds_are_said(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "foreign", "base", seed)
    write_run(tmp_path, "foreign", "anderson", 1)
    (write_run(tmp_path, "foreign", "anderson", 2) / "summary.json").unlink()
    html = render(gather(tmp_path))
    assert "1 of 3 seeds, not there: 0,2" in html
    assert "foreign, anderson, seed 2: begun, not ended" in html


def test_names_from_folders_cannot_break_the_page(tmp_path):
    evil = "</script><script>alert(1)</script>"
    for seed in range(2):
        write_run(tmp_path, "foreign", "x", seed, config={"variant": evil, "method": evil, "task": "<b>"})
    html = render(gather(tmp_path))
    assert evil not in html
    assert "&lt;script&gt;alert(1)" in html


def test_a_reference_of_zero_is_in_the_table_and_not_on_the_logarithmic_axis(tmp_path):
    for seed in range(2):
        write_run(tmp_path, "foreign", "base", seed, references={"zero predictor": {"mse": 0.0}})
    html, _ = build_report(tmp_path)
    assert page_data(html)["tasks"]["foreign"]["metrics"]["mse"]["references"] == {}
    assert "zero predictor" in html.read_text()


def test_all_diverged_is_shown_as_such(tmp_path):
    for seed in range(2):
        write_run(tmp_path, "foreign", "base", seed, status="diverged")
    html = build_report(tmp_path)[0]
    assert "diverged 2 of 2" in html.read_text()
    curves = page_data(html)["tasks"]["foreign"]["metrics"]["mse"]["curves"]["base"]["0"]
    assert curves["mean"] is None
    assert len(curves["diverged"]) == 2


def test_nothing_to_report_says_what_to_do(tmp_path):
    with pytest.raises(NothingToReport, match="python -m experiments run"):
        build_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_same_run_twice_is_counted_once(tmp_path):
    for copy in ("a", "b"):
        write_run(tmp_path / copy, "foreign", "base", 0)
    assert "is the same run" in render(gather(tmp_path))


def test_a_figure_is_not_scaled_by_what_was_run_with_other_settings(tmp_path):
    for variant, final in (("base", 1e-2), ("anderson", 1e-3), ("anderson[period=1]", 1e30)):
        for seed in range(3):
            write_run(tmp_path, "diabetes", variant, seed, metrics=decay(name="validation_mse", final=final))
    task = comparison(tmp_path)
    figure = draw_metric(task, "validation_mse", "step")
    assert len(figure.axes) == 1
    assert figure.axes[0].get_ylim()[1] < 1e3
