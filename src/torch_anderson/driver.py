"""What all drivers of the acceleration share: their memory for the parameters, where it lives, and telling of it."""

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from . import base_state, checkpoint
from .agreement import require_agreement
from .distributed import Ranks
from .evaluation import LossFn
from .layout import Layout, accelerated, look, refuse_sparse
from .options import Options
from .parameters import Views, write
from .safeguard import Decision
from .stats import Acceleration, Stats
from .storage import Storage

logger = logging.getLogger("torch_anderson")
Memory = TypeVar("Memory", bound=Views)


class Batch(NamedTuple):
    """What belongs to a batch, given with the step."""

    loss_fn: LossFn | None = None
    outputs: Callable[..., Any] | None = None


class Driver(ABC, Generic[Memory]):
    """All that ``Anderson`` knows beyond its base optimizer. ``accelerated_step`` is the algorithm."""

    points: tuple[str, ...]
    """Which of the vectors kept are weights, not differences of them."""

    def __init__(self, base: Optimizer, options: Options):
        self.base = base
        self.options = options
        self.storage = options.storage or Storage()
        self.ranks = Ranks(self.storage.process_group)
        self.stats = Stats()
        self.hooks: OrderedDict[int, Callable[[Acceleration], None]] = OrderedDict()
        self.enabled = True
        self.next_batch = Batch()
        self.blocks: list[Memory] = []
        self.k = 0  # base steps that changed parameters
        self.waiting: list[Tensor] | None = None  # parameters whose base state does not exist yet
        self._layout: Layout | None = None
        self._seen: list[Any] = []
        self.mark: Tensor | None = None  # what tells that entries in the base's state are the present ones
        self._told: set[str] = set()
        self.agreed = False  # with other ranks, on options and parameters

    @_disable_dynamo  # torch.compiler.disable, but without importing the compiler before it is needed
    def step(self, closure: Callable[[], Any] | None, batch: Batch) -> Any:
        """One base step, accelerated where it can change anything."""
        if not self.enabled:
            return self.base_step(closure, batch)[0]
        self._look_around()
        if not self.has_learning_rate():
            return self._idle_step(closure)
        if not self.agreed:
            self._agree()
        return self.accelerated_step(closure, batch)

    def _agree(self) -> None:
        """Compare with other ranks, once for the same parameters."""
        if self.ranks.size > 1:
            require_agreement(self.options, self.base.param_groups, self.ranks)
        self.agreed = True

    @abstractmethod
    def accelerated_step(self, closure: Callable[[], Any] | None, batch: Batch) -> Any:
        """One base step, then what the acceleration makes of it."""

    @abstractmethod
    def build_blocks(self) -> list[Memory]:
        """Empty memory for the parameters as they are now."""

    @abstractmethod
    def numbers(self, block: Memory) -> list[float]:
        """All that a checkpoint needs and that is not a vector, in as many numbers at any time."""

    @abstractmethod
    def set_numbers(self, block: Memory, numbers: Sequence[float]) -> None:
        """The inverse of ``numbers``."""

    @abstractmethod
    def cancel(self) -> None:
        """Drop what does not survive weights that come from elsewhere."""

    def base_step(self, closure: Callable[[], Any] | None, batch: Batch) -> tuple[Any, Batch]:
        """The base step, and what belongs to its batch: given with the step, or else ahead, for one step only.

        Ahead may be as late as in the closure, where some frameworks evaluate the model.
        """
        loss = self.base.step(closure)
        ahead, self.next_batch = self.next_batch, Batch()
        given = (ours if ours is not None else theirs for ours, theirs in zip(batch, ahead, strict=True))
        return loss, Batch(*given)

    def has_learning_rate(self) -> bool:
        """Whether a step can change anything."""
        return any(base_state.learning_rate(group) for group in self.base.param_groups)

    def _idle_step(self, closure: Callable[[], Any] | None) -> Any:
        """All learning rates are 0: how distributed checkpoints make an optimizer allocate its state."""
        loss, _ = self.base_step(closure, Batch())
        self._show()
        return loss

    def _moved(self, kept: bool) -> bool:
        """Whether the base step did anything (a cheap answer where the weights before it were not kept)."""
        if kept:
            return any(block.moved() for block in self.blocks)
        return any(p.grad is not None for group in self.base.param_groups for p in group["params"])

    def _refresh(self) -> None:
        for block in self.blocks:
            block.refresh()

    def _write(self, vectors: list[Tensor], everything: bool = False) -> None:
        write(self.blocks, vectors, everything)

    # ------------------------------------------------------------------------------------------------ telling

    def _skip(self, cause: str, describe: Callable[[], Acceleration] | None = None) -> bool:
        self.stats.counts[f"skipped_{cause}"] += 1
        if describe is not None:
            self._tell(describe)
        return False

    def _conclude(self, decision: Decision, describe: Callable[[], Acceleration]) -> None:
        self.stats.counts["accepted" if decision.accepted else f"rejected_{decision.cause}"] += 1
        resets = decision.accepted and self.options.on_accept == "reset_momentum"
        if resets and not base_state.reset_momentum(self.base):
            self.tell_once(f"on_accept='reset_momentum': {type(self.base).__name__} keeps no momentum that we know of")
        self._tell(describe)

    def tell_once(self, message: str, level: int = logging.INFO) -> None:
        """Log what is true of all steps."""
        if message not in self._told:
            self._told.add(message)
            logger.log(level, message)

    def _tell(self, describe: Callable[[], Acceleration]) -> None:
        """Tell of an acceleration; what nobody listens to is worked out when somebody asks."""
        self.stats.describe = describe
        if self.hooks or logger.isEnabledFor(logging.DEBUG):
            record = self.stats.latest
            assert record is not None
            logger.debug("%s", record)
            for hook in self.hooks.values():
                hook(record)

    # --------------------------------------------------------------------------------------------- lifecycle

    def reset_history(self) -> None:
        """Forget all that was measured, and what is under way; the weights stay."""
        self.cancel()
        self._forget()

    def _forget(self) -> None:
        for block in self.blocks:
            block.reset()
        self.stats.counts["restarts"] += 1

    def _look_around(self) -> None:
        """Before a step: are there gradients we cannot read, or parameters whose memory was never filled?"""
        if self.waiting is None:
            refuse_sparse(p for _, p in accelerated(self.base.param_groups))
            checkpoint.stand_still(self)

    def ensure_blocks(self) -> None:
        """(Re)build the blocks when parameters came, went, were frozen, moved, or got another state from outside.

        Memory of the same parameters is taken along; otherwise it starts anew.
        """
        seen = [self.ranks.size, *look(self.base.param_groups)]
        if seen == self._seen and (self.waiting is None or checkpoint.in_place(self)):
            return
        self._seen = seen
        known, now = self._layout, Layout.of(self.base.param_groups, self.ranks.size)
        if now == known and (self.waiting is None or checkpoint.in_place(self)):
            self._refresh()
            return
        if known is not None and now.members == known.members and now.places != known.places:
            self.publish()
        elif known is not None:
            self.reset_history()
            checkpoint.withdraw(self.base)
        self.blocks = self.build_blocks()
        self.ranks.home = self.blocks[0].device if self.blocks else None
        checkpoint.adopt(self)
        self._layout, self.waiting = now, None
        self.stats.history_bytes = sum(block.bytes for block in self.blocks)

    def start_over(self) -> None:
        """Begin again with what the base's state holds, after a checkpoint was loaded into it."""
        kept = self.hooks, self.enabled
        self.__init__(self.base, self.options)  # type: ignore[misc]
        self.hooks, self.enabled = kept
        self.begin()

    def begin(self) -> None:
        """Before the first step: take over what the base's state holds of ours, and be part of it at once if there
        is any state (Adagrad makes it when it is built), since tools look there for the names to load."""
        if self.base.state:
            self.ensure_blocks()
            self.publish()
            self.waiting = None

    def base_entries(self, param: Tensor) -> dict[str, Any]:
        """Of the base's state for a parameter, what has to be kept beside it."""
        return {}

    def take_base_entries(self, param: Tensor, saved: dict[str, Any]) -> None:
        """The inverse of ``base_entries``."""

    def publish(self, stepped: bool = False) -> None:
        """Bring the entries in the base's state up to date; ``stepped``: the base has just made a step."""
        self.waiting = checkpoint.publish(self, stepped)

    def _show(self) -> None:
        """Make the memory part of the base's state as soon as the base has made its own."""
        if self.waiting is None or any(p.grad is not None for p in self.waiting):
            self.ensure_blocks()
            self.publish(stepped=True)
