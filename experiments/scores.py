"""The runs of a study by problem, method and learning rate, from which its pages take their numbers."""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

Record = Mapping[str, Any]
Rate = float | None
P = TypeVar("P")


class Records(Generic[P]):
    """All runs of a study on the given problems with the given methods, in the order of these tables."""

    def __init__(self, records: Iterable[Record], problems: Mapping[str, P], methods: Iterable[str]) -> None:
        self.records = [each for each in records if each["problem"] in problems]
        self.by_kind: dict[tuple[str, str], dict[Rate, list[Record]]] = {}
        for each in self.records:
            rates = self.by_kind.setdefault((each["problem"], each["method"]), {})
            rates.setdefault(each["rate"], []).append(each)
        with_runs = {problem for problem, _ in self.by_kind}
        self.problems = [problem for name, problem in problems.items() if name in with_runs]
        self._methods = list(methods)

    def methods(self, problem: str) -> list[str]:
        """The methods with runs on a problem."""
        return [name for name in self._methods if (problem, name) in self.by_kind]

    def rates(self, problem: str, method: str) -> list[Rate]:
        """The learning rates that there are runs with, ascending."""
        return sorted(self.by_kind.get((problem, method), {}), key=lambda rate: rate or 0.0)

    def runs(self, problem: str, method: str, rate: Rate = None) -> dict[int, Record]:
        """Seed -> run."""
        return {each["seed"]: each for each in self.by_kind.get((problem, method), {}).get(rate, [])}
