"""The results as text: one table per task, one over all tasks, the tuning, and the provenance of the numbers."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import Any

from experiments import statistics as st
from experiments.methods import METHODS
from experiments.page import origin
from experiments.provenance import seed_ranges
from experiments.results import Run
from experiments.tasks import TASKS
from experiments.text import Table, bracketed, number
from experiments.tune import FACTORS

from .field import BASE, TUNING_SEEDS, metric
from .scores import COST, TIME, Costs, Reached, Score, wins
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
- `–`: on at least one task, most seeds did not reach the target.

Methods that apply to some tasks only are marked in the figure with the number of their problems."""

PROFILE = """\
Performance profile: the share of problems (a task and a seed) on which a method reached the base's best within a factor
of the least that any method needed there, in counted cost and in processor time. All runs are in
[runs.csv](runs.csv). In numbers:"""
WINS = "The number of seeds of each task on which a method had the least counted cost (all that tie count):"
TABLE_ONLY = " --only page"
ABOUT = f"This command tunes, races and makes this page; with `{TABLE_ONLY.strip()}` it makes the page alone."
FACTORS_SHOWN = (1.0, 2.0, 4.0, 8.0)
UNITS = {COST: "cost", TIME: "time"}
CALIBRATION = {
    "forward_cost": "cost of a forward pass",
    "gradient_ms": "gradient, ms",
    "forward_ms": "forward pass, ms",
    "date": "date",
}
TERMINAL = ["method", "rank", "end / base", "best / base", "cost to target", "time to target"]
Tunings = Mapping[str, Mapping[str, Tuned]]
"""Task -> method -> what tuning found."""


def report(
    races: Mapping[str, Sequence[Score]],
    runs: Sequence[Run],
    found: Tunings,
    calibrated: Mapping[str, Mapping[str, Any]],
    command: str,
    costs: Mapping[str, Costs],
) -> list[str | Table]:
    """The parts of the page. ``costs``: unit -> costs to the target, in that unit."""
    tuning = f"rates tuned on seeds {seed_ranges(TUNING_SEEDS)}, whose time is not counted"
    parts: list[str | Table] = ["# Time to target", ABOUT, origin(command.replace(TABLE_ONLY, ""), runs, None, tuning)]
    parts += [READING, "## All tasks", overall(races)]
    parts += ["![Performance profile](profile.png)", PROFILE, profile_table(costs), WINS, wins_table(costs[COST])]
    for task, rows in races.items():
        about = f"Metric: {TASKS[task].metrics[metric(task)]}. "
        about += f"Base: Adam at {found[task][BASE].rate:g}, the task's schedule."
        parts += [f"## {TASKS[task].title} (`{task}`)", about, task_table(rows, found[task])]
    forward = [[task, *(measured[name] for name in CALIBRATION)] for task, measured in calibrated.items()]
    parts += ["## Calibration and tuning", Table(["task", *CALIBRATION.values()], forward), tuning_table(found)]
    return parts


def task_table(rows: Sequence[Score], found: Mapping[str, Tuned]) -> Table:
    """All methods of a task, in the order of their ranks."""
    others = [name for name in OTHERS if name in rows[0].others]
    columns = ["method", "rank", "end / base", "best / base", *(OTHERS[name] for name in others)]
    columns += ["cost to target", "time to target", "better on", "end", "rate", "cost of a run", "time / base"]
    cells: list[list[object]] = []
    for each in rows:
        *first, cost, time = terminal_row(each)
        tuned = found[each.method]
        extra = [bracketed(each.others[name].estimate) for name in others]
        better = f"{each.final.better} of {len(each.reached[COST].shares)}"
        rate = f"{tuned.rate:g}{' !' if tuned.at_edge else ''}"
        cells.append([*first, *extra, cost, time, better, each.end, rate, f"{each.cost:,.0f}", each.time.mean])
    return Table(columns, cells)


