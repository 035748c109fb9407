"""Times on assumed machines: bytes and flops divided by rates, and hops times a latency.

Launches of kernels and Python are left out, and nothing overlaps: the times of work on the device are lower bounds.
"""

from dataclasses import dataclass
from math import log2

from . import costs
from .costs import Layout, Setting, Shapes

GRADIENT = 4
"""Bytes of a number of the gradient when it is sent."""


@dataclass(frozen=True)
class Machine:
    """Assumed rates of one rank, in SI units; none was measured."""

    title: str
    bandwidth: float
    """Bytes per second that a rank sends."""
    latency: float
    """Seconds per hop."""
    memory: float
    """Bytes per second to and from the device memory."""
    training: float
    """Flops per second of training."""
    single: float
    """Flops per second of products in float32."""


MACHINES = {
    "older": Machine("V100, 6 per machine sharing 25 GB/s", 4e9, 5e-6, 8e11, 8e12, 7e12),
    "newer": Machine("H100, 50 GB/s each", 50e9, 5e-6, 2.5e12, 4e14, 3e13),
}


def all_reduce(size: float, ranks: int, machine: Machine) -> float:
    """Seconds for an all-reduce: bytes pass twice around a ring; the latency is that of a tree.

    >>> all_reduce(1e9, 1, MACHINES["newer"]), round(all_reduce(1e9, 2, MACHINES["newer"]), 6)
    (0.0, 0.02001)
    """
    return 2 * size * (ranks - 1) / ranks / machine.bandwidth + 2 * log2(ranks) * machine.latency


def all_gather(message: float, ranks: int, machine: Machine) -> float:
    """Seconds for an all-gather: the message of each rank passes once around a ring."""
    return (ranks - 1) * (message / machine.bandwidth + machine.latency) if message else 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of the fullest rank for an acceleration and the pairs before it."""

    work: float
    sum: float
    gather: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.work + self.sum + self.gather


def acceleration(shapes: Shapes, layout: Layout, ranks: int, setting: Setting, machine: Machine) -> Times:
    """Times of an accepted jump with ``safeguard=None``."""
    columns = costs.columns_multiplied(shapes, layout, ranks, ranks - 1 if layout.sharing(ranks) == 1 else 0)
    traffic = costs.memory_traffic(shapes, layout, ranks, setting)
    return Times(
        work=traffic / machine.memory + costs.product_flops(columns, setting) / machine.single,
        sum=all_reduce(costs.summed_bytes(setting), ranks, machine),
        gather=all_gather(costs.message_bytes(shapes, layout, ranks, setting), layout.sharing(ranks), machine),
    )


def gradients(count: int, layout: Layout, ranks: int, machine: Machine) -> float:
    """Seconds for the messages of a training step: an all-reduce of the gradients or, if parameters are sharded, two
    all-gathers of the parameters and a reduce-scatter."""
    size = GRADIENT * count
    if layout.whole:
        return all_reduce(size, ranks, machine)
    return 3 * all_gather(size / ranks, ranks, machine)
