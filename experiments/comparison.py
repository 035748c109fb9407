"""Runs in order: by task, by method, by seed; and the tables that compare them.

A variant with a bracket, as ``anderson[batch_size=80,history_size=5]``, is compared with the base on the same problem,
``base[batch_size=80]``, or with none.
"""

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from . import statistics as st
from .methods import METHODS
from .results import METRICS, DamagedRun, Run
from .runner import defaults
from .task import ANDERSON_SETTINGS
from .tasks import TASKS

BASE = "base"
VARIANT = "variant"
"""The kind of runs with settings that differ from the profile."""
COLUMNS = ("step", "seconds", "cpu_seconds", "loss")
TIME = "cpu_seconds"
"""Processor time: a run has one thread, and wall-clock time would depend on other work of the machine."""
BUDGETS = {"step": "gradient evaluations", TIME: "time"}
"""Budgets at which runs can be compared: column -> its name."""


def all_settings(run: Run) -> dict[str, Any]:
    """All settings of a run; those that its task did not have yet have their defaults."""
    return (defaults(run.task) if run.task in TASKS else {}) | run.config["settings"]


def settings_without(run: Run, names: Container[str]) -> str:
    """All settings except these; equal for runs that differ only in these."""
    return json.dumps({name: value for name, value in all_settings(run).items() if name not in names}, sort_keys=True)


def problem(run: Run) -> str:
    """The task with all settings except those of Anderson; equal for runs that can be compared."""
    return run.task + settings_without(run, ANDERSON_SETTINGS)


@dataclass(frozen=True)
class Trace:
    """The evaluations of one run."""

    run: Run
    evaluations: pd.DataFrame

    @classmethod
    def of(cls, run: Run) -> "Trace":
        """Read the evaluations; raises ``DamagedRun`` if the files are not valid."""
        steps = run.steps
        metrics = [name for name in steps.columns if name not in COLUMNS]
        numeric = [name for name in steps.columns if pd.api.types.is_numeric_dtype(steps[name])]
        if missing := [name for name in BUDGETS if name not in numeric]:
            raise DamagedRun(f"{run.folder / METRICS}: no numbers for {', '.join(missing)} in it")
        known = [name for name in metrics if name in numeric]
        if not known:
            raise DamagedRun(f"{run.folder / METRICS}: no evaluation in it")
        return cls(run, steps.dropna(subset=known, how="all")[[*BUDGETS, *known]])

    def column(self, name: str) -> st.Floats:
        """One column of the evaluations; NaN where a metric is missing."""
        if name not in self.evaluations:
            return np.full(len(self.evaluations), nan)
        return self.evaluations[name].to_numpy(dtype=float)

    def end(self, budget: str) -> float:
        """The end of the run, in steps or seconds."""
        return float(self.run.summary["steps" if budget == "step" else budget])

    def value(self, metric: str, budget: str = "step", limit: float = np.inf) -> float:
        """The metric at the given budget; NaN for a run that diverged."""
        return nan if self.run.diverged else st.value_at(self.column(budget), self.column(metric), limit)


@dataclass(frozen=True)
class Group:
    """All seeds of one variant."""

    variant: str
    method: str
    traces: tuple[Trace, ...]

    @property
    def bracket(self) -> str:
        """The settings that differ from the profile, in brackets; mostly empty."""
        return self.variant.removeprefix(self.method)

    @property
    def label(self) -> str:
        """The label in figures and tables."""
        known = METHODS.get(self.method)
        return f"{known.label if known else self.method}{self.bracket and ' ' + self.bracket}"

    @property
    def kind(self) -> str:
        """The kind of the method (paper, control, peer, ours), or variant."""
        known = METHODS.get(self.method)
        return VARIANT if self.bracket or not known else known.kind

    @property
    def seeds(self) -> list[int]:
        """Seeds of all runs that ended, diverged or not."""
        return [trace.run.seed for trace in self.traces]

    @cached_property
    def finished(self) -> tuple[Trace, ...]:
        """Runs that did not diverge."""
        return tuple(trace for trace in self.traces if not trace.run.diverged)

    @property
    def diverged(self) -> tuple[Trace, ...]:
        """Runs that diverged."""
        return tuple(trace for trace in self.traces if trace.run.diverged)

    @property
    def remark(self) -> str:
        """A remark about the mean: one seed, or diverged runs; empty otherwise."""
        lost, total = len(self.diverged), len(self.traces)
        if lost:
            return f"diverged {lost} of {total}" + (
                f", mean of the {total - lost} that finished" if lost < total else ""
            )
        return "one seed" if total == 1 else ""

    def final(self, metric: str) -> st.Interval:
        """The mean of the final metric."""
        return st.interval([trace.value(metric) for trace in self.finished])

    def best(self, metric: str) -> st.Interval:
        """The mean of the lowest metric of each run."""
        values = [trace.column(metric) for trace in self.finished]
        return st.interval([np.nanmin(column) if np.isfinite(column).any() else nan for column in values])


