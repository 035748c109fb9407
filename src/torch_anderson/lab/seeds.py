"""Like with like: what stands side by side is over the same seeds, so that easy ones do not make a method look good."""

from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from . import statistics as st
from .comparison import BASE, Comparison, Group

Seeds = tuple[int, ...]


def common_seeds(groups: Iterable[Group]) -> Seeds:
    """Those that all of them have, in order."""
    return tuple(sorted(set.intersection(*(set(group.seeds) for group in groups))))


def restricted(group: Group, seeds: Collection[int]) -> Group:
    """The group with these of its seeds alone."""
    return replace(group, traces=tuple(trace for trace in group.traces if trace.run.seed in seeds))


def alike(groups: Collection[Group]) -> tuple[Group, ...]:
    """All on their common seeds; each on its own where there are none."""
    seeds = common_seeds(groups)
    return tuple(restricted(group, seeds) for group in groups) if seeds else tuple(groups)


def in_words(groups: Collection[Group]) -> str:
    """What their means are over, after ``alike``."""
    count = len(common_seeds(groups))
    return "each on its own seeds" if not count else "1 seed" if count == 1 else f"{count} seeds"


def seed_sets(task: Comparison) -> list[Seeds]:
    """What means are made over for a reader who switches methods on and off, the largest first.

    The seeds of each method, and the common ones of each kind of methods and the base.
    """
    base = [group for group in task.groups if group.variant == BASE]
    kinds = {
        group.kind: [*base, *(other for other in task.groups if other.kind == group.kind)] for group in task.groups
    }
    sets = {tuple(sorted(group.seeds)) for group in task.groups} | {common_seeds(groups) for groups in kinds.values()}
    return sorted(sets - {()}, key=lambda seeds: (-len(seeds), seeds))


def against(group: Group, base: Group, metric: str) -> st.Paired:
    """How the group ended against the base, on the seeds that both have."""
    seeds = common_seeds([group, base])
    ours, theirs = ([trace.value(metric) for trace in restricted(each, seeds).traces] for each in (group, base))
    return st.paired(ours, theirs)


def typical_seed(group: Group, base: Group, metric: str) -> int:
    """Of the seeds that both have, the one on which their ratio is in the middle; of two such, the worse one."""
    theirs = {trace.run.seed: trace.value(metric) for trace in base.traces}
    ours = restricted(group, common_seeds([group, base])).traces
    ranked = sorted(ours, key=lambda trace: float(np.divide(trace.value(metric), theirs[trace.run.seed])))
    return ranked[len(ranked) // 2].run.seed
