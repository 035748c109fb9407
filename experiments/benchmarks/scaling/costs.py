"""The cost of the paper's acceleration (``residual="step"``) on one of N ranks, on paper.

    n     numbers of the model                    m, p, q, t   as in ``Anderson``
    N     ranks                                   f            rows stored since the last acceleration
    c     numbers a rank keeps a history of       s            numbers of them that it multiplies

Assumed: all parameters have one type; there are more than 16,384 numbers (the rows of fewer are kept in float64); no
parameter is a scalar. Parameters are cut in rows of their first dimension, as torch.chunk does it. Columns of the
history are not nearly collinear: if they are, an acceleration forms all its products again in float64, and sends them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, lcm, prod
from typing import NamedTuple

Shapes = Sequence[tuple[int, ...]]
DOUBLE = 8
"""Bytes of a number in float64, in which products are added up."""
ALIGNMENT = 16
"""Alignment of parameters in a packed message, in bytes."""
WORKSPACE_COLUMNS = {"cpu": 1 << 15, "cuda": 1 << 19}
"""Largest number of columns converted to float64 at once."""
VECTORS = 4
"""Kept besides the rows: both ends of the pair that is being measured, last point, last residual."""


@dataclass(frozen=True)
class Setting:
    """m, p, q, t, and the bytes of a number: of vectors, and of the rows of the history."""

    history_size: int = 20
    period: int = 5
    store_period: int = 5
    average_window: int = 0
    itemsize: int = 4
    row_itemsize: int = 4

    @property
    def fresh(self) -> int:
        """f, the largest number of new rows; an accelerating step always stores.

        >>> Setting(period=5, store_period=5).fresh, Setting(period=10, store_period=1).fresh
        (1, 10)
        >>> Setting(period=5, store_period=2).fresh  # at 5; 6, 8 and 10; 12, 14 and 15
        3
        """
        p, q = self.period, self.store_period
        stored = (sum((start + i) % q == 0 or i == p for i in range(1, p + 1)) for start in range(0, lcm(p, q), p))
        return min(max(stored), self.history_size)

    @property
    def rows(self) -> int:
        """Number of rows that are multiplied: residual differences, the residual itself, point differences."""
        return 2 * self.history_size + 1

    @property
    def converted(self) -> bool:
        """Whether rows are converted to be multiplied: bfloat16 is only stored."""
        return self.row_itemsize != self.itemsize

    @property
    def products(self) -> int:
        """Products of all rows with the new ones.

        >>> Setting(history_size=20, period=5, store_period=5).products  # 41 rows with 3
        123
        """
        return self.rows * (2 * self.fresh + 1)


GROUP = 64
"""Largest number of ranks that share a history: with fewer rows than ranks, parameters have to be padded."""


def sharing_ranks(ranks: int) -> int:
    """Number of ranks that share a history: the largest divisor from 32 to 64, else all.

    >>> [sharing_ranks(ranks) for ranks in (4, 64, 96, 384, 1536, 97)]
    [4, 64, 48, 64, 64, 97]
    """
    parts = [part for part in range(GROUP // 2, GROUP + 1) if ranks % part == 0]
    return parts[-1] if parts and ranks > GROUP else ranks


class Layout(NamedTuple):
    """Placement of parameters and history on the ranks."""

    title: str
    sharing: Callable[[int], int]
    """Number of ranks, of N, that share one history."""
    whole: bool
    """Whether each rank has all parameters, so that a jump has to be gathered from the ranks that share the history."""


LAYOUTS = {
    "ddp": Layout("DDP", lambda ranks: 1, whole=True),
    "ddp-sharded": Layout("DDP, history sharded in groups of 64", sharing_ranks, whole=True),
    "ddp-sharded-by-all": Layout("DDP, history sharded over all", lambda ranks: ranks, whole=True),
    "fsdp2": Layout("FSDP2", lambda ranks: ranks, whole=False),
}


# --------------------------------------------------------------------------------------------------------- memory


def rows_of(length: int, ranks: int, rank: int) -> int:
    """Rows of a parameter that one rank has.

    >>> [rows_of(10, 4, rank) for rank in range(4)], [rows_of(5, 4, rank) for rank in range(4)]
    ([3, 3, 3, 1], [2, 2, 1, 0])
    """
    most = ceil(length / ranks)
    return max(min(most, length - most * rank), 0)


def numbers_kept(shapes: Shapes, sharing: int, rank: int = 0) -> int:
    """c, on a rank among those that share a history; the first has most.

    >>> numbers_kept([(10, 2), (5,)], sharing=4), numbers_kept([(10, 2), (5,)], sharing=4, rank=3)
    (8, 2)
    """
    return sum(rows_of(length, sharing, rank) * prod(rest) for length, *rest in shapes)


def bytes_a_number(setting: Setting) -> int:
    """Bytes kept for a number: two rows for each column of the history, the vectors, and the window of the average.

    >>> bytes_a_number(Setting(history_size=20)), bytes_a_number(Setting(history_size=5, row_itemsize=2))
    (176, 36)
    """
    return 2 * setting.history_size * setting.row_itemsize + (VECTORS + setting.average_window) * setting.itemsize


def kept_bytes(shapes: Shapes, layout: Layout, ranks: int, setting: Setting, rank: int = 0) -> int:
    """Bytes that a rank keeps from step to step."""
    sharing = layout.sharing(ranks)
    return numbers_kept(shapes, sharing, rank % sharing) * bytes_a_number(setting)


def workspace_bytes(columns: int, setting: Setting, device: str = "cuda") -> int:
    """Bytes of a chunk of all rows in float64, during an acceleration whose columns are nearly collinear."""
    return min(columns, WORKSPACE_COLUMNS[device]) * setting.rows * DOUBLE


# ------------------------------------------------------------------------------------------------------- messages


def summed_bytes(setting: Setting) -> int:
    """Bytes of the one all-reduce: products.

    >>> summed_bytes(Setting(history_size=20, period=5, store_period=5))
    984
    """
    return DOUBLE * setting.products


def message_bytes(shapes: Shapes, layout: Layout, ranks: int, setting: Setting) -> int:
    """Bytes that each rank gives to the all-gather of a jump, padded to the fullest rank.

    >>> message_bytes([(10, 2), (5,)], LAYOUTS["ddp-sharded"], 4, Setting())  # 3 x 2 and 2 numbers, in steps of 16
    48
    """
    sharing = layout.sharing(ranks)
    if not layout.whole or sharing == 1:
        return 0
    lengths = (rows_of(length, sharing, 0) * prod(rest) * setting.itemsize for length, *rest in shapes)
    return sum(ceil(length / ALIGNMENT) * ALIGNMENT for length in lengths)


def buffer_bytes(shapes: Shapes, layout: Layout, ranks: int, setting: Setting) -> int:
    """Bytes of the rank's own message and of those of all ranks that share a history, during the all-gather."""
    return (1 + layout.sharing(ranks)) * message_bytes(shapes, layout, ranks, setting)


