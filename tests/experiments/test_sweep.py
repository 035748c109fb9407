"""Many runs: the same numbers however they are spread, and nothing lost whatever is killed."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from experiments import runner
from experiments.methods import METHODS
from experiments.results import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    PROGRESS,
    SUMMARY,
    CannotWrite,
    alone_in,
    check_writable,
    load_runs,
    packed,
    read_record,
    unpack,
)
from experiments.runner import OtherSettings, Spec, Training, describe, run, train
from experiments.sweep import ERROR, sweep
from experiments.whole_batch.race import Entry

SPECS = [Spec("diabetes", method, seed, overrides={"steps": 60}) for seed in (0, 1) for method in ("base", "anderson")]
LONG = [replace(spec, overrides={"steps": 1000}) for spec in SPECS[:2]]
TIMES = {"seconds", "cpu_seconds"}


def metrics(results: Path) -> dict[tuple[str, int], list[dict[str, float]]]:
    """All numbers of all runs that do not depend on the clock."""
    runs, problems = load_runs(results)
    assert not problems
    return {(run.variant, run.seed): run.steps.drop(columns=list(TIMES)).to_dict("records") for run in runs}


def same(one: Path, other: Path) -> bool:
    # As text: bitwise, and NaN where no evaluation was due is the same as itself.
    return str(metrics(one)) == str(metrics(other))


def workers() -> list[psutil.Process]:
    """The processes that joblib has started for this one."""
    return [child for child in psutil.Process().children() if "popen_loky" in " ".join(child.cmdline())]


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough runs to be killed in, made in peace."""
    results = tmp_path_factory.mktemp("undisturbed")
    assert {outcome.status for outcome in sweep(LONG, results)} == {"finished"}
    return results


@pytest.mark.slow
def test_two_processes_give_bitwise_the_metrics_of_one(tmp_path):
    seen = []
    one = sweep(SPECS, tmp_path / "one", processes=1)
    two = sweep(SPECS, tmp_path / "two", processes=2, on_done=seen.append)
    assert [outcome.job for outcome in one] == SPECS
    assert seen == two and len(two) == len(SPECS)
    assert same(tmp_path / "one", tmp_path / "two")


def test_finished_runs_are_not_made_again(tmp_path):
    sweep(SPECS[:2], tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json*")}
    outcomes = sweep(SPECS, tmp_path)
    assert [outcome.done_before for outcome in outcomes] == [True, True, False, False]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_one_failing_run_does_not_stop_the_others(tmp_path, monkeypatch):
    def sometimes(spec, results, *options):
        if spec == SPECS[1]:
            raise ZeroDivisionError("on purpose")
        return run(spec, results, *options)

    monkeypatch.setattr(runner, "run", sometimes)
    outcomes = sweep(SPECS[:3], tmp_path)
    assert [outcome.status for outcome in outcomes] == ["finished", "failed", "finished"]
    assert outcomes[1].error == "ZeroDivisionError: on purpose"
    assert "in sometimes" in (SPECS[1].folder(tmp_path) / ERROR).read_text()
    monkeypatch.undo()
    assert not sweep(SPECS[:3], tmp_path)[1].failed
    assert not (SPECS[1].folder(tmp_path) / ERROR).exists()


DAMAGE = [*((name, content) for name in (SUMMARY, CONFIG) for content in ("", "{", "[1]", "{}")), (CONFIG, None)]


@pytest.mark.parametrize(("name", "content"), DAMAGE)
def test_a_damaged_run_is_named_with_the_remedy_and_the_others_are_made(tmp_path, name, content):
    sweep(SPECS[:1], tmp_path)
    damaged = SPECS[0].folder(tmp_path) / name
    damaged.unlink() if content is None else damaged.write_text(content)
    told, made = sweep(SPECS[:2], tmp_path)
    assert made.status == "finished"
    assert told.failed and str(damaged) in told.error and f"Delete the folder {damaged.parent}" in told.error
    shutil.rmtree(damaged.parent)
    assert [outcome.status for outcome in sweep(SPECS[:2], tmp_path)] == ["finished"] * 2


WRONG_KINDS = [
    (SUMMARY, {"final": None}), (SUMMARY, {"status": 1}), (SUMMARY, {"seconds": "long"}), (CONFIG, {"settings": []}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), WRONG_KINDS)
def test_a_run_with_values_of_a_wrong_kind_is_damaged_too(tmp_path, name, change):
    sweep(SPECS[:1], tmp_path)
    damaged = SPECS[0].folder(tmp_path) / name
    damaged.write_text(json.dumps(json.loads(damaged.read_text()) | change))
    told, made = sweep(SPECS[:2], tmp_path)
    assert told.failed and str(damaged) in told.error and next(iter(change)) in told.error
    assert made.status == "finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "processes"),
    [(lambda whole: b"", 1), (lambda whole: b"", 2), (lambda whole: whole[:9999], 1), (lambda whole: b"x" * 99, 1)],
)
def test_a_damaged_checkpoint_is_named_with_the_remedy(tmp_path, damage, processes):
    checkpoint = stopped(SPECS[0], tmp_path)
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    told, made = sorted(sweep(SPECS[:2], tmp_path, processes), key=lambda outcome: SPECS.index(outcome.job))
    assert told.failed and str(checkpoint) in told.error and f"Delete the folder {checkpoint.parent}" in told.error
    assert made.status == "finished"
    shutil.rmtree(checkpoint.parent)
    assert not sweep(SPECS[:1], tmp_path)[0].failed


