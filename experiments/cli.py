"""The command line: ``python -m experiments`` and a command; ``COMMANDS`` has all of them.

Modules that take a while to import are imported where they are used, so that ``--help`` answers soon.
"""

import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

try:
    import tyro
    from rich.console import Console
    from tyro.conf import Positional, arg

    from .screen import BadInput, UserError, complain
except ImportError as error:
    raise SystemExit(f'{error}: the experiments need more packages: pip install -e ".[experiments]"') from None

if TYPE_CHECKING:
    from .jobs import Job, Outcome
    from .runner import Spec

OK, SOME_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
SEEDS = {"paper": "0:20", "quick": "0:3"}
TaskNames = Annotated[Positional[tuple[str, ...]], arg(metavar="TASK ...")]
Problems = Annotated[tuple[str, ...], arg(metavar="PROBLEM ...")]
Methods = Annotated[tuple[str, ...], arg(metavar="METHOD ...")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of all commands that make runs."""

    jobs: int | None = None
    """Runs at the same time on this machine. Default: one for each core."""
    results: Path | None = None
    """Folder for the runs; those that are there are not made again. Default: below results/."""
    scheduler: str | None = None
    """Address of the scheduler of a dask cluster to make the runs on, such as tcp://10.0.0.1:8786."""
    checkpoint_every: float = 60.0
    """Seconds between two checkpoints of a run, the most that is lost when it is stopped."""
    dry_run: bool = False
    """Print the number of runs and the estimated time, and stop."""

    @property
    def folder(self) -> Path:
        """The folder of results."""
        return self.results or Path("results") / "paper"

    @property
    def processes(self) -> int:
        """Runs at the same time."""
        from joblib import cpu_count

        return int(cpu_count()) if self.jobs is None else self.jobs

    def check(self) -> None:
        """Raise ``BadInput`` for options that cannot be meant."""
        if self.processes < 1:
            raise BadInput(f"Invalid jobs: {self.jobs}. Allowed: 1 and more.")
        if not self.checkpoint_every >= 0:  # nor NaN, with which none would ever be due
            raise BadInput(f"Invalid checkpoint_every: {self.checkpoint_every}. Allowed: 0 and more seconds.")

    def make(self, console: Console, jobs: "Sequence[Job]", results: Path | None = None) -> int:
        """Make the runs, after printing an estimate on a terminal; returns the exit code."""
        from .progress import announce

        folder = results or self.folder
        if console.is_terminal or self.dry_run:
            announce(console, jobs, folder, None if self.scheduler else self.processes)
        if self.dry_run:
            return OK
        options = {"scheduler": self.scheduler, "checkpoint_every": self.checkpoint_every}
        return make_runs(console, jobs, folder, processes=self.processes, **options)


@dataclass(frozen=True, kw_only=True)
class Study(Options):
    """Options of the commands that make runs and then a page about them."""

    seeds: str | None = None
    """As in 7, or 0,3,5, or 0:20 (without 20)."""
    out: Path | None = None
    """Folder for the page; by default that of the runs."""
    only: Literal["runs", "page"] | None = None
    """Make the runs alone, or the page alone."""

    def plan(self) -> "Sequence[Job]":
        """The runs."""
        raise NotImplementedError

    def page(self, console: Console) -> None:
        """Make the page from existing runs."""

    def chosen_seeds(self) -> list[int]:
        """The seeds as numbers."""
        from .arguments import parse_seeds

        return parse_seeds(self.seeds or "")

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code. Some failed runs are no reason to withhold the page of the others."""
        code = OK if self.only == "page" else self.make(console, self.plan())
        if self.only != "runs" and code in (OK, SOME_FAILED) and not self.dry_run:
            self.page(console)
        return code


@dataclass(frozen=True, kw_only=True)
class Run(Study):
    """Run methods on tasks; the same command resumes."""

    tasks: TaskNames
    """Names of tasks, or all."""
    method: Methods = ()
    """Methods to run. Default: the three of the paper with `run`, all that fit with `compare`."""
    seeds: str | None = None
    """As in 7, or 0,3,5, or 0:20 (without 20). Default: 0:20 in the paper profile, 0:3 in the quick one."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...")] = ()
    """Settings of the task that differ from the profile's, as in history_size=5."""
    sweep: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE,VALUE ...")] = ()
    """Settings to run with each of several values, as in history_size=5,10,20."""
    profile: Literal["paper", "quick"] = "paper"
    """The paper's settings, or shorter ones to try things out."""
    tol: float | None = None
    """Stop a run when the loss on a batch is below this."""
    activation: str | None = None
    """Activation of the tasks that have a choice: tanh, or relu for the paper as written."""
    tensorboard: bool = False
    """Write event files for TensorBoard too."""
    only: Literal["runs", "page"] | None = "runs"

    @property
    def folder(self) -> Path:
        """The folder of results."""
        return self.results or Path("results") / self.profile

    def plan(self, kinds: Sequence[str] = ("paper",)) -> "list[Spec]":
        """The selected runs; without named methods, those of these kinds."""
        from . import arguments
        from .tasks import TASKS

        given = {"tol": self.tol, "activation": self.activation}
        where_known = {name: value for name, value in given.items() if value is not None}
        variants = {
            name: arguments.variations(TASKS[name], self.set, self.sweep, where_known)
            for name in arguments.task_names(self.tasks)
        }
        seeds = arguments.parse_seeds(self.seeds or SEEDS[self.profile])
        return arguments.specs(variants, self.method, seeds, self.profile, kinds, self.tensorboard)

    def page(self, console: Console) -> None:
        """Print how the methods compare, and make the page."""
        from .arguments import task_names
        from .overview import show_comparison
        from .page import show_page
        from .report import build_report

        show_comparison(console, self.folder, task_names(self.tasks))
        show_page(console, build_report, self.folder, self.out or self.folder)