def collectives(layout: Layout, ranks: int) -> int:
    """Number of collectives for an accepted jump with ``safeguard=None``."""
    return (ranks > 1) + (layout.whole and layout.sharing(ranks) > 1)


# ----------------------------------------------------------------------------------------------------- arithmetic


def columns_multiplied(shapes: Shapes, layout: Layout, ranks: int, rank: int = 0) -> int:
    """s: ranks that have the same columns share the work.

    >>> [columns_multiplied([(10, 1)], LAYOUTS["ddp"], 4, rank) for rank in range(4)]
    [2, 3, 2, 3]
    """
    sharing = layout.sharing(ranks)
    kept = numbers_kept(shapes, sharing, rank % sharing)
    copies, copy = ranks // sharing, rank // sharing
    return kept * (copy + 1) // copies - kept * copy // copies


def product_flops(columns: int, setting: Setting) -> int:
    """Flops of all products of an acceleration, in float32."""
    return 2 * columns * setting.products


def candidate_flops(kept: int, setting: Setting) -> int:
    """Flops of the combination of the rows, at a learning rate that does not change, in float32."""
    return 2 * kept * setting.history_size


STORING = 5
"""Operations on each number when a pair is stored."""


def store_flops(kept: int, setting: Setting) -> int:
    """Flops of all pairs between two accelerations."""
    return STORING * kept * setting.fresh


def memory_traffic(shapes: Shapes, layout: Layout, ranks: int, setting: Setting) -> int:
    """Bytes that the fullest rank reads and writes for an acceleration and the pairs before it.

    Products: rows are read; where they are converted, they are also written in float32 and read again. Candidate:
    point differences and the last point are read, and one vector is written. A pair: the weights are copied before and
    after it (4 vectors read or written), their difference is taken (3), and with it the difference of points (2), that
    of residuals (2) and the last residual (2) are formed; two rows are written. The write-back: all parameters are read
    and written.
    """
    item, row, kept = setting.itemsize, setting.row_itemsize, numbers_kept(shapes, layout.sharing(ranks))
    multiplied = columns_multiplied(shapes, layout, ranks, ranks - 1) * setting.rows
    products = multiplied * (row + 2 * item * setting.converted)
    candidate = kept * (setting.history_size * row + 2 * item)
    pairs = setting.fresh * kept * (13 * item + 2 * row)
    return products + candidate + pairs + 2 * buffer_bytes(shapes, layout, ranks, setting)
