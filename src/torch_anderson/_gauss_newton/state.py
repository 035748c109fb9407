"""The numbers that the driver, its directions and its control share, and a checkpoint keeps."""

from dataclasses import dataclass
from math import inf

PERIOD = 10
"""Fewest base steps between two jumps."""
HISTORY = 20
"""m, differences of stored points that are directions."""
FEWEST = 2
"""Differences before the first jump, and the fewest in use."""
FIRST_DAMPING = 1e-3
JUDGES = 6
"""Steps on whose samples a proposal must gain."""
UNKNOWN, FIXED, CHANGING = 0, 1, 2
"""Whether samples are the same at every step."""


@dataclass
class GaussNewtonState:
    """All numbers of a checkpoint, besides vectors and counters; in this order."""

    share: float
    """Share of all cost that jumps may take at present."""
    k: int = 0
    """Base steps that changed parameters."""
    since_jump: int = 0
    """Base steps since the last jump was tried."""
    suspicious: bool = True
    """Whether to check that outputs are repeatable."""
    stores: int = 0
    """Points stored so far; the first makes no difference yet."""
    jumps: int = 0
    """Accepted jumps kept as directions so far."""
    width: int = HISTORY
    """Differences in use."""
    damping: float = FIRST_DAMPING
    wait: int = PERIOD
    """Base steps until the next jump is tried."""
    jump_rate: float = 0.0
    """Gain of jumps for a unit of cost. Gains are falls of log(loss)."""
    base_rate: float = 0.0
    """Gain of a base step."""
    loss: float | None = None
    """The loss after the last jump that was tried."""
    gain: float = 0.0
    """Gain of the last jump."""
    cost: float = 0.0
    """Cost of the last jump, in gradients."""
    samples: int = UNKNOWN
    """Whether samples are the same at every step; if not, jumps are proposals that other samples decide on."""
    witness: float = inf
    """The loss of one step's samples, to be compared with that of the next step's samples at the same weights."""
    proposed: int = 0
    """Number of steps whose samples have yet to decide about a proposal."""

    def gauges(self) -> dict[str, float]:
        """The settings that the driver adapts, by name."""
        return {"share": self.share, "wait": self.wait, "damping": self.damping, "differences": self.width}
