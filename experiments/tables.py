"""The tables of a report: numbers as data frames, one row per method and metric, and the texts that pages show."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import pandas as pd

from . import statistics as st
from .claims import Verdict
from .comparison import BUDGETS, TIME, Comparison, Group, Trace
from .text import BETTER, MISSING, WORSE, Cell, Table, judged, number, plus_minus

CAUSES = ("attempted", "accepted", "rejected_", "skipped_", "averag", "restarts", "extra_evaluations")
"""Prefixes of the counters that are shown."""
Row = dict[str, Any]
"""Column -> text, number or interval."""


def framed(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a data frame; an interval takes three columns, for its mean and both ends."""
    return pd.DataFrame([{key: entry for name, value in row.items() for key, entry in _columns(name, value).items()}
                         for row in rows])  # fmt: skip


def _columns(name: str, value: Any) -> Row:
    if not isinstance(value, st.Interval):
        return {name: value}
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}


# Final metrics


def comparison_table(task: Comparison) -> pd.DataFrame:
    """Final and best metrics of each method and reference, with confidence intervals, and the time they took."""
    return framed(_comparison_rows(task))


def _comparison_rows(task: Comparison) -> list[Row]:
    rows = []
    for group in task.groups:
        missing = [seed for seed in task.seeds if seed not in group.seeds]
        seconds = st.interval([trace.end(TIME) for trace in group.finished])
        for metric in task.metrics:
            row: Row = {"task": task.name, "method": group.variant, "label": group.label, "metric": metric}
            row |= {"seeds": len(group.traces), "diverged": len(group.diverged), "missing": " ".join(map(str, missing))}
            row |= {"final": group.final(metric), "best": group.best(metric)}
            rows.append(row | {"seconds": seconds, "time_ratio": time_ratio(task, group)})
    for metric in task.metrics:
        for name, value in task.references(metric).items():
            rows.append({"task": task.name, "method": name, "label": name, "metric": metric, "final": value})
    return rows


def time_ratio(task: Comparison, group: Group) -> st.Interval:
    """Seconds of whole runs over the base's, seed by seed; 1 for the base itself."""
    base = task.base_of(group) or group
    others = {trace.run.seed: trace.end(TIME) for trace in base.finished}
    shared = [trace for trace in group.finished if others.get(trace.run.seed, 0) > 0]
    if base is group and group.method != "base":
        return st.interval([])
    return st.geometric_interval([trace.end(TIME) / others[trace.run.seed] for trace in shared])


def comparison_text(task: Comparison) -> Table:
    """Method by method: seeds, metrics, time."""
    further = {name: label for name, label in task.metrics.items() if name != task.metric}
    headers = ["method", "seeds", f"final {task.metrics[task.metric]}", "best", "time / base", "processor seconds"]
    headers += ["learning rate", *(f"final {label}" for label in further.values())]
    groups = {group.variant: group for group in task.groups}
    by_method: dict[str, dict[str, Row]] = {}
    for row in _comparison_rows(task):
        by_method.setdefault(row["method"], {})[row["metric"]] = row
    rows = []
    for method, by_metric in by_method.items():
        group, first, main = groups.get(method), next(iter(by_metric.values())), by_metric.get(task.metric, {})
        ends = [_mean(by_metric.get(name, {}), "final") for name in further]
        seeds, ratio, rates = "not trained", MISSING, MISSING
        if group:
            total = f"{len(group.seeds)} of {len(task.seeds)}" if not group.bracket else str(len(group.seeds))
            seeds = f"{total} ({group.remark})" if group.remark else total
            ratio = judged(first["time_ratio"]).text
            rates = " ".join(sorted({number(trace.run.summary["learning_rate"]) for trace in group.traces}))
        rows.append([first["label"], seeds, _mean(main, "final"), _mean(main, "best"), ratio, _mean(first, "seconds"),
                     rates, *ends])  # fmt: skip
    return Table(headers, rows)


def _mean(row: Mapping[str, Any], name: str) -> str:
    return plus_minus(row[name]) if name in row else MISSING


# Pairs of runs with the same seed


