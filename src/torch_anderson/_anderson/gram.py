"""The Gram matrix of all rows of a history: the small problem, and everything a jump is judged by.

It is updated by the products of new rows, never rebuilt, and is the same on all ranks: each multiplies its columns,
and one small message adds the products up. Lengths and inner products of a candidate follow from the matrix, so that
a jump is judged before it is formed.

``solve`` finds g = argmin |r - R g| from it. Regularization and rank are relative to the lengths of the columns:
residuals of deep networks are 1e-3 to 1e-6, where an absolute regularization would silently turn the method off.
Columns come newest first: one that depends on newer ones is dropped, never the newest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, nan, sqrt
from operator import mul

from .._ranks.ranks import Ranks
from .history import History

COLLINEAR, DISTINCT = 1e-2, 1e-1
"""Squared distances of a column from the span of the others: below the first, products have to be exact; above the
second, they need not be any more."""
FITTED = 1e-2
"""The share of |r|^2 that is left, below which products have to be exact."""
RANK_TOLERANCE = 1e-14
"""A column of unit length whose squared distance from the span of the newer ones is below this depends on them."""


@dataclass(frozen=True)
class Coefficients:
    """The solution of one small problem."""

    values: list[float]
    """g, one number for each column (0 for a dropped one), newest first."""
    fitted_sq: float
    """|r|^2 - |r - R g|^2, what a linear map would remove."""
    rank: int
    """Columns in use."""
    least_distance_sq: float = 1.0
    """The smallest squared distance of a column of unit length from the span of the newer ones."""


NO_SOLUTION = Coefficients([], 0.0, 0)


@dataclass(frozen=True)
class Jump:
    """A candidate in numbers."""

    weights: list[float]
    """The candidate is the last point minus the rows of Z with these weights."""
    length: float
    """|candidate - w|"""


@dataclass(eq=False)
class Problem:
    """The least-squares problem at one acceleration, with its solution."""

    gram: list[list[float]]
    """Lower triangle of R'R / rate^2, newest column first."""
    residual_norm: float
    """|r|"""
    path: float
    """Length of the path through the stored points."""
    rates: list[float]
    """Largest learning rate of each pair, oldest first."""
    slots: list[int]
    """Where the columns are stored, newest first."""
    matrix: list[list[float]]
    """Products of all rows of Z."""
    solution: Coefficients
    """g, newest column first."""
    gain: float = 1.0
    """Predicted over present residual norm, |r - R g| / |r|."""

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite; the diagonal bounds the rest of the matrix."""
        return isfinite(self.residual_norm + self.path + sum([row[-1] for row in self.gram]))

    def jump(self, relaxation: float) -> Jump:
        """The paper's mixing, w + beta (r - (W + R) g): the last point u minus e = beta (W + R) g + (1 - beta) r."""
        by_residual, own = rate_change(self.solution.values, self.rates)
        own = relaxation * own + (1 - relaxation) * self.rates[-1]
        size = len(self.matrix) // 2
        weights = [0.0] * len(self.matrix)
        weights[size] = own
        for slot, g, x in zip(self.slots, self.solution.values, by_residual, strict=True):
            weights[slot] = relaxation * x
            weights[size + 1 + slot] = relaxation * g
        return self._measured(weights)

    def shortened(self, jump: Jump, length: float) -> Jump:
        """The part of a jump that has this length: w + s (r - e), the last point minus (1 - s) r + s e."""
        part = length / jump.length
        weights = [part * weight for weight in jump.weights]
        weights[len(weights) // 2] += (1 - part) * self.rates[-1]
        return Jump(weights, length)

    def _measured(self, weights: list[float]) -> Jump:
        """The jump r - e, whose length follows from the products of the rows that e is made of."""
        size, rate = len(weights) // 2, self.rates[-1]
        products = [
            sum(map(mul, weights, row)) if weight else 0.0 for weight, row in zip(weights, self.matrix, strict=True)
        ]
        e_times_e = sum(map(mul, weights, products))
        e_times_r = rate * sum(map(mul, weights, self.matrix[size]))
        r_sq = self.residual_norm**2
        length_sq = r_sq - 2 * e_times_r + e_times_e
        return Jump(weights, sqrt(max(length_sq, 0.0)) if isfinite(length_sq) else nan)


def rate_change(coefficients: Sequence[float], rates: Sequence[float]) -> tuple[list[float], float]:
    """What point differences measured at other learning rates lack, as weights of residual rows and last residual.

    At the present rate, u_i would be u_i + (rate_now - rate_i) r_i / rate_i, and each r_i / rate_i is the last one
    plus the differences (previous minus present) after it.

    >>> rate_change([3.0], [2.0, 1.0]), rate_change([3.0], [1.0, 1.0])
    (([-3.0], -3.0), ([0.0], 0.0))
    """
    now = rates[-1]
    if rates.count(now) == len(rates):
        return [0.0] * len(coefficients), 0.0
    g = [0.0, *reversed(coefficients), 0.0]
    lacking = [(now - rate) * (g[i + 1] - g[i]) for i, rate in enumerate(rates)]
    *totals, last = accumulate(lacking)
    return totals[::-1], last


class Gram:
    """Products of all rows of Z, by slot, over all ranks."""

    def __init__(self, size: int):
        self.size = size
        self.exact = False
        """Whether products are formed in float64 although rows are not."""
        self.matrix = [[0.0] * (2 * size + 1) for _ in range(2 * size + 1)]

    def update(self, history: History, ranks: Ranks, regularization: float) -> Problem:
        """Add the products of rows stored since the last update and solve the problem, with one result on all ranks.

        Products of long rows are formed in the type of the rows, which takes half the time of float64, as long as that
        is accurate enough: relative errors of 1e-6 change the least-squares residual by less than 1e-4, unless columns
        are nearly collinear or span r.
        """
        problem = self._updated(history, ranks, regularization)
        if history.exact or not problem.finite:
            return problem
        left = min(problem.solution.least_distance_sq / COLLINEAR, problem.gain**2 / FITTED)
        if left < 1 and not self.exact:
            self.exact, history.fresh = True, history.held
            return self._updated(history, ranks, regularization)
        if left > DISTINCT / COLLINEAR:
            self.exact = False
        return problem

    def _updated(self, history: History, ranks: Ranks, regularization: float) -> Problem:
        self.take_in(history, ranks)
        return self._problem(history.newest_first, history.rates, regularization)

    def take_in(self, history: History, ranks: Ranks) -> None:
        """Add the products of new rows, over all ranks; one small message."""
        wanted, own = history.new_products(self.exact)
        products = (ranks.sum(own) if ranks.size > 1 else own).tolist()
        others = wanted if own.shape[1] == len(wanted) else range(len(self.matrix))
        for i, row in zip(wanted, products, strict=True):
            for j, product in zip(others, row, strict=True):
                self.matrix[i][j] = self.matrix[j][i] = product

    def path(self, slots: list[int]) -> float:
        """Length of the path through the stored points."""
        first = self.size + 1
        return sum([sqrt(max(self.matrix[first + i][first + i], 0.0)) for i in slots])

    def _problem(self, slots: list[int], rates: list[float], regularization: float) -> Problem:
        matrix, size = self.matrix, self.size
        gram = [[matrix[i][j] for j in slots[: a + 1]] for a, i in enumerate(slots)]
        residual_sq, rhs = matrix[size][size], [matrix[i][size] for i in slots]
        posed = Problem(gram, rates[-1] * sqrt(residual_sq), self.path(slots), rates, slots, matrix, NO_SOLUTION)
        if posed.finite:
            posed.solution = solve(gram, rhs, regularization)
            posed.gain = sqrt(max(1 - posed.solution.fitted_sq / residual_sq, 0.0)) if residual_sq else 0.0
        return posed


def solve(gram: Sequence[Sequence[float]], rhs: Sequence[float], regularization: float) -> Coefficients:
    """Solve from the lower triangle of G = R'R, and b = R'r, by Cholesky factorization.

    In plain Python: at the usual ten columns this takes less time than a handful of tensor operations. Scaling the
    columns to unit length would change nothing but rounding: tolerance and regularization are relative to them.

    >>> solve([[4.0], [0.0, 1.0]], [8.0, 3.0], regularization=0.0)
    Coefficients(values=[2.0, 3.0], fitted_sq=25.0, rank=2, least_distance_sq=1.0)
    """
    kept: list[int] = []
    factor: list[list[float]] = []
    z: list[float] = []
    least = 1.0
    for i, column in enumerate(gram):
        row: list[float] = []
        for j, other in zip(kept, factor, strict=True):
            row.append((column[j] - sum(map(mul, row, other))) / other[-1])
        length_sq = column[i]
        distance_sq = length_sq - sum(map(mul, row, row))
        least = min(least, distance_sq / length_sq) if length_sq else 0.0
        if distance_sq > RANK_TOLERANCE * length_sq:
            pivot = sqrt(distance_sq + regularization * length_sq)
            z.append((rhs[i] - sum(map(mul, row, z))) / pivot)
            kept.append(i)
            factor.append([*row, pivot])
    values = [0.0] * len(gram)
    for i, value in zip(kept, _back_substitute(factor, z), strict=True):
        values[i] = value
    penalty = sum(g * g * column[i] for i, (g, column) in enumerate(zip(values, gram, strict=True)))
    return Coefficients(values, sum(map(mul, values, rhs)) + regularization * penalty, len(kept), least)


def _back_substitute(factor: list[list[float]], z: list[float]) -> list[float]:
    y = list(z)
    for i in reversed(range(len(y))):
        row = factor[i]
        value = y[i] = y[i] / row[i]
        for j in range(i):
            y[j] -= value * row[j]
    return y
