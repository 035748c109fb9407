"""Gradients of a run: counted, and limited.

Methods need no counting code, and no method can exceed its allowance.
"""

import math
import time
from typing import Any

import torch
from torch import Tensor


class Spent(Exception):
    """The allowed number of gradients is used up, or the loss is not finite."""


class Meter:
    """Computes the losses and gradients of a case for a method, and keeps count.

    A case has ``parameters``, and a ``loss`` of some rows of its data or of all of them (None).
    """

    def __init__(self, case: Any, allowed: int) -> None:
        self.case, self.allowed = case, allowed
        self.losses: list[float] = []
        """At the weights of each gradient."""
        self.seconds: list[float] = []
        """Processor time from the start until the loss of each gradient was known."""
        self.forward = 0
        """Losses that were computed without a gradient."""
        self.optimizer: Any = None
        """The method's optimizer, for its counters; set by the method."""
        self.started = time.process_time()

    def gradient(self) -> Tensor:
        """Compute the loss and leave its gradient in the parameters; raises ``Spent``."""
        if len(self.losses) == self.allowed:
            raise Spent
        for parameter in self.case.parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss: Tensor = self.case.loss(None)
            loss.backward()
        self.losses.append(loss.item())
        self.seconds.append(time.process_time() - self.started)
        if not math.isfinite(self.losses[-1]):
            raise Spent
        return loss.detach()

    def closure(self) -> Tensor:
        """As optimizers call it: with a gradient, unless gradients are disabled."""
        if torch.is_grad_enabled():
            return self.gradient()
        self.forward += 1
        loss: Tensor = self.case.loss(None)
        return loss
