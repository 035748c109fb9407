"""The participants: tasks with their settings, methods, and the resulting runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.data import MissingData
from experiments.methods import METHODS
from experiments.runner import Spec, named
from experiments.tasks import TASKS
from experiments.tune import rates

BASE = "base-tuned"
"""The method that all others are compared with."""
KINDS = ("peer", "ours")
TUNING_SEEDS = (100, 101)
"""Seeds for tuning, which are not reported."""

SETTINGS: dict[str, dict[str, Any]] = {
    "burgers2d": {
        "steps": 3000, "decay_every": 500, "decay_factor": 0.5, "evaluate_every": 30,
        "interior_points": 1000, "boundary_points": 100, "training_share": 0.5,
    },
    "burgers2d-fixed": {
        "steps": 1680, "decay_every": 280, "decay_factor": 0.5, "evaluate_every": 20, "learning_rate": 0.03,
        "depth": 4, "interior_points": 2500, "boundary_points": 250,
    },
    "burgers-nd": {
        "steps": 1500, "decay_every": 500, "evaluate_every": 15, "learning_rate": 0.01,
        "width": 20, "interior_points": 1000, "boundary_points": 200, "training_share": 0.5,
    },
    # Small tables are learnt, and overfitted, early: evaluated more often, as an evaluation costs little.
    "admissions": {"steps": 3000, "decay_every": 2000, "evaluate_every": 10, "learning_rate": 0.06},
    "diabetes": {"steps": 3000, "decay_every": 2000, "evaluate_every": 10},
    "digits": {"steps": 3000, "decay_every": 1200, "evaluate_every": 10},
    "fashion": {"steps": 2340, "decay_every": 780, "evaluate_every": 78, "learning_rate": 0.01},
    "cifar10": {
        "steps": 1000, "evaluate_every": 50, "optimizer": "adam", "learning_rate": 0.01,
        "training_images": 10_000, "validation_images": 1_000, "shrink": 2, "width": 8, "depth": 1, "batch_size": 64,
    },
}  # fmt: skip
"""Settings that differ from the tasks'. A run of the base takes 2 to 15 seconds. Learning rates, the unit of those that
are tried, were chosen so that the base's best would be inside the grid (on two tasks it is at its edge after all). The
schedule of the 2d tasks is milder than the paper's, with which so short a run makes no progress after a third and the
base is too easy to beat."""
LENGTHS = ("steps", "decay_every", "evaluate_every")
"""Settings that are proportional to the length of a run, so that all runs have equally many evaluations."""


def scaled(settings: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The settings of a run of another length.

    >>> scaled({"steps": 100, "decay_every": 40, "width": 20}, 0.5)
    {'steps': 50, 'decay_every': 20, 'width': 20}
    """
    return {name: max(1, round(value * factor)) if name in LENGTHS else value for name, value in settings.items()}


def entrants(task: str, methods: Sequence[str] = ()) -> list[str]:
    """The methods for a task, restricted to those named, if any are. The base always takes part."""
    settings = Spec(task, BASE, 0, overrides=SETTINGS[task]).resolve()
    for name in methods:
        named("method", name, METHODS)
    fitting = [name for name, method in METHODS.items() if method.kind in KINDS and method.applies(settings)]
    return [name for name in fitting if not methods or name in (BASE, *methods)]


def metric(task: str) -> str:
    """What methods are ranked by: the distance from the solution for equations, else the task's metric."""
    return "relative_l2" if TASKS[task].pinn else TASKS[task].metric


def tuning_specs(task: str, methods: Iterable[str], settings: Mapping[str, Any]) -> list[Spec]:
    """Tuning runs, equal for all methods. Those at one rate follow each other, which makes their times comparable."""
    centre = Spec(task, BASE, 0, overrides=SETTINGS[task]).resolve().learning_rate
    return [
        Spec(task, method, seed, overrides={**settings, "learning_rate": rate})
        for seed in TUNING_SEEDS
        for rate in rates(centre)
        for method in methods
    ]


def missing_data(task: str) -> str:
    """The reason why a task cannot be run here; empty if it can."""
    try:
        Spec(task, BASE, 0).resolve().start(0)
    except MissingData as problem:
        return str(problem)
    return ""