@dataclass(frozen=True)
class Comparison:
    """All variants of one task, in the order of the table of methods."""

    task: str
    groups: tuple[Group, ...]
    shared: str = ""
    """The bracket that all variants share, which is then omitted from their names."""

    @property
    def name(self) -> str:
        """The name in CSV tables."""
        return self.task + self.shared

    @property
    def title(self) -> str:
        """The title in headings."""
        title = TASKS[self.task].title if self.task in TASKS else self.task
        return f"{title} {self.shared}" if self.shared else title

    @cached_property
    def metrics(self) -> dict[str, str]:
        """Metric -> label; the one for comparisons comes first."""
        known = TASKS.get(self.task)
        columns = dict.fromkeys(n for group in self.groups for trace in group.traces for n in trace.evaluations.columns)
        found = [name for name in columns if name not in COLUMNS]
        labels: Mapping[str, str] = known.metrics if known else {}
        first = [known.metric] if known and known.metric in found else []
        ordered = dict.fromkeys([*first, *(name for name in labels if name in found), *found])
        return {name: labels.get(name, name) for name in ordered}

    @property
    def metric(self) -> str:
        """The metric for comparisons."""
        return next(iter(self.metrics))

    @property
    def seeds(self) -> list[int]:
        """All seeds of any method with the settings of the profile; if there are none, of all methods."""
        plain = [group for group in self.groups if not group.bracket] or self.groups
        return sorted({seed for group in plain for seed in group.seeds})

    def base_of(self, group: Group) -> Group | None:
        """The base on the same problem with common seeds; None for a base, or if there is none."""
        wanted = problem(group.traces[0].run)
        found = (other for other in self.groups if other.method == BASE and problem(other.traces[0].run) == wanted)
        return next((base for base in found if group.method != BASE and set(base.seeds) & set(group.seeds)), None)

    def references(self, metric: str) -> dict[str, st.Interval]:
        """Predictors that are not trained: name -> metric over the seeds."""
        found: dict[str, dict[int, float]] = {}
        for group in self.groups:
            if group.bracket:
                continue
            for trace in group.traces:
                for name, metrics in trace.run.summary["references"].items():
                    if metrics.get(metric) is not None:
                        found.setdefault(name, {})[trace.run.seed] = metrics[metric]
        return {name: st.interval(list(values.values())) for name, values in found.items()}


def collect(runs: Iterable[Run]) -> tuple[list[Comparison], list[str]]:
    """Group runs into comparisons; also returns messages about runs that are left out."""
    found: dict[str, dict[str, dict[int, Trace]]] = {}
    problems = []
    for run in runs:
        try:
            seeds = found.setdefault(run.task, {}).setdefault(run.variant, {})
            first = next(iter(seeds.values())).run if seeds else run
            if settings_without(run, ()) != settings_without(first, ()):
                raise DamagedRun(f"{run.folder}: left out, its settings are not those of {first.folder}")
            if run.seed in seeds:
                raise DamagedRun(f"{run.folder}: left out, {seeds[run.seed].run.folder} is the same run")
            seeds[run.seed] = Trace.of(run)
        except DamagedRun as problem:
            problems.append(str(problem))
    order = sorted(found, key=lambda task: (_position(task, TASKS), task))
    return [_comparison(task, found[task]) for task in order if any(found[task].values())], problems


def _comparison(task: str, variants: Mapping[str, Mapping[int, Trace]]) -> Comparison:
    """The variants without the bracket that all share; the profile's own settings come first."""
    traces = {name: tuple(seeds[seed] for seed in sorted(seeds)) for name, seeds in variants.items() if seeds}
    methods = {name: str(own[0].run.config["method"]) for name, own in traces.items()}
    brackets = {name.removeprefix(method) for name, method in methods.items()}
    shared = brackets.pop() if len(brackets) == 1 else ""
    groups = [Group(name.removesuffix(shared), methods[name], own) for name, own in traces.items()]
    groups.sort(key=lambda group: (bool(group.bracket), _position(group.method, METHODS), group.variant))
    return Comparison(task, tuple(groups), shared)


def _position(name: str, table: Iterable[str]) -> int:
    names = list(table)
    return names.index(name) if name in names else len(names)
