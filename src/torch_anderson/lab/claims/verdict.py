"""What a claim is, and what a verdict on it: how the pages see them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Literal

from ..results import Run

Outcome = Literal["reproduced", "not reproduced", "cannot be tested"]


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
    """A claim, whether the runs bear it out, and the numbers that say so."""

    name: str
    source: str
    """Where the paper says it."""
    claim: str
    verdict: Outcome
    numbers: str
    """What was measured and by which rule it was judged, or what to run."""
    figure: Curve | None


@dataclass(frozen=True)
class Finding:
    """What the test of a claim found."""

    holds: bool
    numbers: str
    figure: Curve | None = None


class Missing(Exception):
    """There are not the runs that a claim needs; the message says which, and the command that makes them."""

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
        """When it counts as reproduced, in a sentence or two."""
        return " ".join((getdoc(self.test) or "").split())

    def judge(self, runs: Sequence[Run]) -> Verdict:
        """The verdict that these runs allow."""
        try:
            finding = self.test(runs)
        except Missing as missing:
            return Verdict(self.name, self.source, self.claim, "cannot be tested", str(missing), None)
        outcome: Outcome = "reproduced" if finding.holds else "not reproduced"
        numbers = f"{finding.numbers} Rule: {self.rule}"
        return Verdict(self.name, self.source, self.claim, outcome, numbers, finding.figure)


class Claims(list[Claim]):
    """A table of claims, to which tests enter themselves."""

    def claim(self, name: str, source: str, text: str) -> Callable[[Test], Test]:
        """Put the test below into the table."""

        def enter(test: Test) -> Test:
            self.append(Claim(name, source, text, test))
            return test

        return enter
