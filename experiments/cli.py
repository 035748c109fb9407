"""The command line: ``python -m experiments`` and a command: list, run, compare, study, large-batch, whole-batch,
equations, tune or report.

Modules that take a while to import are imported where they are used, so that ``--help`` answers soon.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

try:
    import tyro
    from rich.console import Console
    from tyro.conf import Positional, arg

    from .screen import complain
except ImportError as error:
    raise SystemExit(f'{error}: the experiments need more packages: pip install -e ".[experiments]"') from None

if TYPE_CHECKING:
    from .attempt import Outcome
    from .runner import Spec

OK, SOME_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
SEEDS = {"paper": "0:20", "quick": "0:3"}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Options for where runs are executed and stored."""

    jobs: int | None = None
    """Runs at the same time on this machine. Default: one for each core."""
    results: Path | None = None
    """Folder for the results. Default: results/ and the profile."""
    backend: Literal["joblib", "dask"] = "joblib"
    """Processes on this machine, or a dask cluster."""
    scheduler: str | None = None
    """Address of the dask scheduler, such as tcp://10.0.0.1:8786."""
    checkpoint_every: float = 60.0
    """Seconds between two checkpoints of a run, the most that is lost when it is stopped."""
    dry_run: bool = False
    """Print the number of runs and the estimated time, and stop."""

    @property
    def folder(self) -> Path:
        """The folder of results."""
        return self.results or Path("results") / "paper"

    def make(self, console: Console, specs: "Sequence[Spec]") -> int:
        """Make the runs, after printing an estimate on a terminal."""
        options = self.sweep_options()
        if console.is_terminal or self.dry_run:
            from .overview import announce

            announce(console, specs, self.folder, None if self.scheduler else options["jobs"])
        return OK if self.dry_run else make_runs(console, specs, self.folder, **options)

    def sweep_options(self) -> dict[str, Any]:
        """How to run."""
        from joblib import cpu_count

        from .arguments import BadInput

        jobs = cpu_count() if self.jobs is None else self.jobs
        if jobs < 1:
            raise BadInput(f"Invalid jobs: {jobs}. Allowed: 1 and more.")
        if not self.checkpoint_every >= 0:  # nor NaN, with which none would ever be due
            raise BadInput(f"Invalid checkpoint_every: {self.checkpoint_every}. Allowed: 0 and more seconds.")
        if (self.backend == "dask") != (self.scheduler is not None):
            raise BadInput("For a cluster give both: --backend dask --scheduler ADDRESS.")
        return {"jobs": jobs, "scheduler": self.scheduler, "checkpoint_every": self.checkpoint_every}


@dataclass(frozen=True, kw_only=True)
class Runs(Engine):
    """Options that `run` and `compare` share."""

    tasks: Annotated[Positional[tuple[str, ...]], arg(metavar="TASK ...")]
    """Names of tasks, or all."""
    method: Annotated[tuple[str, ...], arg(metavar="METHOD ...")] = ()
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

    @property
    def folder(self) -> Path:
        """The folder of results."""
        return self.results or Path("results") / self.profile

    def specs(self, kinds: Sequence[str]) -> "list[Spec]":
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


@dataclass(frozen=True, kw_only=True)
class Run(Runs):
    """Run methods on tasks, several runs at a time. To resume after an interruption, run the same command again."""

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code."""
        return self.make(console, self.specs(kinds=["paper"]))


@dataclass(frozen=True, kw_only=True)
class Compare(Runs):
    """Run all methods that fit the tasks; then print how they compare and make the page."""

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code. Some failed runs are no reason to withhold the rest."""
        from .overview import show_comparison, show_report

        specs = self.specs(kinds=[])
        code = self.make(console, specs)
        if code in (OK, SOME_FAILED) and not self.dry_run:
            show_comparison(console, self.folder, {spec.task for spec in specs})
            show_report(console, self.folder)
        return code


@dataclass(frozen=True, kw_only=True)
class Study(Engine):
    """Make the short runs that test the paper's further claims: names of studies, or all."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="STUDY ...")]
    """See `python -m experiments list`."""

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code."""
        from .arguments import study_specs

        return self.make(console, study_specs(self.names))


