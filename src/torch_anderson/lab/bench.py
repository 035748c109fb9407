"""Benchmarks of the lab: overhead of a run over plain training, throughput of two jobs, time of a report."""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch.optim.lr_scheduler import LambdaLR

from .methods import METHODS, base
from .report import build_report
from .results import CONFIG, read_json, run_folder, write_json
from .runner import Spec, one_thread, run
from .sweep import sweep
from .task import Metrics

COLUMNS = ["what", "measured", "wanted"]
OVERHEAD_SPECS = {
    "diabetes": Spec("diabetes", "base", 0, "quick"),
    "burgers2d": Spec("burgers2d", "base", 0, "quick", {"steps": 100}),
}
RUNS_OF_REPORT = 200


def measurements(repeats: int) -> list[list[str]]:
    """The rows of the table."""
    rows = []
    with TemporaryDirectory(prefix="torch-anderson-bench-") as name:
        folder = Path(name)
        for task, spec in OVERHEAD_SPECS.items():
            cost = overhead(spec, folder / "overhead", repeats)
            rows.append([f"time of a run of {task} over that of a bare loop", f"{cost:.3f} x", "1.03 x"])
        rows.append(["throughput of 2 jobs over that of 1", f"{throughput(folder):.2f} x", "1.7 x"])
        rows.append([f"report of {RUNS_OF_REPORT} runs", f"{report_seconds(folder):.1f} s", "30 s"])
    return rows


def overhead(spec: Spec, folder: Path, repeats: int) -> float:
    """Processor time of a run over that of the bare loop: median over interleaved pairs."""
    ratios = []
    for _ in range(repeats):
        shutil.rmtree(folder, ignore_errors=True)
        plain = processor_seconds(lambda: bare_loop(spec))
        ratios.append(processor_seconds(lambda: run(spec, folder)) / plain)
    return median(ratios)


def bare_loop(spec: Spec) -> Metrics:
    """A minimal training loop without records, which evaluates as often as the run does."""
    task, metrics = spec.resolve(), {}
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        problem = task.start(spec.seed)
        optimizer = base(task, problem.model, METHODS[spec.method].rate(task))
        schedule = LambdaLR(optimizer, task.rate_factor)
        for step in range(task.steps):
            optimizer.zero_grad()
            problem.loss(step).backward()
            optimizer.step()
            schedule.step()
            if (step + 1) % task.evaluate_every == 0:
                with torch.no_grad():
                    metrics = problem.evaluate()
    return metrics


def processor_seconds(function: Callable[[], object]) -> float:
    """Processor time of a call, without other processes of the machine."""
    started = time.process_time()
    function()
    return time.process_time() - started


def throughput(folder: Path, runs: int = 4) -> float:
    """Seconds of some runs one after the other, over those of the same runs two at a time."""
    specs = [replace(OVERHEAD_SPECS["diabetes"], seed=seed) for seed in range(runs)]
    # Starting a worker takes seconds, once in hours of runs.
    sweep([replace(spec, overrides={"steps": 10}) for spec in specs], folder / "warm", jobs=2)
    spent = []
    for jobs in (1, 2):
        started = time.perf_counter()
        sweep(specs, folder / f"jobs-{jobs}", jobs)
        spent.append(time.perf_counter() - started)
    return spent[0] / spent[1]


def report_seconds(folder: Path) -> float:
    """Seconds for the report of many runs, copies of one of full length."""
    made = folder / "one"
    spec = Spec("diabetes", "base", 0)
    original = run(spec, made)
    methods = list(METHODS)[:10]
    for number in range(RUNS_OF_REPORT):
        copy_run(original, folder / "many", methods[number % len(methods)], number // len(methods))
    started = time.perf_counter()
    build_report(folder / "many")
    return time.perf_counter() - started


def copy_run(original: Path, results: Path, method: str, seed: int) -> None:
    """Copy a run under the name of another method and seed."""
    config = read_json(original / CONFIG)
    folder = run_folder(results, config["task"], method, seed)
    shutil.copytree(original, folder)
    write_json(folder / CONFIG, config | {"method": method, "variant": method, "seed": seed})
