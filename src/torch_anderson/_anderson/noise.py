"""Whether pairs of weights and gradients say anything about the next gradient: not if they are noise, nor if the
function has changed, as it does where a batch is kept for many steps and then replaced.
"""

from .gradient_memory import GradientState
from .secants import Secants

RECENT, CERTAIN = 3, 6
"""Pairs that noise is judged by, and those it takes to be certain once there was noise."""
SUSPECT, NOISY = 0.25, 0.5
"""Asymmetry above which gradients are noise: after plain steps, and after jumps, whose length makes it larger."""
PROBATION = 6
"""Jumps that have to be accepted before noise is no longer suspected."""
CLEAR = 0.05
"""Asymmetry up to which gradients are no noise any more."""
DOUBTFUL = 0.15
"""Asymmetry above which gradients are noise if the newest is also ..."""
NEW = 0.5
"""... to this part outside the span of the older ones."""
CHANGED = 50.0
"""The function has changed if a gradient differs by so many times what curvature explains."""


def is_noise(state: GradientState, secants: Secants) -> bool:
    """Whether gradients change as noise does, not as a smooth loss lets them; jumps leave more room for doubt.

    Once there was noise, more pairs are asked: three are symmetric by chance in one of 10 to 100 cases.
    """
    if state.proven:
        return secants.asymmetry(RECENT) > NOISY
    if state.noisy:
        return secants.asymmetry(CERTAIN) > (CLEAR if len(secants.slots) >= CERTAIN else DOUBTFUL)
    asymmetry = secants.asymmetry(RECENT)
    return asymmetry > SUSPECT or (asymmetry > DOUBTFUL and secants.novelty() > NEW)


def has_changed(secants: Secants, tried: int) -> bool:
    """Whether the gradients of the last ``tried`` points, all on one short way, are those of another function.

    A jump that was shortened again and again ends near its beginning. If the function is the same, the gradient is
    then nearly that of the beginning.
    """
    newest, older = secants.slots[:tried], secants.slots[tried:]
    steepest = max((secants.stretch([i]) for i in older), default=0.0)
    return secants.stretch(newest) > CHANGED * steepest > 0
