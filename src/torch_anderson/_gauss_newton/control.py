"""What the driver adapts: damping, by how well predictions hold, and the wait, by what jumps cost and gain.

Costs are counted in gradients, never in seconds: reruns make the same decisions, and so do all ranks.
"""

from math import ceil, inf, log

from .solve import LinearModel, Move
from .state import FEWEST, HISTORY, PERIOD, GaussNewtonState

LEAST_DAMPING, MOST_DAMPING = 1e-12, 1e8
GOOD, POOR = 0.75, 0.25
"""Shares of the promised decrease from which damping falls, and below which it grows."""

ENOUGH = 0.9
"""Share of the promised fall that the newer half of the differences must promise to be used alone ..."""
SCARCE = 0.7
"""... and below which more of them are used."""

SMOOTHING = 0.85
"""Smoothing of rates from one jump to the next."""
MORE, LESS = 1.25, 1.5
"""The share of jumps in the cost grows and shrinks by these factors ..."""
MOST, LEAST_SHARE = 2.0, 0.02
"""... up to this many budgets, down to this share."""


def judge(state: GaussNewtonState, model: LinearModel, move: Move, loss: float) -> str:
    """Why not to keep a jump; empty if the loss falls. Damping follows how well the promise was kept."""
    state.damping = next_damping(move.damping, model.loss - move.promised, model.loss - loss)
    return "" if loss < model.loss else "loss"


def next_damping(damping: float, promised: float, fall: float) -> float:
    """Less damping after a fall of the loss as promised, more after a poorer one, much more after none."""
    if not fall > 0:
        return min(damping * 10, MOST_DAMPING)
    ratio = fall / promised if promised > 0 else 0.0
    if ratio > GOOD:
        return max(damping / 5, LEAST_DAMPING)
    return min(damping * 3, MOST_DAMPING) if ratio < POOR else damping


def adapt_width(state: GaussNewtonState, model: LinearModel) -> None:
    """Use half of the differences if the newer half promises nearly as much, twice as many if far less."""
    newer = len(model.ages) // 2
    fewer = [i for i in range(len(model.columns)) if i not in model.ages[newer:]]
    part = model.promised_fall(state.damping, fewer) / max(model.promised_fall(state.damping), 1e-300)
    if part >= ENOUGH:
        state.width = max(newer, FEWEST)
    elif part < SCARCE:
        state.width = min(state.width * 2, HISTORY)


def book(state: GaussNewtonState, budget: float, cost: float, before: float, after: float) -> None:
    """Enter a jump that led from a loss to another, and decide how long to wait for the next one.

    The last jump is booked with it: what was lost in between is taken from its gain, since it had fitted the noise of
    its batch, or the base undid it. The share grows while jumps gain more than base steps for their cost.
    """
    if state.loss is not None:
        since = fall(state.loss, before)
        state.jump_rate += (1 - SMOOTHING) * ((state.gain + min(since, 0.0)) / state.cost - state.jump_rate)
        state.base_rate += (1 - SMOOTHING) * (max(since, 0.0) / max(state.since_jump, 1) - state.base_rate)
    state.loss, state.gain, state.cost = after, fall(before, after), cost
    pays = state.gain > 0 and state.jump_rate >= state.base_rate
    plan(state, min(state.share * MORE, MOST * budget, 0.9) if pays else max(state.share / LESS, LEAST_SHARE))


def plan(state: GaussNewtonState, share: float) -> None:
    """Choose how long to wait such that jumps take this share of all cost."""
    state.share = share
    state.wait = max(PERIOD, ceil(state.cost * (1 - share) / share))


def judge_proposal(state: GaussNewtonState, budget: float, before: float, after: float) -> bool:
    """Whether to make a jump that changes the loss of samples it has not fitted; it was booked without gain.

    On the samples of several steps it must gain more than base steps for its cost. Shares grow as for jumps that are
    made at once, and fall by more.
    """
    state.gain = fall(before, after) if after < inf else -1.0
    gains = state.gain > state.base_rate * state.cost
    state.proposed = state.proposed - 1 if gains else 0
    if not gains:
        plan(state, max(state.share / LESS, LEAST_SHARE))
    elif not state.proposed:
        state.loss = after
        plan(state, min(state.share * LESS * MORE, MOST * budget, 0.9))
    return gains and not state.proposed


def postpone(state: GaussNewtonState) -> None:
    """Wait longer after a jump that could not be tried, and forget the loss before it."""
    state.loss, state.suspicious = None, True
    state.wait = min(2 * state.wait, ceil(PERIOD / LEAST_SHARE))


def fall(before: float, after: float) -> float:
    """The fall of log(loss); relative to the larger of both where a loss is not positive.

    >>> fall(4.0, 4.0), fall(-1.0, -2.0), fall(0.0, 0.0)
    (0.0, 0.5, 0.0)
    """
    if before > 0 and after > 0:
        return log(before / after)
    return (before - after) / (max(abs(before), abs(after)) or 1.0)
