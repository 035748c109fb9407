"""The paper's claims, each with a verdict that is computed from runs on disk.

Every claim is a function of the runs: it picks those it needs, compares over seeds with 95 % intervals, and decides by
the rule in its docstring, which is shown with the numbers. If runs are missing, it names the command that makes them.
"""

from collections.abc import Sequence

from ..results import Run
from . import averaging, cost, figures, mechanisms
from .verdict import Claim, Curve, Verdict

__all__ = ["CLAIMS", "Claim", "Curve", "Verdict", "verdicts"]

CLAIMS = (*figures.CLAIMS, *mechanisms.CLAIMS, *averaging.CLAIMS, *cost.CLAIMS)
"""All claims, in the order in which they are shown."""


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """A verdict on each claim from these runs; no claim is left out."""
    return [claim.judge(runs) for claim in CLAIMS]