@pytest.mark.parametrize("missing", ["model", "trainer", "rows", "identity"])
def test_a_checkpoint_with_a_part_missing_is_named(tmp_path, missing):
    checkpoint = stopped(SPECS[1], tmp_path)
    state = torch.load(checkpoint, weights_only=True)
    del state[missing]
    torch.save(state, checkpoint)
    (told,) = sweep(SPECS[1:2], tmp_path)
    assert told.failed and str(checkpoint) in told.error and missing in told.error


def stopped(spec, results):
    """Stop a run after a few steps; returns its checkpoint, which is whole."""

    class Stop(Exception):
        pass

    def stop(row):
        if row["step"] == 20:
            raise Stop

    folder = spec.folder(results)
    folder.mkdir(parents=True)
    training = Training(spec.resolve(), METHODS[spec.method], spec.seed, spec.rate)
    with pytest.raises(Stop):
        train(training, folder, describe(spec, training.task), checkpoint_every=0.0, observe=stop)
    return folder / CHECKPOINT


def test_full_disk_in_the_middle_stops_with_the_folder_in_the_message(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runner, "run", full)
    outcomes = []
    with pytest.raises(CannotWrite, match=f"no space left on the disk of {tmp_path}"):
        sweep(SPECS, tmp_path, on_done=outcomes.append)
    assert len(outcomes) == 1, "all others would fail alike"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_noticed_at_the_start(tmp_path):
    (tmp_path / f".probe-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(CannotWrite, match="no space left"):
        check_writable(tmp_path)


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match=r"cannot write to .*file/results"):
        check_writable(tmp_path / "file" / "results")


def test_other_settings_are_refused_before_any_work(tmp_path):
    sweep(SPECS[:1], tmp_path)
    config = SPECS[0].folder(tmp_path) / CONFIG
    config.write_text(config.read_text().replace('"width": 64', '"width": 63'))
    with pytest.raises(OtherSettings, match="width"):
        sweep(SPECS[::-1], tmp_path)
    assert not SPECS[1].folder(tmp_path).exists()


def test_two_sweeps_do_not_write_the_same_run(tmp_path):
    folder = SPECS[0].folder(tmp_path)
    folder.mkdir(parents=True)
    with alone_in(folder), pytest.raises(RuntimeError, match="another process"), alone_in(folder, patience=0.2):
        pass
    with alone_in(folder, patience=0):
        pass


