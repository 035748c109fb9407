"""The command line: what it understands, what it says, and how it stops."""

import importlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from experiments import cli, runner
from experiments.arguments import parse_seeds, parse_value, specs, variations
from experiments.cli import main
from experiments.data import MissingData
from experiments.methods import METHODS
from experiments.progress import Bars
from experiments.results import METRICS, PROGRESS, SUMMARY, load_run, write_json
from experiments.runner import Spec
from experiments.screen import BadInput
from experiments.studies import STUDIES
from experiments.tasks import TASKS

SHORT = ["--set", "steps=20", "--jobs", "1"]
COMMAND = [sys.executable, "-m", "experiments"]


def said(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    """What was printed, which has to be JSON lines and nothing else."""
    captured = capsys.readouterr()
    assert not captured.err
    return [json.loads(line) for line in captured.out.splitlines()]


# Words


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("7", [7]), ("0,3,5", [0, 3, 5]), ("0:3", [0, 1, 2]), (":2,4", [0, 1, 4]), ("1,1", [1])],
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "x", "3:1", "-1", "1.5", "0:", "0:2:3", "12345678901234567890"])
def test_seeds_that_cannot_be_meant(text):
    with pytest.raises(BadInput, match=re.escape(repr(text))):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "5", 5), (float, "1e-3", 0.001), (str, "gram", "gram"), (bool, "false", False),
        (str | None, "None", None), (str | None, "loss", "loss"), (tuple[int, ...], "3,4", (3, 4)),
        (float | None, "2", 2.0),
    ],
)  # fmt: skip
def test_values_follow_the_type_of_the_setting(kind, text, value):
    parsed = parse_value(kind, text)
    assert parsed == value and type(parsed) is type(value)


def test_sweeps_are_combined():
    chosen = variations(TASKS["diabetes"], ["period=2"], ["history-size=5,10", "relaxation=0.5,1"])
    assert [(c["history_size"], c["relaxation"]) for c in chosen] == [(5, 0.5), (5, 1.0), (10, 0.5), (10, 1.0)]
    assert {c["period"] for c in chosen} == {2}


def test_seeds_are_outermost_and_methods_that_do_not_fit_are_left_out():
    chosen = specs({"diabetes": [{}], "digits": [{}]}, [], [0, 1], "quick")
    assert [spec.seed for spec in chosen] == sorted(spec.seed for spec in chosen)
    assert "lbfgs" not in {spec.method for spec in chosen}
    assert {"base", "ema", "average"} < {spec.method for spec in chosen}


# What it says


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "diabets"], "No task is called 'diabets'. Did you mean diabetes"),
        (["run", "diabetes", "--method", "andersen"], "'andersen'. Did you mean anderson"),
        (["run", "diabetes", "--set", "histry_size=5"], "'histry_size'. Did you mean history_size"),
        (["run", "diabetes", "--sweep", "perod=1,2"], "'perod'. Did you mean period"),
        (["run", "diabetes", "--set", "history_size=five"], "Invalid history_size: 'five'. diabetes takes int"),
        (["run", "diabetes", "--set", "history_size"], "name=value"),
        (["run", "diabetes", "--seeds", "many"], "Invalid seeds: 'many'"),
        (["run", "diabetes", "--method", "lbfgs"], "lbfgs does not apply to diabetes"),
        (["run", "diabetes", "--jobs", "0"], "Invalid jobs: 0"),
        (["run", "diabetes", "--checkpoint-every", "nan"], "Invalid checkpoint_every: nan. Allowed: 0 and more"),
        (["run", "diabetes", "--checkpoint-every", "-1"], "Invalid checkpoint_every: -1.0. Allowed: 0 and more"),
        (["run", "diabetes", "--set", "steps=-5"], "Invalid steps: -5. Allowed: 1 and more"),
        (["run", "diabetes", "--set", "evaluate_every=0"], "Invalid evaluate_every: 0. Allowed: 1 and more"),
        (["run", "diabetes", "--tol", "-1"], "Invalid tol: -1.0. Allowed: 0 and more"),
        (["run"], "Which task? There are"),
        (["report", "no/such/folder"], "No folder no/such/folder"),
    ],
)
def test_bad_input_is_told_in_a_line(words, message, capsys, monkeypatch):
    monkeypatch.setattr(cli, "make_runs", lambda *_, **__: pytest.fail("it was taken for good"))
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_unwritable_folder_is_told_at_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["run", "diabetes", "--results", str(tmp_path / "file"), *SHORT]) == 2
    assert f"cannot write to {tmp_path / 'file'}" in capsys.readouterr().err