@dataclass(frozen=True, kw_only=True)
class Compare(Run):
    """Run all methods that fit the tasks; compare them."""

    only: Literal["runs", "page"] | None = None

    def plan(self, kinds: Sequence[str] = ()) -> "list[Spec]":
        """The selected runs; without named methods, all that fit."""
        return super().plan(kinds)


@dataclass(frozen=True, kw_only=True)
class Claims(Options):
    """Make the short runs that test the paper's further claims."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="STUDY ...")]
    """See `python -m experiments list`, or all."""

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code."""
        from .arguments import study_specs

        return self.make(console, study_specs(self.names))


@dataclass(frozen=True, kw_only=True)
class LargeBatch(Study):
    """Train a small ResNet with growing batches; then the page."""

    seeds: str = "0:3"
    results: Path = Path("results") / "large-batch"

    def plan(self) -> "Sequence[Job]":
        """The runs; reports missing data once, before every run does."""
        from .large_batch import check_data, study

        check_data()
        return study(self.chosen_seeds()).specs()

    def page(self, console: Console) -> None:
        """Make the page from existing runs."""
        from .large_batch_page import build_page
        from .page import show_page

        show_page(console, build_page, self.results, self.out or self.results)


@dataclass(frozen=True, kw_only=True)
class WholeBatch(Study):
    """Count gradients with whole batches, compare batch sizes."""

    problems: Problems = ()
    """Problems of the family. Default: all."""
    methods: Methods = ()
    """Optimizers, as in sgd, anderson-sgd or lbfgs-10. Default: all."""
    seeds: str = "0:5"
    results: Path = Path("results") / "whole-batch"
    out: Path = Path("docs") / "results" / "whole-batch"

    def plan(self) -> "Sequence[Job]":
        """The runs; complains about damaged ones."""
        from .whole_batch.batches import Batched, Ending, plan
        from .whole_batch.race import Entry

        complain(*(message for kind in (Entry, Batched, Ending) for message in kind.load(self.results)[1]))
        return plan(self.problems, self.methods, self.chosen_seeds())

    def page(self, console: Console) -> None:
        """Make the page from existing runs."""
        from .page import show_page
        from .whole_batch.page import build_page

        show_page(console, build_page, self.results, self.out)


@dataclass(frozen=True, kw_only=True)
class Equations(Study):
    """Solve equations, fit surrogates in a given processor time."""

    problems: Problems = ()
    """Equations and surrogates, as in burgers2d or helmholtz. Default: all."""
    methods: Methods = ()
    """Optimizers, as in gauss-newton-adam, soap or adam-lbfgs. Default: all."""
    seeds: str = "0:3"
    """As in 7, or 0,3,5, or 0:20 (without 20). Seeds from 100 on are for tuning and are not shown on the page."""
    seconds: float = 120.0
    """Processor time of each run. A long run contains the short ones, except for methods with a schedule."""
    rates: Annotated[tuple[float, ...], arg(metavar="RATE ...")] = ()
    """Learning rates of the methods that have a choice. Default: all."""
    best: bool = False
    """Only the best learning rate of each method, as far as runs of its rates are there, instead of all rates."""
    results: Path = Path("results") / "equations"
    out: Path = Path("docs") / "results" / "equations"

    def plan(self) -> "Sequence[Job]":
        """The runs; complains about damaged ones."""
        from .equations.race import Entry, plan
        from .equations.scores import best_rates

        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise BadInput(f"Invalid seconds: {self.seconds:g}. Allowed: a finite number above 0.")
        records, problems = Entry.load(self.results)
        complain(*problems)
        best = best_rates(records) if self.best else None
        return plan(self.problems, self.methods, self.chosen_seeds(), self.seconds, rates=self.rates, best=best)

    def page(self, console: Console) -> None:
        """Make the page from existing runs."""
        from .equations.page import show_page

        show_page(console, self.results, self.out)


