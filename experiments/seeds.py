"""Common seeds: methods are compared on the same seeds, so that easy ones do not make a method look good."""

from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from . import statistics as st
from .comparison import BASE, Comparison, Group

Seeds = tuple[int, ...]


def common_seeds(groups: Iterable[Group]) -> Seeds:
    """The seeds that all groups have, in order."""
    return tuple(sorted(set.intersection(*(set(group.seeds) for group in groups))))


def restricted(group: Group, seeds: Collection[int]) -> Group:
    """The group restricted to these seeds."""
    return replace(group, traces=tuple(trace for trace in group.traces if trace.run.seed in seeds))


def alike(groups: Collection[Group]) -> tuple[Group, ...]:
    """All groups on their common seeds; unchanged if there are none."""
    seeds = common_seeds(groups)
    return tuple(restricted(group, seeds) for group in groups) if seeds else tuple(groups)


def in_words(groups: Collection[Group]) -> str:
    """The seeds of the means in words, after ``alike``."""
    count = len(common_seeds(groups))
    return "each on its own seeds" if not count else "1 seed" if count == 1 else f"{count} seeds"


def seed_sets(task: Comparison) -> list[Seeds]:
    """The sets of seeds that the page offers when methods are switched on and off, the largest first.

    These are the seeds of each method, and the common seeds of each kind of method with the base.
    """
    base = [group for group in task.groups if group.variant == BASE]
    kinds = {
        group.kind: [*base, *(other for other in task.groups if other.kind == group.kind)] for group in task.groups
    }
    sets = {tuple(sorted(group.seeds)) for group in task.groups} | {common_seeds(groups) for groups in kinds.values()}
    return sorted(sets - {()}, key=lambda seeds: (-len(seeds), seeds))


def against(group: Group, base: Group, metric: str) -> st.Paired:
    """The final metric of the group against the base, on common seeds."""
    seeds = common_seeds([group, base])
    ours, theirs = ([trace.value(metric) for trace in restricted(each, seeds).traces] for each in (group, base))
    return st.paired(ours, theirs)


def typical_seed(group: Group, base: Group, metric: str) -> int:
    """The common seed with the median ratio; of two, the worse one."""
    theirs = {trace.run.seed: trace.value(metric) for trace in base.traces}
    ours = restricted(group, common_seeds([group, base])).traces
    ranked = sorted(ours, key=lambda trace: float(np.divide(trace.value(metric), theirs[trace.run.seed])))
    return ranked[len(ranked) // 2].run.seed
