"""The benchmark as a whole: the runs that belong to it, and what it prints and writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.arguments import available, chosen
from experiments.jobs import unfinished
from experiments.page import write_page
from experiments.progress import estimate_one
from experiments.results import Run, check_writable, load_run
from experiments.runner import Spec
from experiments.screen import BadInput, duration, show_table, tell

from .calibration import calibration, settings
from .field import BASE, SETTINGS, TUNING_SEEDS, entrants, missing_data, scaled, tuning_specs
from .figure import PANELS, draw_profile
from .scores import scores, to_target
from .tables import TERMINAL, report, terminal_row
from .tuning import NotTuned, Tuned, race_spec, tuned

ESTIMATING = 0.15
"""Seconds to spend on the estimate of one method on one task."""


@dataclass(frozen=True)
class Race:
    """The arguments of a race, and the results that depend on them."""

    tasks: list[str]
    methods: list[str]
    seeds: list[int]
    results: Path
    scale: float
    """Length of all runs, in units of the benchmark's."""

    @cached_property
    def calibrated(self) -> dict[str, dict[str, Any]]:
        """Cost of a forward pass by task."""
        return calibration(self.tasks, self.results)

    @cached_property
    def entrants(self) -> dict[str, list[str]]:
        """Task -> methods."""
        return {task: entrants(task, self.methods) for task in self.tasks}

    def settings(self, task: str) -> dict[str, Any]:
        """Settings of a run of the base."""
        return scaled(settings(task, self.calibrated[task]), self.scale)

    @property
    def tuning_folder(self) -> Path:
        """Folder of the tuning runs."""
        return self.results / "tuning"

    @property
    def folder(self) -> Path:
        """Folder of the runs that are reported."""
        return self.results / "runs"

    def tuning_specs(self) -> list[Spec]:
        """The runs of the stage `tune`."""
        return [
            spec for task, methods in self.entrants.items() for spec in tuning_specs(task, methods, self.settings(task))
        ]

    @cached_property
    def tuned(self) -> dict[str, dict[str, Tuned]]:
        """Task -> method -> what tuning found."""
        return {
            task: {method: tuned(task, method, self.settings(task), self.tuning_folder) for method in methods}
            for task, methods in self.entrants.items()
        }

    def specs(self) -> list[Spec]:
        """The runs of the stage `run`, seeds outermost, so that what is done at any time can be compared."""
        return [
            race_spec(task, method, seed, self.settings(task), found)
            for seed in self.seeds
            for task, methods in self.tuned.items()
            for method, found in methods.items()
        ]

    def runs(self) -> dict[str, dict[str, dict[int, Run]]]:
        """Task -> method -> seed -> existing run."""
        found: dict[str, dict[str, dict[int, Run]]] = {task: {} for task in self.tasks}
        for spec in self.specs():
            if spec.is_done(self.folder):
                found[spec.task].setdefault(spec.method, {})[spec.seed] = load_run(spec.folder(self.folder))
        return {task: methods for task, methods in found.items() if BASE in methods}

    def left(self) -> tuple[list[tuple[str, str]], list[str]]:
        """Missing runs: (task, method) of each tuning run, and the task of each other run."""
        tuning = [(spec.task, spec.method) for spec in unfinished(self.tuning_specs(), self.tuning_folder)]
        try:
            return tuning, [spec.task for spec in unfinished(self.specs(), self.folder)]
        except NotTuned:
            return tuning, [task for task, methods in self.entrants.items() for _ in methods for _ in self.seeds]


def plan(tasks: Sequence[str], methods: Sequence[str], seeds: list[int], results: Path, scale: float) -> Race:
    """The race of these tasks and methods, or of all; tasks without data are left out and reported."""
    here = available(chosen("task of this benchmark", tasks, {task: task for task in SETTINGS}), missing_data)
    return Race(here, list(methods), seeds, results, scale)


def announce(console: Console, race: Race, processes: int) -> None:
    """Print the estimated time: tuning runs by the first steps of each method, the others by the base's time."""
    tuning, racing = race.left()
    wanted = {*tuning, *((task, BASE) for task in racing)}
    specs = {pair: Spec(*pair, TUNING_SEEDS[0], overrides=race.settings(pair[0])) for pair in wanted}
    times = {pair: estimate_one(spec, ESTIMATING) for pair, spec in specs.items()}
    seconds = sum(times[pair] for pair in tuning) + sum(times[task, BASE] for task in racing)
    spread = f"{duration(seconds / processes)} with {processes} jobs, {duration(seconds)} on one core"
    tell(console, f"{len(tuning)} runs to tune and {len(racing)} to compare are left. Estimated time: {spread}")


def show_calibration(console: Console, race: Race) -> None:
    """Measure missing costs, and print all of them."""
    rows = [[task, *map(str, found.values())] for task, found in race.calibrated.items()]
    columns = ["task", "cost of a forward pass", "gradient, ms", "forward pass, ms", "date"]
    show_table(console, "Cost of a forward pass, relative to a gradient", columns, rows)


def show_tuning(console: Console, race: Race) -> None:
    """Print the rates that the tuning runs choose."""
    rows = [
        [task, method, f"{found.rate:g}{' (edge)' if found.at_edge else ''}", f"{found.slowness:.2f}"]
        for task, methods in race.tuned.items()
        for method, found in methods.items()
    ]
    show_table(console, f"Tuned on seeds {TUNING_SEEDS}", ["task", "method", "rate", "time of a step / base"], rows)


def show_page(console: Console, race: Race, out: Path, command: str) -> None:
    """Write the page with its figure, and the numbers of all runs; print a short form."""
    check_writable(out)
    runs = race.runs()
    if not runs:
        raise BadInput(f"No task with runs of {BASE} in {race.folder}: give the same command without --only first.")
    found = {task: scores(task, methods) for task, methods in runs.items()}
    for task, rows in found.items():
        show_table(console, task, TERMINAL, [terminal_row(each) for each in rows])
    every = [each for methods in runs.values() for by_seed in methods.values() for each in by_seed.values()]
    costs = {unit: to_target(runs, unit) for unit in PANELS}
    parts = report(found, every, race.tuned, race.calibrated, command, costs)
    frames = {"runs": pd.DataFrame([numbers(each) for each in every])}
    page = write_page(out, parts, {"profile": draw_profile(runs)}, frames)
    tell(console, f"Page: {page.resolve()}")


def numbers(run: Run) -> dict[str, object]:
    """A row of runs.csv."""
    row = {"task": run.task, "method": run.config["method"], "seed": run.seed}
    names = ("status", "steps", "seconds", "cpu_seconds", "learning_rate", "training_loss")
    row |= {name: run.summary[name] for name in names}
    return row | {f"{part}_{name}": value for part in ("final", "best") for name, value in run.summary[part].items()}