@dataclass(frozen=True, kw_only=True)
class Race(Study):
    """Tune all methods alike; compare costs to a target."""

    tasks: Annotated[tuple[str, ...], arg(metavar="TASK ...")] = ()
    """Tasks of this benchmark. Default: all."""
    methods: Methods = ()
    """Methods that take part besides the tuned base. Default: all peers and ours."""
    scale: float = 1.0
    """Length of all runs, to try things out."""
    seeds: str = "0:10"
    results: Path = Path("results") / "race"
    out: Path = Path("docs") / "results" / "race"

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code."""
        from .benchmarks.time_to_target import race as steps

        race = steps.plan(self.tasks, self.methods, self.chosen_seeds(), self.results, self.scale)
        if self.only != "page":
            steps.announce(console, race, self.processes)
            if self.dry_run:
                return OK
            steps.show_calibration(console, race)
            if code := self.make(console, race.tuning_specs(), race.tuning_folder):
                return code
            steps.show_tuning(console, race)
            if code := self.make(console, race.specs(), race.folder):
                return code
        if self.only != "runs":
            steps.show_page(console, race, self.out, " ".join(["python -m experiments", *sys.argv[1:]]))
        return OK


@dataclass(frozen=True, kw_only=True)
class Tune(Options):
    """Find the learning rates of the base and its peers."""

    tasks: TaskNames
    """Names of tasks, or all."""
    results: Path = Path("results") / "tuning"
    save: Path | None = None
    """File for the rates; experiments/tuned.json has those that are used."""

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code."""
        from . import tune
        from .arguments import task_names

        names = task_names(self.tasks)
        code = self.make(console, [spec for name in names for spec in tune.specs(name)], self.results)
        if code == OK and not self.dry_run:
            for name in names:
                entry = tune.best_rates(name, self.results)
                console.print_json(data={name: entry})
                if self.save:
                    tune.save(name, entry, self.save)
        return code


@dataclass(frozen=True)
class Report:
    """Make the page and the figures of a folder of results."""

    folder: Positional[Path]
    """A folder that `run` or `compare` wrote to."""
    out: Path | None = None
    """Folder for the page; by default that folder."""

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code."""
        from .page import show_page
        from .report import build_report

        if not self.folder.is_dir():
            raise BadInput(f"No folder {self.folder}. Give one that `python -m experiments run` wrote to.")
        show_page(console, build_report, self.folder, self.out or self.folder)
        return OK


@dataclass(frozen=True)
class List:
    """List tasks, methods, studies and profiles."""

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code."""
        from .overview import list_tables

        list_tables(console)
        return OK


COMMANDS: dict[str, Callable[..., Any]] = {
    "list": List,
    "run": Run,
    "compare": Compare,
    "report": Report,
    "study": Claims,
    "large-batch": LargeBatch,
    "whole-batch": WholeBatch,
    "equations": Equations,
    "race": Race,
    "tune": Tune,
}


def make_runs(console: Console, jobs: "Sequence[Job]", results: Path, **options: Any) -> int:
    """Make the runs while showing them; returns the exit code."""
    from .progress import shown
    from .sweep import sweep

    outcomes: list[Outcome] = []
    try:
        with shown(console, jobs, results) as show:

            def done(outcome: "Outcome") -> None:
                outcomes.append(outcome)
                show(outcome)
                if outcome.failed:
                    complain(f"{outcome.job.title}: {outcome.error}")

            sweep(jobs, results, on_done=done, **options)
    except KeyboardInterrupt:
        finished = sum(not outcome.failed for outcome in outcomes)
        complain(f"Stopped. {finished} of {len(jobs)} runs are done; run the same command to continue.")
        return INTERRUPTED
    return SOME_FAILED if any(outcome.failed for outcome in outcomes) else OK


def main(args: Sequence[str] | None = None) -> int:
    """Execute a command line; returns the exit code. Errors that users can fix are printed without a traceback."""
    command = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m experiments", args=args)
    try:
        with terminated_like_interrupted():
            if isinstance(command, Options):
                command.check()
            return int(command(Console()))
    except UserError as error:
        complain(f"experiments: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """A context in which SIGTERM, as batch systems send it, stops as cleanly as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
