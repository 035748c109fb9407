"""Evaluating the model's outputs at any weights, and finding out where they cannot be used."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .discrepancy import Outputs, Unusable, read
from .distributed import mean_over_ranks

WROTE = "outputs changed the parameters; it must only evaluate the model"


class Probe:
    """The user's function at any weights: always with the same random numbers and buffers, and without a graph."""

    def __init__(self, outputs: Callable[[], Any], loss: Any, params: Sequence[Tensor], rewind: Callable[[], None]):
        self._outputs, self._loss, self._params, self._rewind = outputs, loss, params, rewind
        self._shape: tuple[Any, ...] | None = None
        self.half = False
        """Whether outputs come in half precision."""
        self.count = 0

    def __call__(self) -> Outputs:
        """The outputs at the present weights; raises ``Unusable``, on all ranks or on none.

        Ranks agree after every evaluation: the model may talk to other ranks in its forward pass, so that all of them
        have to make as many.
        """
        self.count += 1
        with agreeing():
            return self._evaluate()

    def _evaluate(self) -> Outputs:
        version = sum(p._version for p in self._params)
        found = self._outputs()
        self._rewind()
        if version != sum(p._version for p in self._params):
            raise Unusable("outputs_wrote", WROTE)
        outputs = read(self._loss, found)
        first = found if isinstance(found, Tensor) else found[0]
        self.half = first.dtype in (torch.float16, torch.bfloat16)
        if self._shape not in (None, outputs.shape):
            raise Unusable("outputs_changed", "outputs returned tensors of another shape when called again")
        self._shape = outputs.shape
        return outputs


@contextmanager
def agreeing() -> Iterator[None]:
    """What one rank cannot use, none does: all of them raise ``Unusable``, or none."""
    found: Unusable | None = None
    try:
        yield
    except Unusable as problem:
        found = problem
    if float(mean_over_ranks(torch.tensor(float(found is not None)))):
        raise found or Unusable("other_rank", "outputs could not be used on another rank")