def terminal_row(each: Score) -> list[str]:
    """The columns that fit a terminal; the ratio at the end leaves out diverged runs, which are counted."""
    rank = f"{each.rank} (=)" if each.level and each.rank > 1 else str(each.rank)
    lost = f", {each.final.diverged} diverged" if each.final.diverged else ""
    numbers = [bracketed(each.final.estimate) + lost, bracketed(each.best.estimate)]
    return [METHODS[each.method].label, rank, *numbers, *(reached_text(each.reached[unit]) for unit in (COST, TIME))]


def reached_text(found: Reached) -> str:
    """The median share, and on how many seeds the target was reached."""
    middle = number(found.median) if isfinite(found.median) else "not reached"
    return f"{middle} ({found.count}/{len(found.shares)})"


def overall(races: Mapping[str, Sequence[Score]]) -> Table:
    """One row per method: geometric means over its tasks. There is no mean if one of its numbers is infinite."""
    columns = ["method", "tasks", "end / base", "best / base", "worst end", "first or (=)", "target reached"]
    by_method: dict[str, list[Score]] = {}
    for each in (each for rows in races.values() for each in rows):
        by_method.setdefault(each.method, []).append(each)
    rows: dict[str, list[object]] = {}
    order: dict[str, float] = {}
    for method, found in by_method.items():
        finals, reached = [each.final.estimate.mean for each in found], [each.reached[COST] for each in found]
        mean = st.geometric_mean(finals)
        order[method] = mean if isfinite(mean) else inf
        rows[method] = [
            METHODS[method].label,
            len(found),
            mean,
            st.geometric_mean([each.best.estimate.mean for each in found]),
            max(finals) if isfinite(mean) else "diverged",
            f"{sum(each.level for each in found)} of {len(found)}",
            f"{sum(each.count for each in reached)} of {sum(len(each.shares) for each in reached)}",
            *(st.geometric_mean([each.reached[unit].median for each in found]) for unit in (COST, TIME)),
        ]
    ordered = [rows[method] for method in sorted(rows, key=lambda method: order[method])]
    return Table([*columns, "cost to target", "time to target"], ordered)


def profile_table(costs: Mapping[str, Costs]) -> Table:
    """Shares of problems solved within some factors of the least cost, and of the least time."""
    profiles = {unit: st.profile(found) for unit, found in costs.items()}
    shares = {method: [sum(at <= factor * (1 + 1e-12) for at in profiles[unit][method][0]) / len(costs[unit][method])
                       for unit in profiles for factor in FACTORS_SHOWN] for method in profiles[COST]}  # fmt: skip
    order = sorted(shares, key=lambda method: shares[method], reverse=True)
    columns = [f"{UNITS[unit]} x {factor:g}" for unit in profiles for factor in FACTORS_SHOWN]
    rows = [[METHODS[method].label, *(f"{share:.0%}" for share in shares[method])] for method in order]
    return Table(["solved within", *columns], rows)


def wins_table(costs: Costs) -> Table:
    """Method by task: number of problems solved at the least cost."""
    tasks = list(dict.fromkeys(task for solved in costs.values() for task, _ in solved))
    found = wins(costs, tasks)
    order = sorted(found, key=lambda method: -sum(found[method]))
    return Table(["method", *tasks], [[METHODS[method].label, *(n or "" for n in found[method])] for method in order])


def tuning_table(found: Tunings) -> Table:
    """All rates that were tried, with the resulting metric; the chosen one is in bold."""
    rows = []
    for task, methods in found.items():
        for method, tuned in methods.items():
            ends = {rate: number(end) if isfinite(end) else "diverged" for rate, end in tuned.tried.items()}
            cells = {rate: f"{rate:g}: {end}" for rate, end in ends.items()}
            cells[tuned.rate] = f"**{cells[tuned.rate]}**"
            rows.append([task, METHODS[method].label, tuned.slowness, *cells.values()])
    return Table(["task", "method", "time of a step / base", *["rate: metric"] * len(FACTORS)], rows)