def paired_table(task: Comparison) -> pd.DataFrame:
    """Each method against its base, seed by seed, at equal gradient evaluations and at equal time.

    They are compared at the end of the shorter run, by the last evaluations until then.
    """
    return framed(_paired_rows(task, task.metrics))


def _paired_rows(task: Comparison, metrics: Iterable[str]) -> list[Row]:
    rows = []
    for group in task.groups:
        if base := task.base_of(group):
            rows += [_paired_row(task, group, base, metric, budget) for metric in metrics for budget in BUDGETS]
    return rows


def _paired_row(task: Comparison, group: Group, base: Group, metric: str, budget: str) -> Row:
    others = {trace.run.seed: trace for trace in base.traces}
    pairs = [(trace, others[trace.run.seed]) for trace in group.traces if trace.run.seed in others]
    values = [found for trace, other in pairs if (found := _pair(trace, other, metric, budget))]
    result = st.paired([ours for ours, _ in values], [theirs for _, theirs in values])
    row: Row = {"task": task.name, "method": group.variant, "label": group.label, "metric": metric}
    row |= {"against": base.variant, "equal": BUDGETS[budget], "pairs": result.estimate.count}
    row |= {"kind": "ratio" if result.is_ratio else "difference", "estimate": result.estimate}
    row |= {"diverged": result.diverged, "against_diverged": result.others_diverged}
    return row | {"better": result.better, "worse": result.worse, "p_value": result.p_value}


def _pair(trace: Trace, other: Trace, metric: str, budget: str) -> tuple[float, float] | None:
    """The metric of both at the end of the shorter run; None if one had not been evaluated by then."""
    if trace.run.diverged or other.run.diverged:  # NaN for the one, its end for the other
        return trace.value(metric), other.value(metric)
    limit = min(trace.end(budget), other.end(budget))
    ours, theirs = (each.value(metric, budget, limit) for each in (trace, other))
    return (ours, theirs) if isfinite(ours) and isfinite(theirs) else None


def paired_text(task: Comparison) -> Table:
    """Method by method against the base, at equal gradient evaluations and at equal time."""
    headers = ["method", "against"]
    for name in BUDGETS.values():
        headers += [f"ratio at equal {name}", "pairs", "better : worse", "p"]
    rows: dict[str, list[object]] = {}
    for row in _paired_rows(task, [task.metric]):
        cells = rows.setdefault(row["method"], [row["label"], row["against"]])
        cells += [_estimate(row), _pairs(row), f"{row['better']} : {row['worse']}", row["p_value"]]
    return Table(headers, rows.values())


def _estimate(row: Mapping[str, Any]) -> Cell:
    """The estimate from the pairs that did not diverge; without a meaning if diverged runs contradict it."""
    cell = judged(row["estimate"], 1.0 if row["kind"] == "ratio" else 0.0)
    contrary = BETTER if row["diverged"] > row["against_diverged"] else WORSE
    undone = row["diverged"] != row["against_diverged"] and cell.meaning == contrary
    return Cell(cell.text if row["kind"] == "ratio" else f"difference {cell.text}", "" if undone else cell.meaning)


def _pairs(row: Mapping[str, Any]) -> str:
    """Number of pairs, and of diverged runs, whose pairs are left out."""
    lost = {"": row["diverged"], "base ": row["against_diverged"]}
    texts = [f"{who}diverged {count}" for who, count in lost.items() if count]
    return f"{row['pairs']}" + (f" ({', '.join(texts)})" if texts else "")


# Accelerations, runs and claims


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


def acceptance_text(task: Comparison) -> Table:
    """Outcomes of the accelerations, per run."""
    frame = acceptance_table(task)
    columns = [name for name in frame.columns if name not in ("task", "method", "label")]
    rows = [[row["label"], *(f"{row[name]:.1f}" if isfinite(row[name]) else MISSING for name in columns)]
            for row in frame.to_dict("records")]  # fmt: skip
    return Table(["method", *(name.replace("_", " ") for name in columns)], rows)


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


def claims_text(verdicts: Sequence[Verdict]) -> Table:
    """Claim by claim."""
    rows = [[f"{v.name} ({v.source})", v.claim, v.outcome, v.numbers] for v in verdicts]
    return Table(["claim", "what the paper says", "verdict", "numbers"], rows)
