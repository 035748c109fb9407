"""The tables of a report, as data frames: one row per method and metric."""

from collections.abc import Iterable
from math import isfinite
from typing import Any

import pandas as pd

from . import statistics as st
from .claims import Verdict
from .comparison import BUDGETS, TIME, Comparison, Group, Trace

CAUSES = ("attempted", "accepted", "rejected_", "skipped_", "averag", "restarts", "extra_evaluations")
"""Prefixes of the counters that are shown."""
Row = dict[str, Any]


def comparison_table(task: Comparison) -> pd.DataFrame:
    """Final and best metrics of each method and reference, with confidence intervals, and the time they took."""
    rows = [_method_row(task, group, metric) for group in task.groups for metric in task.metrics]
    for metric in task.metrics:
        for name, value in task.references(metric).items():
            rows.append({"task": task.name, "method": name, "label": name, "metric": metric} | _numbers("final", value))
    return pd.DataFrame(rows)


def _method_row(task: Comparison, group: Group, metric: str) -> Row:
    missing = [seed for seed in task.seeds if seed not in group.seeds]
    row: Row = {"task": task.name, "method": group.variant, "label": group.label, "metric": metric}
    row |= {"seeds": len(group.traces), "diverged": len(group.diverged), "missing": " ".join(map(str, missing))}
    row |= _numbers("final", group.final(metric)) | _numbers("best", group.best(metric))
    row |= _numbers("seconds", st.interval([trace.end(TIME) for trace in group.finished]))
    return row | _numbers("time_ratio", time_ratio(task, group))


def _numbers(name: str, value: st.Interval) -> Row:
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}


def time_ratio(task: Comparison, group: Group) -> st.Interval:
    """Seconds of whole runs over the base's, seed by seed; 1 for the base itself."""
    base = task.base_of(group) or group
    others = {trace.run.seed: trace.end(TIME) for trace in base.finished}
    shared = [trace for trace in group.finished if others.get(trace.run.seed, 0) > 0]
    if base is group and group.method != "base":
        return st.interval([])
    return st.geometric_interval([trace.end(TIME) / others[trace.run.seed] for trace in shared])


def paired_table(task: Comparison) -> pd.DataFrame:
    """Each method against its base, seed by seed, at equal gradient evaluations and at equal time.

    They are compared at the end of the shorter run, by the last evaluations until then.
    """
    rows = []
    for group in task.groups:
        if base := task.base_of(group):
            rows += [_paired_row(task, group, base, metric, budget) for metric in task.metrics for budget in BUDGETS]
    return pd.DataFrame(rows)


def _paired_row(task: Comparison, group: Group, base: Group, metric: str, budget: str) -> Row:
    others = {trace.run.seed: trace for trace in base.traces}
    pairs = [(trace, others[trace.run.seed]) for trace in group.traces if trace.run.seed in others]
    values = [found for trace, other in pairs if (found := _pair(trace, other, metric, budget))]
    result = st.paired([ours for ours, _ in values], [theirs for _, theirs in values])
    row: Row = {"task": task.name, "method": group.variant, "label": group.label, "metric": metric}
    row |= {"against": base.variant, "equal": BUDGETS[budget], "pairs": result.estimate.count}
    row |= {"kind": "ratio" if result.is_ratio else "difference"} | _numbers("estimate", result.estimate)
    row |= {"diverged": result.diverged, "against_diverged": result.others_diverged}
    return row | {"better": result.better, "worse": result.worse, "p_value": result.p_value}


def _pair(trace: Trace, other: Trace, metric: str, budget: str) -> tuple[float, float] | None:
    """The metric of both at the end of the shorter run; None if one had not been evaluated by then."""
    if trace.run.diverged or other.run.diverged:  # NaN for the one, its end for the other
        return trace.value(metric), other.value(metric)
    limit = min(trace.end(budget), other.end(budget))
    ours, theirs = (each.value(metric, budget, limit) for each in (trace, other))
    return (ours, theirs) if isfinite(ours) and isfinite(theirs) else None


def acceptance_table(task: Comparison) -> pd.DataFrame:
    """Outcomes of the accelerations: counts per run, mean over seeds. Causes that never occurred are left out."""
    rows = []
    for group in task.groups:
        stats = pd.DataFrame([trace.run.summary["stats"] for trace in group.traces])
        counts = stats[[name for name in stats if name.startswith(CAUSES)]].apply(pd.to_numeric, errors="coerce").mean()
        if counts.get("attempted") is not None or counts.any():
            rows.append({"task": task.name, "method": group.variant, "label": group.label} | counts.to_dict())
    table = pd.DataFrame(rows)
    idle = [name for name in table.columns[3:] if name not in ("attempted", "accepted") and not table[name].any()]
    return table.drop(columns=idle)


def runs_table(task: Comparison) -> pd.DataFrame:
    """The end of each run, from which all other tables are made."""
    rows = []
    for trace in (trace for group in task.groups for trace in group.traces):
        config, summary = trace.run.config, trace.run.summary
        row: Row = {"task": trace.run.task, "method": trace.run.variant, "seed": trace.run.seed}
        row |= {name: summary[name] for name in ("status", "steps", "seconds", "cpu_seconds", "learning_rate")}
        row |= {f"{part}_{name}": summary[part].get(name) for part in ("final", "best") for name in task.metrics}
        rows.append(row | {"date": config["date"], "commit": config["versions"].get("commit", "")})
    return pd.DataFrame(rows)


def claims_table(verdicts: Iterable[Verdict]) -> pd.DataFrame:
    """The claims with their verdicts, without the figures."""
    columns = ["name", "source", "claim", "verdict", "inconclusive", "numbers"]
    return pd.DataFrame([{name: getattr(verdict, name) for name in columns} for verdict in verdicts], columns=columns)