def test_list_is_machine_readable_off_a_terminal(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_cells = [line.split("\t")[0] for line in lines]
    assert {*TASKS, *METHODS, "quick", "paper"} <= set(first_cells)


def test_runs_are_told_as_json_lines(tmp_path, capsys):
    words = ["run", "diabetes", "--method", "anderson", "--seeds", "0:2", "--sweep", "history_size=2,3"]
    assert main([*words, "--results", str(tmp_path), *SHORT]) == 0
    records = said(capsys)
    assert [(record["seed"], record["variant"]) for record in records] == [
        (seed, f"anderson[history_size={size},steps=20]") for seed in (0, 1) for size in (2, 3)
    ]
    for record in records:
        summary = load_run(Path(record["folder"])).summary
        assert record["status"] == "finished" and record["final"] == summary["final"][record["metric"]]


def test_tol_stops_and_a_named_method_runs_alone(tmp_path, capsys):
    assert (
        main(["run", "diabetes", "--method", "base", "--seeds", "0", "--tol", "100", "--results", str(tmp_path)]) == 0
    )
    (record,) = said(capsys)
    assert load_run(Path(record["folder"])).summary["steps"] == 1


def test_default_methods_are_the_papers(tmp_path, capsys):
    assert main(["run", "diabetes", "--seeds", "0", "--results", str(tmp_path), *SHORT]) == 0
    assert [record["variant"].split("[")[0] for record in said(capsys)] == ["base", "anderson", "anderson+average"]


def test_failing_run_is_named_and_the_others_are_made(tmp_path, capsys):
    words = ["run", "diabetes", "--method", "base", "anderson", "--seeds", "3", "--set", "steps=20", "safeguard=wrong"]
    assert main([*words, "--jobs", "1", "--results", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["status"] for line in captured.out.splitlines()] == ["finished", "failed"]
    assert "diabetes anderson[safeguard=wrong,steps=20] seed 3: ValueError: Invalid safeguard" in captured.err


def test_a_damaged_run_is_named_in_a_line_and_the_others_are_made(tmp_path, capsys):
    words = ["run", "diabetes", "--method", "base", "--results", str(tmp_path), *SHORT]
    assert main([*words, "--seeds", "0"]) == 0
    (damaged,) = tmp_path.rglob(SUMMARY)
    damaged.write_text("")
    capsys.readouterr()
    assert main([*words, "--seeds", "0:2"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["status"] for line in captured.out.splitlines()] == ["failed", "finished"]
    assert captured.err.count("\n") == 1 and str(damaged) in captured.err and "Delete the folder" in captured.err


def test_a_damaged_sign_of_life_stops_no_estimate_and_no_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner.Spec, "estimate", lambda spec, budget: 100.0)
    spec = Spec("diabetes", "base", 0, overrides={"steps": 20})
    folder = spec.folder(tmp_path)
    folder.mkdir(parents=True)
    bars = Bars(Console(file=io.StringIO()), [spec], tmp_path)
    for content in ({}, {"step": 5, "steps": 0, "loss": 1.0}, {"step": "x", "steps": 20, "loss": 1.0}, {"step": 1}):
        write_json(folder / PROGRESS, content)
        words = ["run", "diabetes", "--method", "base", "--seeds", "0", "--results", str(tmp_path), *SHORT]
        assert main([*words, "--dry-run"]) == 0
        assert "1 min 40 s on one core" in capsys.readouterr().out
        bars.look()
        assert len(bars.progress.tasks) == 1


def test_other_settings_in_the_folder_are_refused(tmp_path, capsys):
    words = ["run", "diabetes", "--method", "base", "--seeds", "0", "--jobs", "1", "--results", str(tmp_path)]
    assert main([*words, "--tol", "100", "--profile", "quick"]) == 0
    assert main([*words, "--tol", "100", "--profile", "paper"]) == 2
    assert "--results" in capsys.readouterr().err


def test_missing_packages_are_told_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "experiments.cli")
    with pytest.raises(SystemExit, match=re.escape('pip install -e ".[experiments]"')):
        importlib.import_module("experiments.cli")


def test_estimate_counts_what_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner.Spec, "estimate", lambda spec, budget: 100.0)
    words = ["run", "diabetes", "--method", "base", "anderson", "--set", "steps=20", "--results", str(tmp_path)]
    assert main([*words, "--seeds", "0", "--jobs", "1"]) == 0
    half_done = Spec("diabetes", "base", 1, overrides={"steps": 20}).folder(tmp_path)
    half_done.mkdir(parents=True)
    write_json(half_done / PROGRESS, {"step": 10, "steps": 20, "loss": 1.0, "seconds": 1.0})
    capsys.readouterr()
    assert main([*words, "--seeds", "0:3", "--jobs", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    # Two runs are done and one is half done: 3.5 times 100 s are left.
    assert "6 runs (2 done before)" in out and "2 min 55 s with 2 jobs, 5 min 50 s on one core" in out


def test_an_estimate_says_once_what_data_are_missing(tmp_path, monkeypatch, capsys):
    def missing(spec, budget):
        raise MissingData("not here")

    monkeypatch.setattr(runner.Spec, "estimate", missing)
    words = ["run", "diabetes", "--method", "base", "anderson", "--results", str(tmp_path), "--seeds", "0:2"]
    assert main([*words, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("not here") == 1
    assert "Estimated" not in captured.out


@pytest.mark.slow
def test_compare_ends_with_table_and_page(tmp_path, capsys):
    words = ["compare", "diabetes", "--method", "base", "anderson", "--seeds", "0:2", "--results", str(tmp_path)]
    assert main([*words, *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("{") for line in lines) == 4
    assert any(line.startswith("Anderson") and line.count("\t") == 4 for line in lines)
    page = Path(lines[-1].removeprefix("Page: "))
    assert page.is_relative_to(tmp_path) and "<html" in page.read_text()
    damaged = next(tmp_path.rglob(METRICS))
    damaged.write_text("{")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "again")]) == 0
    captured = capsys.readouterr()
    assert str(damaged) in captured.err and f"Page: {tmp_path / 'again'}" in captured.out


def test_report_of_an_empty_folder_says_so(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "No completed run" in capsys.readouterr().err


# What is seen


def test_bars_follow_the_signs_of_life(tmp_path):
    chosen = [Spec("diabetes", "anderson", seed, overrides={"history_size": 5}) for seed in (0, 1)]
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    bars = Bars(console, chosen, tmp_path)
    folder = chosen[1].folder(tmp_path)
    folder.mkdir(parents=True)
    write_json(folder / PROGRESS, {"step": 50, "steps": 200, "loss": 0.125, "seconds": 1.0})
    os.utime(folder / PROGRESS, (0, 0))  # the clock of the files may be behind ours
    bars.look()
    (everything, one) = bars.progress.tasks
    assert one.description == "diabetes anderson[history_size=5] seed 1" and one.percentage == 25
    assert one.fields["loss"] == "loss 0.125" and everything.completed == 0.25
    console.print(bars.progress)
    assert "anderson[history_size=5]" in console.file.getvalue()
    (folder / PROGRESS).write_text('{"step"')
    bars.look()
    assert bars.progress.tasks == [everything]


def test_what_a_stopped_run_has_left_is_no_sign_of_life(tmp_path):
    spec = Spec("diabetes", "anderson", 0)
    folder = spec.folder(tmp_path)
    folder.mkdir(parents=True)
    left = {"step": 50, "steps": 200, "loss": 0.125, "seconds": 1.0}
    write_json(folder / PROGRESS, left)
    os.utime(folder / PROGRESS, (10, 10))
    bars = Bars(Console(file=io.StringIO()), [spec], tmp_path)
    bars.look()
    assert len(bars.progress.tasks) == 1
    write_json(folder / PROGRESS, left | {"step": 60})
    bars.look()
    assert bars.progress.tasks[1].completed == 60


@pytest.mark.slow
def test_terminal_shows_estimate_bars_and_ends(tmp_path):
    words = ["run", "diabetes", "--method", "base", "--seeds", "0", "--set", "steps=2000", "--results", str(tmp_path)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm", "COLUMNS": "120"}
        os.execv(sys.executable, [*COMMAND, *words, "--jobs", "1"])
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # Linux's way to say that the other side has closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "Estimated time: " in text and "all runs" in text
    assert re.search(r"diabetes base\[steps=2000\] seed 0 \S+ +\d+/2000 loss [\d.]+", text)
    assert "seed 0: finished, validation_mse" in text


# How it stops


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "sign"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_interrupt_stops_cleanly_and_the_same_command_resumes(tmp_path, capsys, jobs, sign):
    words = ["run", "diabetes", "--method", "base", "--seeds", "0:3", "--set", "steps=1200", "--results", str(tmp_path)]
    words += ["--checkpoint-every", "0.3"]
    # As from a terminal: the signal goes to the workers too.
    process = subprocess.Popen(
        [*COMMAND, *words, "--jobs", str(jobs)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    deadline = time.monotonic() + 90
    while not (list(tmp_path.rglob(SUMMARY)) and list(tmp_path.rglob(PROGRESS))) and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, sign) if sign == signal.SIGINT else process.send_signal(sign)
    out, err = process.communicate(timeout=30)
    finished = len(out.splitlines())
    assert process.returncode == 130
    assert err.decode() == f"Stopped. {finished} of 3 runs are done; run the same command to continue.\n"
    assert not psutil.wait_procs(children, timeout=10)[1]
    summaries = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(SUMMARY)}
    assert main([*words, "--jobs", "1"]) == 0
    assert [record["done_before"] for record in said(capsys)].count(True) == len(summaries)
    assert all(path.stat().st_mtime_ns == before for path, before in summaries.items())


def test_interrupt_in_this_process_says_what_is_done(tmp_path, capsys, monkeypatch):
    def interrupted(spec, results, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert main(["run", "diabetes", "--results", str(tmp_path), *SHORT]) == 130
    assert "0 of 60 runs are done" in capsys.readouterr().err


def test_study_makes_the_runs_of_a_study_and_knows_no_other(tmp_path, capsys):
    assert main(["study", "tolerence", "--results", str(tmp_path)]) == 2
    assert "tolerance" in capsys.readouterr().err
    assert main(["study", "--results", str(tmp_path)]) == 2
    assert "Which study?" in capsys.readouterr().err
    assert main(["study", "tolerance", "--results", str(tmp_path), "--dry-run"]) == 0
    assert f"{len(STUDIES['tolerance'].specs())} runs" in capsys.readouterr().out
