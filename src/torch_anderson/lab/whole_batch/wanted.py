"""The target numbers, compared with the measured ones."""

from collections.abc import Iterator, Sequence
from math import inf, isfinite

from ..page import Cell, Table, number
from .methods import LABELS
from .problems import BASES, PROBLEMS, Problem
from .scores import LBFGS, Record, Scores, mean_count, shown


def wanted_table(scores: Scores, endings: Sequence[Record]) -> Table:
    """What was wanted, and what came out."""
    rows = [*single_problems(scores), *family(scores), *noise_that_ends(endings)]
    headers = ["what", "measured", "worst", "reach", "aim"]
    return Table(headers, [[Cell(each) for each in row] for row in rows])


def single_problems(scores: Scores) -> Iterator[list[str]]:
    """Gradients on three problems, for each base."""
    goals = {
        "least-squares": dict.fromkeys(BASES, ("25", "15")),
        "softmax": {"sgd": ("20", "14"), "nesterov": ("25", "14"), "adam": ("60", "25")},
        "mlp": {"sgd": ("70", "50"), "nesterov": ("75", "50"), "adam": ("200", "80")},
    }
    for problem, by_base in goals.items():
        for base, (reach, aim) in by_base.items():
            means, worst = at_rates(scores, PROBLEMS[problem], f"anderson-{base}")
            title = f"{PROBLEMS[problem].title}, Anderson({LABELS[base]}): gradients, mean at the worst rate"
            yield [title, shown(round(max(means), 1)) if means else "–", shown(worst), reach, aim]


def at_rates(scores: Scores, problem: Problem, method: str) -> tuple[list[float], float]:
    """Geometric mean over seeds at each rate, infinite where a seed fails; and the worst run."""
    counts = [scores.counts(problem.name, method, rate) for rate in scores.rates(problem.name, method)]
    means = [inf if inf in each.values() else mean_count(each, inf) for each in counts]
    return means, max((count for each in counts for count in each.values()), default=inf)


def family(scores: Scores) -> Iterator[list[str]]:
    """Ratios over all problems, and over those that nothing was tuned on."""
    fresh = [problem for problem in scores.problems if problem.held_out]
    first_order = "over the best first-order method at its best rate"
    for name, problems in (("the family", scores.problems), ("held-out problems", fresh)):
        yield against(scores, f"{name}, {first_order}", BASES, problems, "0.5", "0.25")
        yield against(scores, f"{name}, over L-BFGS", LBFGS, problems, "2.5", "1.3")
    for measure, words in (("loss", "loss at the end"), ("gradients", "gradients")):
        yield over_base(scores, f"the family, {words} over the base at the same rate", measure)


def against(
    scores: Scores, title: str, others: Sequence[str], problems: Sequence[Problem], reach: str, aim: str
) -> list[str]:
    """Gradients over those of other methods."""
    found = scores.over_best(others, problems)
    remark = f" ({found.pairs} pairs; ours failed in {found.failed}, both in {found.left_out})"
    return [f"{title}: gradients", number(found.mean) + remark, number(found.worst), reach, aim]


def over_base(scores: Scores, title: str, measure: str) -> list[str]:
    """The worst pair of all, and where it is."""
    found = scores.over_base(scores.problems, measure)
    if not found:
        return [title, "–", "–", "1.03", "1.0"]
    worst = max(found, key=lambda name: found[name])
    above = sum(value > 1.03 for value in found.values())
    return [title, f"{above} of {len(found)} pairs above 1.03", f"{number(found[worst])} ({worst})", "1.03", "1.0"]


def noise_that_ends(endings: Sequence[Record]) -> Iterator[list[str]]:
    """Steps to the first jump."""
    if not endings:
        return
    first = [each["first"] if each["first"] is not None else inf for each in endings]
    within = sum(each <= 40 for each in first)
    title = "noise that ends (batch 64, then whole): steps to the first jump"
    worst = str(max(first)) if isfinite(max(first)) else "none"
    yield [title, f"within 40 in {within} of {len(first)}", worst, "40", "15"]