@pytest.mark.slow
def test_killed_process_leaves_no_broken_file_and_the_next_one_completes(tmp_path, undisturbed):
    for moment in (0.05, 0.2, 0.4, 0.6, 0.8):
        pid = os.fork()
        if pid == 0:
            sweep(LONG, tmp_path, checkpoint_every=0.1)
            os._exit(0)
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert load_runs(tmp_path)[1] == []
        for path in tmp_path.rglob("*.json"):
            read_record(path)
    assert list(tmp_path.rglob(CHECKPOINT)) or list(tmp_path.rglob(SUMMARY)), "never got far enough to matter"
    sweep(LONG, tmp_path, checkpoint_every=0.1)
    assert same(tmp_path, undisturbed)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not left & {CHECKPOINT, PROGRESS}


@pytest.mark.slow
def test_sweep_goes_on_when_a_worker_is_killed(tmp_path, undisturbed):
    def kill_one() -> None:
        wait_for(lambda: list(tmp_path.rglob(PROGRESS)))
        workers()[0].kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    outcomes = sweep(LONG, tmp_path, processes=2, checkpoint_every=0.2)
    killer.join()
    assert {outcome.status for outcome in outcomes} == {"finished"}
    assert same(tmp_path, undisturbed)


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from experiments.sweep import sweep; "
        "from experiments.runner import Spec; "
        "sweep([Spec('diabetes', 'base', seed) for seed in (0, 1)], Path(sys.argv[1]), processes=2)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    wait_for(lambda: list(tmp_path.rglob(PROGRESS)))
    orphans = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs(orphans, timeout=20)[1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def scheduler(tmp_path: Path):
    """A real cluster: a scheduler and two workers, each a process of its own."""
    address, processes = f"tcp://127.0.0.1:{free_port()}", []
    dask = [sys.executable, "-m", "dask"]
    local = ["--local-directory", str(tmp_path / "dask"), "--no-dashboard", "--no-nanny", "--nthreads", "2"]
    commands = [
        [*dask, "scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--no-dashboard"],
        *[[*dask, "worker", address, "--host", "127.0.0.1", "--name", name, *local] for name in ("a", "b")],
    ]
    try:
        for command in commands:
            processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=tmp_path))
        yield address
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@pytest.mark.slow
def test_cluster_gives_bitwise_the_same_and_the_files_come_back(tmp_path, scheduler):
    from distributed import Client

    with Client(scheduler, timeout="60s", set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    broken = Spec("diabetes", "anderson", 0, overrides={"steps": 60, "safeguard": "none such"})
    outcomes = sweep([*SPECS, broken], tmp_path / "cluster", scheduler=scheduler)
    failed = [outcome for outcome in outcomes if outcome.failed]
    assert [outcome.job for outcome in failed] == [broken] and "Invalid safeguard" in failed[0].error
    sweep(SPECS, tmp_path / "here")
    assert same(tmp_path / "cluster", tmp_path / "here")
    kept = {path.name for path in SPECS[0].folder(tmp_path / "cluster").iterdir()}
    assert kept == {CONFIG, METRICS, SUMMARY}
    again = sweep(SPECS, tmp_path / "cluster", scheduler=scheduler)
    assert all(outcome.done_before for outcome in again)
    races = [Entry("least-squares", "sgd", rate, 0) for rate in (0.01, 0.03)]
    assert not any(outcome.failed for outcome in sweep(races, tmp_path / "races", scheduler=scheduler))
    assert {record["rate"] for record in Entry.load(tmp_path / "races")[0]} == {0.01, 0.03}


def test_files_from_another_machine_are_added_to_those_that_are_there(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    races = [Entry("least-squares", "sgd", rate, 0) for rate in (0.01, 0.03)]
    sweep([SPECS[0], races[0]], here)
    (SPECS[0].folder(here) / PROGRESS).write_text("{}")
    sweep([SPECS[0], races[1]], there)
    unpack(packed(there), here)
    assert {path.name for path in SPECS[0].folder(here).iterdir()} == {CONFIG, METRICS, SUMMARY}
    assert all(job.is_done(here) for job in (SPECS[0], *races))
