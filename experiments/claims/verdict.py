"""Claims of the paper and verdicts on them, as the pages show them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Literal

from ..results import Run

Decision = Literal["reproduced", "not reproduced", "cannot be tested"]
INCONCLUSIVE = "Inconclusive: the intervals allow both the claim and its opposite."


@dataclass(frozen=True)
class Curve:
    """A small figure: lines by name, each a list of x and one of y."""

    title: str
    x_label: str
    y_label: str
    log_x: bool
    log_y: bool
    series: dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class Verdict:
    """A claim, whether the runs support it, and the numbers behind the verdict."""

    name: str
    source: str
    """Where the paper says it."""
    claim: str
    verdict: Decision
    numbers: str
    """What was measured and the rule that decides, or the command that makes the missing runs."""
    figure: Curve | None
    inconclusive: bool = False
    """Whether it is not reproduced because the intervals allow both; otherwise it is refuted."""

    @property
    def outcome(self) -> str:
        """The verdict, and whether it is inconclusive."""
        return f"{self.verdict} (inconclusive)" if self.inconclusive else self.verdict


@dataclass(frozen=True)
class Finding:
    """The result of testing a claim."""

    holds: bool | None
    """None where the intervals allow both."""
    numbers: str
    figure: Curve | None = None


class Missing(Exception):
    """Runs that a claim needs are missing; the message says which, and the command that makes them."""

    def __init__(self, why: str, *commands: str) -> None:
        super().__init__(f"{why} Run {' and '.join(f'`{command}`' for command in commands)}." if commands else why)


Test = Callable[[Sequence[Run]], Finding]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and a test whose docstring is the rule it decides by."""

    name: str
    source: str
    claim: str
    test: Test

    @property
    def rule(self) -> str:
        """The rule by which it counts as reproduced, in a sentence or two."""
        return " ".join((getdoc(self.test) or "").split())

    def judge(self, runs: Sequence[Run]) -> Verdict:
        """The verdict that these runs allow."""
        try:
            finding = self.test(runs)
        except Missing as missing:
            return Verdict(self.name, self.source, self.claim, "cannot be tested", str(missing), None)
        decision: Decision = "reproduced" if finding.holds else "not reproduced"
        is_open = finding.holds is None
        numbers = f"{INCONCLUSIVE + ' ' if is_open else ''}{finding.numbers} Rule: {self.rule}"
        return Verdict(self.name, self.source, self.claim, decision, numbers, finding.figure, is_open)


class Claims(list[Claim]):
    """A table of claims, to which a decorator adds tests."""

    def claim(self, name: str, source: str, text: str) -> Callable[[Test], Test]:
        """Add the decorated test to the table."""

        def enter(test: Test) -> Test:
            self.append(Claim(name, source, text, test))
            return test

        return enter
