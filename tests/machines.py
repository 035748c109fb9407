"""The state machine of random sequences: events that are followed by steps, and a count of what happened."""

import os
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from training import counts

RULES = 20
"""The most rules of one sequence."""


def event(least: int = 0, **strategies: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """A rule that is followed by some steps, since what it has broken shows in them.

    At least one where a checkpoint is loaded: weights that are written before the next step belong to it.
    """

    def decorate(method: Callable) -> Callable:
        @rule(then=st.integers(least, 4), **strategies)
        @wraps(method)
        def followed_by_steps(self: "Machine", then: int, **drawn: Any) -> None:
            method(self, **drawn)
            self.sound()
            self.go_on(then)

        return followed_by_steps

    return decorate


class Machine(RuleBasedStateMachine):
    """Adds up what happened in all sequences of a kind; has its events followed by steps."""

    told: ClassVar[Counter]

    go_on: Callable[[int], None]
    """Defined by each machine: make steps ..."""
    sound: Callable[[], None]
    """... and check that everything is in order."""

    def tell(self, optimizer: Any) -> None:
        """At the end of a sequence."""
        self.told["sequences"] += 1
        self.told.update({name: int(count) for name, count in counts(optimizer).items()})

    def __init_subclass__(cls) -> None:
        cls.told = Counter()

    @classmethod
    def run(cls, sequences: int) -> None:
        """Run so many sequences and print what happened in them."""
        repeatable = "SEQUENCES" not in os.environ
        chosen = settings(
            max_examples=sequences,
            stateful_step_count=RULES,
            derandomize=repeatable,
            print_blob=not repeatable,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        run_state_machine_as_test(cls, settings=chosen)
        print(cls.__name__, dict(cls.told))
