"""The command line: ``python -m experiments.benchmarks.time_to_target``; see the package for what it does."""

import argparse
import sys
from pathlib import Path

import pandas as pd
from rich.console import Console

import experiments.benchmarks.time_to_target as package
from experiments.arguments import parse_seeds
from experiments.cli import BAD_INPUT, INTERRUPTED, OK, make_runs, terminated_like_interrupted, user_errors
from experiments.overview import estimate_one
from experiments.results import Run
from experiments.runner import Spec, named
from experiments.screen import complain, duration, show_table, tell

from .field import BASE, SETTINGS, TUNING_SEEDS, missing_data
from .figure import PANELS, draw_profile, to_target
from .race import Race
from .scores import scores
from .tables import TERMINAL, report, terminal_row
from .tuning import NotTuned

ESTIMATING = 0.15
"""Seconds to spend on the estimate of one method on one task."""


def announce(race: Race, console: Console) -> None:
    """Print the estimated time: tuning runs by the first steps of each method, the others by the base's time."""
    tuning, racing = race.left()
    wanted = {*tuning, *((task, BASE) for task in racing)}
    specs = {pair: Spec(*pair, TUNING_SEEDS[0], overrides=race.settings(pair[0])) for pair in wanted}
    times = {pair: estimate_one(spec, ESTIMATING) for pair, spec in specs.items()}
    seconds = sum(times[pair] for pair in tuning) + sum(times[task, BASE] for task in racing)
    spread = f"{duration(seconds / race.jobs)} with {race.jobs} jobs, {duration(seconds)} on one core"
    tell(console, f"{len(tuning)} runs to tune and {len(racing)} to compare are left. Estimated time: {spread}")


def calibrate(race: Race, console: Console) -> int:
    """Measure missing costs, and print all of them."""
    rows = [[task, *map(str, found.values())] for task, found in race.calibrated.items()]
    columns = ["task", "cost of a forward pass", "gradient, ms", "forward pass, ms", "date"]
    show_table(console, "Cost of a forward pass, relative to a gradient", columns, rows)
    return OK


def tune(race: Race, console: Console) -> int:
    """Make the tuning runs, and print the chosen rates."""
    code = make_runs(console, race.tuning_specs(), race.tuning_folder, jobs=race.jobs)
    if code != OK:
        return code
    rows = [
        [task, method, f"{found.rate:g}{' (edge)' if found.at_edge else ''}", f"{found.slowness:.2f}"]
        for task, methods in race.tuned.items()
        for method, found in methods.items()
    ]
    show_table(console, f"Tuned on seeds {TUNING_SEEDS}", ["task", "method", "rate", "time of a step / base"], rows)
    return OK


def run(race: Race, console: Console) -> int:
    """Make the runs that are reported."""
    return make_runs(console, race.specs(), race.folder, jobs=race.jobs)


def tabulate(race: Race, console: Console) -> int:
    """Write the page with its figure, and the numbers of all runs; print a short form."""
    runs = race.runs()
    if not runs:
        complain(f"No task with runs of {BASE} in {race.folder}: make the stage `run` first.")
        return BAD_INPUT
    found = {task: scores(task, methods) for task, methods in runs.items()}
    for task, rows in found.items():
        show_table(console, task, TERMINAL, [terminal_row(each) for each in rows])
    every = [each for methods in runs.values() for by_seed in methods.values() for each in by_seed.values()]
    race.out.mkdir(parents=True, exist_ok=True)
    draw_profile(runs).savefig(race.out / "profile.png", dpi=150)
    pd.DataFrame([numbers(each) for each in every]).to_csv(race.out / "runs.csv", index=False)
    costs = {unit: to_target(runs, unit) for unit in PANELS}
    page = report(found, every, race.tuned, race.calibrated, race.command, costs)
    (race.out / "README.md").write_text(page)
    tell(console, f"Page: {(race.out / 'README.md').resolve()}")
    return OK


def numbers(run: Run) -> dict[str, object]:
    """A row of runs.csv."""
    row = {"task": run.task, "method": run.config["method"], "seed": run.seed}
    names = ("status", "steps", "seconds", "cpu_seconds", "learning_rate", "training_loss")
    row |= {name: run.summary[name] for name in names}
    return row | {f"{part}_{name}": value for part in ("final", "best") for name, value in run.summary[part].items()}


STAGES = {"calibrate": calibrate, "tune": tune, "run": run, "table": tabulate}


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.time_to_target",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="the base always takes part")
    parser.add_argument("--seeds", default="0:10", help="as in 7, or 0,3,5, or 0:10 (without 10)")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--results", type=Path, default=Path("results/race"), help="folder for the runs")
    parser.add_argument("--out", type=Path, default=Path("docs/results/race"), help="folder for tables and figure")
    parser.add_argument("--scale", type=float, default=1.0, help="length of all runs, to try things out")
    parser.add_argument("--only", choices=STAGES, help="one stage")
    parser.add_argument("--dry-run", action="store_true", help="print the estimated time and stop")
    return parser.parse_args()


def asked(given: argparse.Namespace) -> Race:
    """The race with these arguments; tasks without data are left out and reported."""
    for task in given.tasks:
        named("task of this benchmark", task, SETTINGS)
    missing = {task: problem for task in given.tasks if (problem := missing_data(task))}
    for task, problem in missing.items():
        complain(f"{task} is left out: {problem}")
    tasks = [task for task in given.tasks if task not in missing]
    command = " ".join(["python -m experiments.benchmarks.time_to_target", *sys.argv[1:]])
    return Race(
        tasks,
        given.methods,
        parse_seeds(given.seeds),
        max(1, given.jobs),
        given.results,
        given.out,
        given.scale,
        command,
    )


def main() -> int:
    """Execute the command; returns the exit code."""
    given, console = arguments(), Console()
    try:
        with terminated_like_interrupted():
            race = asked(given)
            if given.only not in ("calibrate", "table"):
                announce(race, console)
            stages = [] if given.dry_run else [given.only] if given.only else STAGES
            for stage in stages:
                if code := STAGES[stage](race, console):
                    return code
    except (NotTuned, *user_errors()) as error:  # type: ignore[misc]
        complain(f"time_to_target: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


if __name__ == "__main__":
    sys.exit(main())
