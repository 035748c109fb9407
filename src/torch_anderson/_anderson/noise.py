"""Whether pairs of weights and gradients say anything about the next gradient: not if they are noise, nor if the
function has changed, as it does where a batch is kept for many steps and then replaced.
"""

from typing import Protocol

from .quasi_newton import Secants

RECENT, CERTAIN = 3, 6
"""Differences by which noise is judged: usually, and after repeated noise."""
SUSPECT, NOISY = 0.25, 0.5
"""Asymmetry above which gradients are noise: after plain steps, and after jumps, whose length makes it larger."""
PROBATION = 6
"""Jumps that have to be accepted before noise is suspected only where jumps are refused."""
CLEAR = 0.05
"""Asymmetry of ``CERTAIN`` pairs up to which gradients no longer count as noise."""
DOUBTFUL = 0.15
"""Asymmetry above which gradients are noise if the newest difference also ..."""
NEW = 0.5
"""... lies outside the span of the older ones by more than this part of its length."""
FEWEST, STEEPENS = 3, 2.0
"""After many accepted jumps, gradients are noise if at least so many points on one line show it, and the curvature up
to the nearest is this many times that up to the one before."""
CHANGED = 50.0
"""The function has changed if a gradient differs by so many times what curvature explains."""


class Record(Protocol):
    """What is known of earlier jumps."""

    proven: int
    noisy: bool


def is_noise(state: Record, secants: Secants) -> bool:
    """Whether gradients change as noise does, not as those of a smooth loss; after accepted jumps the limit is higher.

    After repeated noise, more differences are needed: three are symmetric by chance in one of 10 to 100 cases.
    """
    if state.proven:
        return secants.asymmetry(RECENT) > NOISY
    if state.noisy:
        return secants.asymmetry(CERTAIN) > (CLEAR if len(secants.slots) >= CERTAIN else DOUBTFUL)
    asymmetry = secants.asymmetry(RECENT)
    return asymmetry > SUSPECT or (asymmetry > DOUBTFUL and secants.novelty() > NEW)


def is_late_noise(secants: Secants, tried: int) -> bool:
    """Whether gradients are noise although many jumps were accepted, by the last ``tried`` points on one line.

    Each of these points is nearer to the beginning of the line than the one before it. For a smooth loss the curvature
    up to there hardly grows; under noise the difference of gradients stays as large while the distance shrinks. Two
    points are not enough, since it grows between them in strongly curved valleys too.
    """
    newest, longer = secants.slots[:tried], secants.slots[1:tried]
    steepens = tried >= FEWEST and secants.stretch(newest) > STEEPENS * secants.stretch(longer)
    return steepens and secants.asymmetry(len(secants.slots)) > NOISY


def has_changed(secants: Secants, tried: int) -> bool:
    """Whether the gradients of the last ``tried`` points, all on one short line, are those of another function.

    A jump that was shortened again and again ends near its beginning. If the function is the same, the gradient is
    then nearly that of the beginning.
    """
    newest, older = secants.slots[:tried], secants.slots[tried:]
    steepest = max((secants.stretch([i]) for i in older), default=0.0)
    return secants.stretch(newest) > CHANGED * steepest > 0
