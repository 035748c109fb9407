"""The results as text: one table per task, one over all tasks, the tuning, and the provenance of the numbers."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import geometric_mean
from typing import Any

from experiments import statistics as st
from experiments.benchmarks.report import table
from experiments.methods import METHODS
from experiments.page import wrapped
from experiments.provenance import described, distinct, seed_ranges
from experiments.results import Run
from experiments.tasks import TASKS
from experiments.tune import FACTORS

from .field import BASE, TUNING_SEEDS, metric
from .scores import COST, TIME, Problem, Reached, Score, profile
from .tuning import Tuned

OTHERS = {"training_loss": "training loss / base", "validation_mse": "validation MSE / base"}
READING = """\
Each method uses the best of the same four learning rates, and as many steps as fit into the processor time of the base,
with its schedule stretched accordingly. Ratios are to the base, seed by seed: geometric mean and 95 % confidence
interval; below 1 is better.

- *Cost to target*: the cost of a run up to its first evaluation at or below the base's best metric on that seed,
  relative to the cost of the base up to there. A gradient counts 1, a forward pass as listed below, and a step of
  `GaussNewton` along the tangent as many gradients as take the same time. The median is over all seeds; a target that
  was never reached counts as infinite. In parentheses: on how many seeds it was reached.
- *Time to target*: the corresponding processor time.
- *Rank*: by the metric at the end; (=): the 95 % interval of the ratio to the first includes 1.
- *End*: the metric, geometric mean.
- *Training loss*: on the first batch, at the weights that are evaluated.
- `!`: the best rate is at the edge of those tried.
- `-`: on at least one task, most seeds did not reach the target.

