"""The samples of one jump: how many of each term are fitted, and how many it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from .objective import Term
from .population import Samples
from .residuals import Residuals, Values, unweighted
from .trace import Weigh

ROWS = 500
"""Rows that the first jump fits, if there are as many."""
DRAWN, GIVEN, FIXED = 1 / 3, 2 / 3, 1.0
"""Shares of samples that are fitted: drawn ones, those given for one step, and fixed ones, which are all there are."""
UNSEEN = 2
"""Fewest blocks of samples that are drawn besides those that are fitted."""


@dataclass
class Plan:
    """Numbers of samples by the names of terms."""

    fitted: dict[str, int]
    total: dict[str, int]
    most: float
    """Largest useful number of blocks."""


def plan(residuals: Residuals, given: Mapping[str, Samples], blocks: int, most_rows: float) -> Plan:
    """Choose numbers of samples for rows that are ``blocks`` times those of the first jump."""
    terms = residuals.objective.terms
    there = {name: _available(term, given.get(name)) for name, term in terms.items()}
    share = {name: GIVEN if name in given else FIXED if term.fixed else DRAWN for name, term in terms.items()}
    rows = sum(share[name] * there[name] * max(residuals.terms[name].size, 1) for name in terms)
    first = min(1.0, ROWS / rows)
    fitted, total = {}, {}
    for name, term in terms.items():
        block = max(1, round(first * share[name] * there[name]))
        drawn = not term.fixed and name not in given
        fitted[name] = blocks * block if drawn else min(blocks * block, max(1, int(share[name] * there[name])))
        total[name] = max(there[name], (blocks + max(UNSEEN, blocks // 2)) * block) if drawn else there[name]
    return Plan(fitted, total, max(1.0, most_rows / (first * rows)))


def _available(term: Term, given: Samples | None) -> int:
    if given is not None:
        return len(given[0])
    return term.count or len(term.samples[0])  # type: ignore[index, arg-type]


@dataclass
class Batch:
    """Samples of all terms; the first of each are fitted. Residuals (samples, p) are given by the names of terms."""

    samples: dict[str, Samples]
    fitted: dict[str, int]
    weights: dict[str, float]
    """Factors of the terms in the loss."""

    def first(self) -> dict[str, Samples]:
        """The samples that are fitted."""
        return {name: tuple(x[: self.fitted[name]] for x in samples) for name, samples in self.samples.items()}

    def seen(self, values: Values) -> Values:
        """The residuals of fitted samples."""
        return {name: found[: self.fitted[name]] for name, found in values.items()}

    def unseen(self, values: Values) -> Values:
        """The residuals of samples that are not fitted, of terms that have such."""
        return {name: found[self.fitted[name] :] for name, found in values.items() if len(found) > self.fitted[name]}

    def vector(self, values: Values) -> Tensor:
        """All residuals, scaled such that their squares add up to the loss."""
        return torch.cat([sqrt(self.weights[name] / len(found)) * found.reshape(-1) for name, found in values.items()])

    def losses(self, values: Values) -> Tensor:
        """The loss of fitted samples, and that of others."""
        parts = [self.vector(part) if part else torch.zeros(1) for part in (self.seen(values), self.unseen(values))]
        return torch.stack([(part @ part).double().cpu() for part in parts])

    def weigh(self) -> dict[str, Weigh]:
        """Weights of the residuals in the rows, scaled as in ``vector``."""
        return {name: _scaled(sqrt(self.weights[name] / count)) for name, count in self.fitted.items()}


def _scaled(factor: float) -> Weigh:
    return lambda values: factor * unweighted(values)
