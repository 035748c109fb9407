"""A race: what was asked for, and the runs that belong to it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.results import Run, is_complete, load_run
from experiments.runner import Spec
from experiments.sweep import unfinished

from .calibration import calibration, settings
from .field import BASE, entrants, scaled, tuning_specs
from .tuning import NotTuned, Tuned, race_spec, tuned


@dataclass(frozen=True)
class Race:
    """The arguments of a race, and the results that depend on them."""

    tasks: list[str]
    methods: list[str]
    seeds: list[int]
    jobs: int
    results: Path
    out: Path
    scale: float
    """Length of all runs, in units of the benchmark's."""
    command: str
    """The command line of the race."""

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
            if is_complete(folder := spec.folder(self.folder)):
                found[spec.task].setdefault(spec.method, {})[spec.seed] = load_run(folder)
        return {task: methods for task, methods in found.items() if BASE in methods}

    def left(self) -> tuple[list[tuple[str, str]], list[str]]:
        """Missing runs: (task, method) of each tuning run, and the task of each other run."""
        tuning = [(spec.task, spec.method) for spec in unfinished(self.tuning_specs(), self.tuning_folder)]
        try:
            return tuning, [spec.task for spec in unfinished(self.specs(), self.folder)]
        except NotTuned:
            return tuning, [task for task, methods in self.entrants.items() for _ in methods for _ in self.seeds]