Methods that apply to some tasks only are marked in the figure with the number of their problems."""

PROFILE = """\
Performance profile: the share of problems (a task and a seed) on which a method reached the base's best within a factor
of the least that any method needed there, in counted cost and in processor time. All runs are in
[runs.csv](runs.csv). In numbers:"""
WINS = "The number of seeds of each task on which a method had the least counted cost (all that tie count):"
TABLE_ONLY = " --only page"
FACTORS_SHOWN = (1.0, 2.0, 4.0, 8.0)
UNITS = {COST: "cost", TIME: "time"}
CALIBRATION = {
    "forward_cost": "cost of a forward pass",
    "gradient_ms": "gradient, ms",
    "forward_ms": "forward pass, ms",
    "date": "date",
}


def report(
    races: Mapping[str, Sequence[Score]],
    runs: Sequence[Run],
    found: Mapping[str, Mapping[str, Tuned]],
    calibrated: Mapping[str, Mapping[str, Any]],
    command: str,
    costs: Mapping[str, Mapping[str, Mapping[Problem, float]]],
) -> str:
    """The whole page. ``costs``: unit -> method -> problem -> cost to the target, in that unit."""
    parts = [
        "# Time to target",
        origin(runs, command),
        READING,
        "## All tasks",
        overall(races),
        "![Performance profile](profile.png)",
        PROFILE,
        profile_table(costs),
        WINS,
        wins_table(costs[COST]),
    ]
    for task, rows in races.items():
        parts += [f"## {TASKS[task].title} (`{task}`)", about(task, found[task]), task_table(task, rows, found[task])]
    parts += ["## Calibration and tuning", calibration_table(calibrated), tuning_table(found)]
    return "\n\n".join(parts) + "\n"


def origin(runs: Sequence[Run], command: str) -> str:
    """Command, date, versions, hardware and seeds."""
    seconds = sum(run.summary["cpu_seconds"] for run in runs)
    lines = [
        f"- made {datetime.now(UTC):%Y-%m-%d} from {len(runs)} runs of {days(runs)}, "
        f"{seconds / 3600:.2f} core hours of training, tuning not counted",
        f"- seeds {seed_ranges({run.seed for run in runs})}; rates tuned on seeds {seed_ranges(TUNING_SEEDS)}",
        *(f"- {text}" for text in distinct(described(run.config["versions"]) for run in runs)),
        *(f"- {text}" for text in distinct(described(run.config["hardware"]) for run in runs)),
    ]
    shell = wrapped(command.replace(TABLE_ONLY, ""), "    ").replace("\n", " \\\n")
    about = f"This command tunes, races and makes this page; with `{TABLE_ONLY.strip()}` it makes the page alone."
    return "\n".join([about, "", "```", shell, "```", "", *(wrapped(line, "  ") for line in lines)])


def days(runs: Sequence[Run]) -> str:
    """The days on which the runs were made."""
    dates = sorted({run.config["date"][:10] for run in runs})
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def about(task: str, found: Mapping[str, Tuned]) -> str:
    """Metric and base of a task."""
    words = TASKS[task].metrics[metric(task)]
    return f"Metric: {words}. Base: Adam at {found[BASE].rate:g}, the task's schedule."


def task_table(task: str, rows: Sequence[Score], found: Mapping[str, Tuned]) -> str:
    """All methods of a task, in the order of their ranks."""
    others = [name for name in OTHERS if name in rows[0].others]
    columns = ["method", "rank", "end / base", "best / base", *(OTHERS[name] for name in others)]
    columns += ["cost to target", "time to target", "better on", "end", "rate", "cost of a run", "time / base"]
    return table([task_row(each, others, found[each.method]) for each in rows], columns)


def task_row(each: Score, others: Iterable[str], tuned: Tuned) -> list[str]:
    """One method."""
    *first, cost, time = terminal_row(each)
    return [
        *first,
        *(ratio(each.others[name].estimate) for name in others),
        cost,
        time,
        f"{each.final.better} of {len(each.reached[COST].shares)}",
        f"{each.end:.3g}",
        f"{tuned.rate:g}{' !' if tuned.at_edge else ''}",
        f"{each.cost:,.0f}",
        f"{each.time.mean:.2f}",
    ]


TERMINAL = ["method", "rank", "end / base", "best / base", "cost to target", "time to target"]


def terminal_row(each: Score) -> list[str]:
    """The columns that fit a terminal."""
    rank = f"{each.rank} (=)" if each.level and each.rank > 1 else str(each.rank)
    numbers = [with_diverged(each.final), ratio(each.best.estimate)]
    return [METHODS[each.method].label, rank, *numbers, *(reached_text(each.reached[unit]) for unit in (COST, TIME))]


def with_diverged(found: st.Paired) -> str:
    """The ratio, and the number of diverged runs, which it leaves out."""
    return ratio(found.estimate) + (f", {found.diverged} diverged" if found.diverged else "")


def ratio(found: st.Interval) -> str:
    """Mean and interval.

    >>> ratio(st.Interval(0.5, 0.25, 1.0, 3)), ratio(st.interval([2.0]))
    ('0.50 [0.25, 1.00]', '2.00')
    """
    if not found.count:
        return "-"
    return number(found.mean) + (f" [{number(found.low)}, {number(found.high)}]" if found.count > 1 else "")


def number(value: float) -> str:
    """Two decimals, or two significant digits."""
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.2g}"


def reached_text(found: Reached) -> str:
    """The median share, and on how many seeds the target was reached."""
    middle = f"{found.median:.2f}" if math.isfinite(found.median) else "not reached"
    return f"{middle} ({found.count}/{len(found.shares)})"


def overall(races: Mapping[str, Sequence[Score]]) -> str:
    """One row per method: geometric means over its tasks."""
    by_method: dict[str, list[Score]] = {}
    for rows in races.values():
        for each in rows:
            by_method.setdefault(each.method, []).append(each)
    columns = ["method", "tasks", "end / base", "best / base", "worst end", "first or (=)", "target reached"]
    order = sorted(by_method, key=lambda method: overall_mean(by_method[method]))
    return table(
        [overall_row(method, by_method[method]) for method in order], [*columns, "cost to target", "time to target"]
    )


def profile_table(costs: Mapping[str, Mapping[str, Mapping[Problem, float]]]) -> str:
    """Shares of problems solved within some factors of the least cost, and of the least time."""
    profiles = {unit: profile(found) for unit, found in costs.items()}
    shares = {method: [solved(profiles[unit][method], factor) for unit in profiles for factor in FACTORS_SHOWN]
              for method in profiles[COST]}  # fmt: skip
    order = sorted(shares, key=lambda method: shares[method], reverse=True)
    columns = [f"{UNITS[unit]} x {factor:g}" for unit in profiles for factor in FACTORS_SHOWN]
    return table([[METHODS[method].label, *(f"{share:.0%}" for share in shares[method])] for method in order],
                 ["solved within", *columns])  # fmt: skip


def wins_table(costs: Mapping[str, Mapping[Problem, float]]) -> str:
    """Method by task: number of problems solved at the least cost."""
    found = wins(costs)
    tasks = list(dict.fromkeys(task for solved in costs.values() for task, _ in solved))
    order = sorted(found, key=lambda method: -sum(found[method].values()))
    rows = [[METHODS[method].label, *(found[method][task] or "" for task in tasks)] for method in order]
    return table(rows, ["method", *tasks])


def wins(costs: Mapping[str, Mapping[Problem, float]]) -> dict[str, Counter[str]]:
    """Method -> task -> number of seeds on which no other method reached the target at a lower cost.

    >>> costs = {
    ...     "soap": {("digits", 0): 1.0, ("digits", 1): math.inf},
    ...     "muon": {("digits", 0): 1.0, ("digits", 1): 3.0},
    ... }
    >>> wins(costs)
    {'soap': Counter({'digits': 1}), 'muon': Counter({'digits': 2})}
    """
    least: dict[Problem, float] = {}
    for solved in costs.values():
        for problem, cost in solved.items():
            least[problem] = min(cost, least.get(problem, math.inf))
    return {
        method: Counter(problem[0] for problem, cost in solved.items() if cost == least[problem] < math.inf)
        for method, solved in costs.items()
    }


def solved(staircase: tuple[list[float], list[float]], factor: float) -> float:
    """The share at a factor.

    >>> solved(([1.0, 2.0], [0.5, 1.0]), 1.5)
    0.5
    """
    return max((share for at, share in zip(*staircase, strict=True) if at <= factor * (1 + 1e-12)), default=0.0)


def overall_mean(each: Sequence[Score]) -> float:
    """Geometric mean of the ratio at the end; infinite if a method has no finished run on a task."""
    mean = geometric_mean([score.final.estimate.mean for score in each])
    return mean if math.isfinite(mean) else math.inf


def overall_row(method: str, each: Sequence[Score]) -> list[str]:
    """A method over its tasks. There is no mean of costs if a target was not reached in the median."""
    finals = [score.final.estimate.mean for score in each]
    reached = [score.reached[COST] for score in each]
    return [
        METHODS[method].label,
        str(len(each)),
        mean_text(finals),
        mean_text([score.best.estimate.mean for score in each]),
        number(max(finals)) if all(map(math.isfinite, finals)) else "diverged",
        f"{sum(score.level for score in each)} of {len(each)}",
        f"{sum(found.count for found in reached)} of {sum(len(found.shares) for found in reached)}",
        *(mean_text([score.reached[unit].median for score in each]) for unit in (COST, TIME)),
    ]


def mean_text(values: Sequence[float]) -> str:
    """The geometric mean, if all values are finite.

    >>> mean_text([0.5, 2.0]), mean_text([0.5, math.inf])
    ('1.00', '-')
    """
    mean = geometric_mean(list(values))
    return number(mean) if math.isfinite(mean) else "-"


def calibration_table(calibrated: Mapping[str, Mapping[str, Any]]) -> str:
    """Cost of a forward pass by task."""
    rows = [[task, *(found[name] for name in CALIBRATION)] for task, found in calibrated.items()]
    return table(rows, ["task", *CALIBRATION.values()])


def tuning_table(found: Mapping[str, Mapping[str, Tuned]]) -> str:
    """All rates that were tried, with the resulting metric."""
    rows = [
        [task, METHODS[method].label, f"{tuned.slowness:.2f}", *tried_texts(tuned)]
        for task, methods in found.items()
        for method, tuned in methods.items()
    ]
    return table(rows, ["task", "method", "time of a step / base", *["rate: metric"] * len(FACTORS)])


def tried_texts(tuned: Tuned) -> list[str]:
    """One cell per rate, the chosen one in bold."""
    cells = {rate: f"{rate:g}: {score:.3g}" for rate, score in tuned.tried.items()}
    return [f"**{cell}**" if rate == tuned.rate else cell for rate, cell in cells.items()]
