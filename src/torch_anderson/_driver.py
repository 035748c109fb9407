"""What both accelerators share: following the parameters, going in and out of checkpoints, reporting."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._calls import BaseStep
from ._ranks.ranks import world_size
from ._records import JumpRecord, Stats
from ._tensors import checkpoint
from ._tensors.blocks import Space
from ._tensors.checkpoint import Entries, Saved, Shapes
from ._tensors.members import account

logger = logging.getLogger("torch_anderson")

HOPELESS = 3
"""Gradients in a row that are not finite, after which a jump is undone."""


class Driver(ABC):
    """An accelerator's algorithm and memory. ``step`` reads like the algorithm."""

    kind: int
    """Number of the accelerator in checkpoints."""

    def __init__(self, base: Optimizer, options: Any, shard: bool = False):
        self.base = base
        self.options = options
        self.shard = shard
        self.stats = Stats()
        self.hooks: OrderedDict[int, Callable[[JumpRecord], None]] = OrderedDict()
        self.given: Any = None
        """What ``set_batch`` has given, until the step that it is for takes it."""
        self.space = Space([], options.process_group, shard)
        """The parameters that take part, as they were when last looked at; none at first."""
        self.resting = 0
        """Base steps still to rest: they are the base's own, and need not even look at the parameters."""
        self.entered = False
        self.agreed = False
        self.clears = "set_to_none" in signature(base.zero_grad).parameters
        """Whether the base can be told how to reset its gradients."""
        self._jumps_then = self._unused = 0
        """Jumps when gradients were last cleared with one pending; since then, gradients that were not finite."""
        self._told: set[str] = set()

    # --------------------------------------------------------------------------------- what an accelerator defines

    @abstractmethod
    def step(self, base_step: BaseStep) -> Any:
        """Make one base step, accelerated; the memory is that of the present parameters."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Base steps that changed parameters."""

    @abstractmethod
    def build(self, space: Space) -> None:
        """Allocate empty memory for the parameters as they are now."""

    @abstractmethod
    def saved(self) -> Saved:
        """Everything needed to go on bit by bit."""

    @abstractmethod
    def load_numbers(self, found: dict[Tensor, Entries]) -> None:
        """Take over everything in ``saved`` that is not a vector, from the entries of all parameters."""

    @abstractmethod
    def shapes(self) -> Shapes:
        """What is saved in the length of the parameters."""

    @abstractmethod
    def forget(self) -> None:
        """Forget all that was measured; the weights and counters stay."""

    @abstractmethod
    def cancel(self) -> None:
        """Drop what does not survive weights that come from elsewhere."""

    def count_rest(self) -> None:
        """Count a step at rest."""
        self.resting -= 1

    # ------------------------------------------------------------------------------------------ following parameters

    def look(self) -> None:
        """Rebuild the memory if the parameters have changed, as before every step."""
        if space := self.space.if_changed(self.base.param_groups):
            self.follow(space)

    def idle(self, base_step: BaseStep) -> Any:
        """Make a base step at rate 0: distributed checkpoints make an optimizer allocate its state this way."""
        loss, _ = base_step()
        if self.resting:
            self.count_rest()  # as a step at rest does that nobody looks at
        self.look()
        return loss

    def acted(self, version: int) -> bool:
        """Whether a base step did anything, without a look at the weights: it left gradients, or wrote to parameters.

        ``version`` is that of the parameters before it.
        """
        groups = self.base.param_groups
        return any(p.grad is not None for group in groups for p in group["params"]) or self.space.touched(version)

    @property
    def pending(self) -> bool:
        """Whether the weights are those of a jump on which the next gradient decides."""
        return False

    def take_back(self) -> None:  # noqa: B027  # not every accelerator has pending jumps
        """Undo a pending jump."""

    def gradients_cleared(self) -> None:
        """Undo a pending jump if several gradients in a row are not finite and led to no step.

        A gradient scaler skips such steps; one or two may be due to its scale, but at a bad point it would skip all
        later ones. Called when gradients are to be cleared; those of the first time after a jump are from before it.
        """
        if not self.pending:
            return
        jumps = self.stats.counts["attempted"]
        if jumps != self._jumps_then:
            self._jumps_then, self._unused = jumps, 0
        else:
            self._unused = 0 if self.finite_gradients() else self._unused + 1
            if self._unused == HOPELESS:
                self.take_back()

    def finite_gradients(self) -> bool:
        """Whether no gradient has a NaN or an infinity, on any rank; waits for the device."""
        found = [getattr(p.grad, "_local_tensor", p.grad) for p in self.space.params if p.grad is not None]
        bad = not all(bool(gradient.isfinite().all()) for gradient in found)
        return float(self.space.ranks.sum(torch.tensor(float(bad), dtype=torch.float64))) == 0

    def follow(self, space: Space) -> None:
        """Go on with parameters that came, went, were frozen or moved. The memory of the same ones is carried over."""
        if self.entered and set(map(id, space.params)) != set(map(id, self.space.params)):
            self.cancel()
        self.enter(space, self.entries())

    def agree(self, given: Any) -> None:
        """Compare notes with other ranks, once for the same parameters; ``given`` is what the step was given.

        The first time is before the first step, even if it measures nothing: ranks with other options would measure
        other steps, and would compare notes with whatever the first rank sends then.
        """
        if world_size(self.options.process_group) > 1:
            self.space.ranks.require_agreement(account(self.options, self.base.param_groups))
        self.agreed = True

    def enter(self, space: Space, found: dict[Tensor, Entries]) -> None:
        """Build the memory for a space and fill it with entries found for its parameters: the one way in.

        Unless the entries belong to exactly these parameters, the history starts empty.
        """
        kept = self.entered or bool(found)
        with torch.inference_mode(False), torch.no_grad():  # buffers made in inference mode could never be written
            self.space, self.entered, self.agreed = space, True, False
            self.build(space)
            if found:
                self.load_numbers(found)
            if not checkpoint.adopt(space, self.saved().vectors, found) and kept and self.steps:
                self.reset_history()
        self.stats.history_bytes = self.bytes()

    def bytes(self) -> int:
        """Memory kept in the length of the parameters."""
        return sum(part.nbytes for parts in self.saved().vectors.values() for part in parts)

    def check(self, found: dict[Tensor, Entries]) -> None:
        """Raise ValueError if entries from a checkpoint do not fit; nothing has changed then."""
        checkpoint.check(found, self.kind, self.shapes(), self.saved().numbers)
        if found:
            try:
                type(self)(self.base, self.options).load_numbers(found)  # without parameters: next to no memory
            except (ArithmeticError, LookupError, TypeError, ValueError) as problem:
                raise checkpoint.damaged(checkpoint.STATE, f"cannot be read ({problem})") from problem

    def entries(self, only: Tensor | None = None) -> dict[Tensor, Entries]:
        """What a checkpoint holds for each parameter, or for one of them; nothing before the first step."""
        return checkpoint.entries(self.space, self.saved(), only) if self.entered else {}

    def reset_history(self) -> None:
        """Forget all that was measured, and what is under way; the weights stay."""
        self.cancel()
        if self.entered:
            self.forget()

    def watch(self) -> None:  # noqa: B027  # not every accelerator has to
        """Notice from now on if somebody else writes to the weights."""

    # ----------------------------------------------------------------------------------------------------- reporting

    def record_skip(self, cause: str, record: JumpRecord | None = None) -> None:
        """Count a jump that was not attempted, and report it if anything was computed."""
        self.stats.counts[f"skipped_{cause}"] += 1
        if record is not None:
            self.report(record)

    def record_end(self, cause: str, record: JumpRecord) -> None:
        """Count and report the end of an attempt; ``cause`` is empty if the weights have jumped."""
        self.stats.counts[f"rejected_{cause}" if cause else "accepted"] += 1
        self.report(replace(record, cause=cause))

    def report(self, record: JumpRecord) -> None:
        """Keep a record, and hand it to hooks and log."""
        self.stats.latest = record
        logger.debug("%s", record)
        for hook in self.hooks.values():
            hook(record)

    def tell_once(self, message: str, level: int = logging.WARNING) -> None:
        """Log what is true of all steps."""
        if message not in self._told:
            self._told.add(message)
            logger.log(level, message)
