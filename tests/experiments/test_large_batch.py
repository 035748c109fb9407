"""The large-batch study: its runs, the numbers that its page is made from, and verdicts on made-up runs."""

import shlex
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("plotly")

from fake_results import write_run

from experiments import large_batch as study
from experiments.large_batch_page import build_page
from experiments.page import NothingToReport
from experiments.results import Run

WIGGLE = (0.0, 0.01, 0.02)
"""What every method has in common on a seed: paired differences do not see it."""


def fake(method, batch, seed, error, *, augment=False, loss=1.0, training=0.25, cpu=2.0):
    """A run that ended with this validation error; None for one that diverged."""
    final = {"validation_loss": loss, "validation_error": error, "training_loss": training, "training_error": 0.1}
    if error is None:
        final = dict.fromkeys(final)
    settings = {"augment": augment, "batch_size": batch}
    summary = {"final": final, "status": "finished", "steps": 10, "cpu_seconds": cpu}
    return Run(Path(f"{method}-{batch}-{seed}"), {"method": method, "seed": seed, "settings": settings}, summary)


def runs_with(small=0.2, large=0.3, seeds=3, noise=0.001, **others):
    """Base at both ends and other methods at the large one, each a little different on each seed."""
    errors = {("base", 32): small, ("base", 512): large}
    errors |= {(name.replace("_", "+"), 512): error for name, error in others.items()}
    errors.setdefault((study.CONTROL, 512), large)
    return [
        fake(method, batch, seed, error + WIGGLE[seed] + noise * (seed - 1) * (place % 2))
        for place, ((method, batch), error) in enumerate(errors.items())
        for seed in range(seeds)
    ]


def judged(name, runs):
    return next(claim for claim in study.CLAIMS if name in claim.name).judge(runs)


def test_the_study_and_its_commands_name_the_same_runs_and_settings_exist():
    tyro = pytest.importorskip("tyro")
    from experiments.cli import Run as Command

    whole = study.study([0, 1, 2])
    parsed = [tyro.cli(Command, args=shlex.split(command)[4:]) for command in whole.commands()]
    commanded = {spec.folder(Path()) for command in parsed for spec in command.plan(())}
    assert commanded == {spec.folder(Path()) for spec in whole.specs()}
    tasks = [spec.resolve() for spec in whole.specs()]
    assert {task.steps * task.batch_size for task in tasks} == {40 * 2048}, "the same epochs for all"


def test_seeds_are_outermost_so_that_a_part_of_the_runs_can_be_compared():
    specs = study.study([4, 7]).specs()
    assert [spec.seed for spec in specs] == [4] * (len(specs) // 2) + [7] * (len(specs) // 2)


def test_numbers_of_a_method_by_hand():
    values = [("base", 0, 0.30), ("base", 1, 0.40), ("base", 2, 0.50), ("anderson", 0, 0.20), ("anderson", 1, 0.35)]
    runs = [fake(method, 512, seed, error, training=0.75 - error) for method, seed, error in values]
    runs.append(fake("anderson", 512, 2, None, cpu=8.0))
    table = study.comparison(study.ends(runs)).set_index("method")
    assert table.loc["base", "validation_error"] == pytest.approx(0.4)
    # deviation 0.1, t = 4.3027 for three values
    assert table.loc["base", "validation_error_high"] == pytest.approx(0.4 + 4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert table.loc["base", "gap"] == pytest.approx(1 - 0.75 + 0.4)
    assert table.loc["anderson", ["seeds", "diverged"]].tolist() == [3, 1]
    assert table.loc["anderson", "validation_error_less"] == pytest.approx((0.10 + 0.05) / 2)
    assert table.loc["anderson", "time_ratio"] == pytest.approx(4 ** (1 / 3))
    assert table.loc["base", "validation_error_less"] == 0


@pytest.mark.parametrize(
    ("both", "verdict"),
    [(0.25, "reproduced"), (0.35, "not reproduced"), (0.3001, "not reproduced (inconclusive)")],
)
def test_the_average_gets_back_what_the_base_has_lost_or_does_not(both, verdict):
    found = judged("average", runs_with(anderson_average=both))
    assert found.outcome == verdict
    assert "from batch 32 to 512: 0.1 " in found.numbers


@pytest.mark.parametrize(
    ("alone", "verdict"),
    [(0.25, "not reproduced"), (0.35, "reproduced"), (0.3001, "not reproduced (inconclusive)")],
)
def test_anderson_alone_is_said_to_get_nothing_back(alone, verdict):
    assert judged("Anderson", runs_with(anderson=alone)).outcome == verdict


def test_the_control_stands_beside_the_verdict():
    found = judged("average", runs_with(anderson_average=0.25, **{"matched-anderson_average": 0.22}))
    assert "lower than the control by -0.03 " in found.numbers


def test_where_nothing_is_lost_nothing_can_be_got_back():
    assert judged("average", runs_with(small=0.3, anderson_average=0.2)).verdict == "cannot be tested"


def test_below_three_seeds_nothing_is_decided():
    found = judged("average", runs_with(seeds=2, anderson_average=0.25))
    assert found.verdict == "cannot be tested" and "python -m experiments large-batch" in found.numbers


@pytest.fixture
def written(tmp_path):
    """A folder with the runs of two seeds, one run of the second still missing."""
    for spec in study.study([0, 1]).specs()[:-1]:
        end = {"validation_loss": 2.0, "validation_error": 0.5, "training_loss": 0.5, "training_error": 0.1}
        settings = {"augment": spec.overrides["augment"], "batch_size": spec.overrides["batch_size"]}
        variant = f"{spec.method}[{settings['augment']}-{settings['batch_size']}=x]"
        write_run(tmp_path / "runs", "cifar10", variant, spec.seed, settings=settings, summary={"final": end})
    return tmp_path


def test_the_page_has_each_method_and_says_how_many_seeds_are_done(written):
    page, problems = build_page(written / "runs", written / "out")
    text = page.read_text()
    assert not problems
    assert {path.name for path in page.parent.iterdir()} == {
        "README.md", "runs.csv", "comparison.csv", "large-batch.png", "large-batch.pdf",
    }  # fmt: skip
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == 25 + 2, "five methods at three and at two batches, and two headings"
    assert [row[3].strip() for row in rows].count("1") == 1 and rows[1][8].strip() == "1.50 ± 0.00"
    assert "Imaginary CPU" in text and "--seeds 0:2" in text and "Fewer than 3 seeds" in text
    assert "49 of 50 runs" in text
    assert len(pd.read_csv(page.parent / "runs.csv")) == 49


def test_an_empty_folder_has_no_page(tmp_path):
    with pytest.raises(NothingToReport, match="large-batch"):
        build_page(tmp_path, tmp_path / "out")


def test_the_command_says_how_long_it_takes_before_it_starts(capsys, monkeypatch, tmp_path):
    pytest.importorskip("tyro")
    from experiments import runner
    from experiments.cli import main

    monkeypatch.setattr(study, "load_cifar10", lambda: None)
    monkeypatch.setattr(runner.Spec, "estimate", lambda spec, budget: 60.0)
    assert main(["large-batch", "--dry-run", "--jobs", "1", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "75 runs" in out and "1 h 15 min on one core" in out
    assert not list(tmp_path.iterdir())


def test_without_the_data_the_command_says_so_once_and_runs_nothing(capsys, tmp_path):
    pytest.importorskip("tyro")
    from experiments.cli import main

    assert main(["large-batch", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("npm pack") == 1
    assert not list(tmp_path.iterdir())