@dataclass(frozen=True, kw_only=True)
class LargeBatch(Engine):
    """Train a small ResNet with growing batches, with and without Anderson and average; then make the page."""

    seeds: str = "0:3"
    """As in 7, or 0,3,5, or 0:20 (without 20)."""
    out: Path | None = None
    """Folder for the page; by default the folder of results."""

    @property
    def folder(self) -> Path:
        """Apart from the runs of the tasks' own profiles."""
        return self.results or Path("results") / "large-batch"

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code. Some failed runs are no reason to withhold the rest."""
        from .arguments import parse_seeds
        from .large_batch import check_data, study
        from .large_batch_page import show_page

        check_data()
        code = self.make(console, study(parse_seeds(self.seeds)).specs())
        if code in (OK, SOME_FAILED) and not self.dry_run:
            show_page(console, self.folder, self.out or self.folder)
        return code


@dataclass(frozen=True, kw_only=True)
class WholeBatch:
    """Count the gradients that optimizers need with whole batches, and compare batch sizes; then make the page."""

    problems: Annotated[tuple[str, ...], arg(metavar="PROBLEM ...")] = ()
    """Problems of the family. Default: all."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD ...")] = ()
    """Optimizers, as in sgd, anderson-sgd or lbfgs-10. Default: all."""
    seeds: str = "0:5"
    """As in 7, or 0,3,5, or 0:20 (without 20)."""
    jobs: int | None = None
    """Runs at the same time on this machine. Default: one for each core."""
    results: Path = Path("results") / "whole-batch"
    """Folder for the runs; those that are there are not made again."""
    out: Path = Path("docs") / "results" / "whole-batch"
    """Folder for the page."""
    only: Literal["runs", "page"] | None = None
    """Make the runs alone, or the page alone."""
    dry_run: bool = False
    """Print the number of runs and their estimated time, and stop there."""

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code. Some failed runs are no reason to withhold the rest."""
        from .whole_batch.command import carry_out

        failed = carry_out(console, **vars(self))
        return SOME_FAILED if failed else OK


@dataclass(frozen=True, kw_only=True)
class Equations:
    """Solve equations and fit surrogates in a given processor time with several optimizers; then make the page."""

    problems: Annotated[tuple[str, ...], arg(metavar="PROBLEM ...")] = ()
    """Equations and surrogates, as in burgers2d or helmholtz. Default: all."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD ...")] = ()
    """Optimizers, as in gauss-newton-adam, soap or adam-lbfgs. Default: all."""
    seeds: str = "0:3"
    """As in 7, or 0,3,5, or 0:20 (without 20). Seeds from 100 on are for tuning and are not shown on the page."""
    seconds: float = 120.0
    """Processor time of each run. A long run contains the short ones, except for methods with a schedule."""
    rates: Annotated[tuple[float, ...], arg(metavar="RATE ...")] = ()
    """Learning rates of the methods that have a choice. Default: all."""
    best: bool = False
    """Only the best learning rate of each method, as far as runs of its rates are there, instead of all rates."""
    jobs: int | None = None
    """Runs at the same time on this machine. Default: one for each core."""
    results: Path = Path("results") / "equations"
    """Folder for the runs; those that are there are not made again."""
    out: Path = Path("docs") / "results" / "equations"
    """Folder for the page."""
    only: Literal["runs", "page"] | None = None
    """Make the runs alone, or the page alone."""
    dry_run: bool = False
    """Print the number of runs and their estimated time, and stop there."""

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code. Some failed runs are no reason to withhold the rest."""
        from .equations.command import carry_out

        failed = carry_out(console, **vars(self))
        return SOME_FAILED if failed else OK


@dataclass(frozen=True, kw_only=True)
class Tune(Engine):
    """Find the learning rates of the base and its peers on seeds that are not reported, and print them."""

    tasks: Annotated[Positional[tuple[str, ...]], arg(metavar="TASK ...")]
    """Names of tasks, or all."""
    save: Path | None = None
    """File for the rates; experiments/tuned.json has those that are used."""

    @property
    def folder(self) -> Path:
        """Apart from the runs that are reported."""
        return self.results or Path("results") / "tuning"

    def __call__(self, console: Console) -> int:
        """Carry it out; returns the exit code."""
        from . import tune
        from .arguments import task_names

        names = task_names(self.tasks)
        code = self.make(console, [spec for name in names for spec in tune.specs(name)])
        if code == OK and not self.dry_run:
            for name in names:
                entry = tune.best_rates(name, self.folder)
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
        from .arguments import BadInput
        from .overview import show_report

        if not self.folder.is_dir():
            raise BadInput(f"No folder {self.folder}. Give one that `python -m experiments run` wrote to.")
        show_report(console, self.folder, self.out)
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
    "study": Study,
    "large-batch": LargeBatch,
    "whole-batch": WholeBatch,
    "equations": Equations,
    "tune": Tune,
    "report": Report,
}


def make_runs(console: Console, specs: "Sequence[Spec]", results: Path, **options: Any) -> int:
    """Make the runs while showing them; returns the exit code."""
    from .progress import shown, title
    from .sweep import sweep

    outcomes: list[Outcome] = []
    try:
        with shown(console, specs, results) as show:

            def done(outcome: "Outcome") -> None:
                outcomes.append(outcome)
                show(outcome)
                if outcome.failed:
                    complain(f"{title(outcome.spec)}: {outcome.error}")

            sweep(specs, results, on_done=done, **options)
    except KeyboardInterrupt:
        finished = sum(not outcome.failed for outcome in outcomes)
        complain(f"Stopped. {finished} of {len(specs)} runs are done; run the same command to continue.")
        return INTERRUPTED
    return SOME_FAILED if any(outcome.failed for outcome in outcomes) else OK


def main(args: Sequence[str] | None = None) -> int:
    """Execute a command line; returns the exit code. Errors that users can fix are printed without a traceback."""
    command = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m experiments", args=args)
    try:
        with terminated_like_interrupted():
            return int(command(Console()))
    except user_errors() as error:
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


def user_errors() -> tuple[type[Exception], ...]:
    """Errors that are printed without a traceback. Imported only after an error."""
    from .arguments import BadInput
    from .attempt import NoCluster
    from .runner import OtherSettings, UnknownName
    from .sweep import CannotWrite

    return BadInput, UnknownName, OtherSettings, CannotWrite, NoCluster
