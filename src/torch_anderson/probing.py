"""Evaluating the model's outputs at any weights, and finding out where they cannot be used."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from .discrepancy import Discrepancy, Outputs, Unusable, read
from .distributed import Ranks

WROTE = "outputs changed the parameters; it must only evaluate the model"


class Probe:
    """The user's function at any weights: always with the same random numbers and buffers, and without a graph."""

    def __init__(
        self,
        outputs: Callable[..., Any],
        settings: Discrepancy,
        batches: int,
        params: Sequence[Tensor],
        rewind: Callable[[], None],
        ranks: Ranks,
    ):
        self._outputs = _on_batches(outputs, batches) if settings.most_batches > 1 else outputs
        self._loss, self._batches = settings.loss, batches
        self._params, self._rewind, self._ranks = params, rewind, ranks
        self._shape: tuple[Any, ...] | None = None
        self.eps = 0.0
        """The rounding unit of the outputs."""
        self.count = 0
        """Evaluations so far; one on several batches counts as often."""

    def __call__(self) -> Outputs:
        """The outputs at the present weights; raises ``Unusable``, on all ranks or on none.

        Ranks agree after every evaluation: the model may talk to other ranks in its forward pass, so that all of them
        have to make as many.
        """
        self.count += self._batches
        with agreeing(self._ranks):
            return self._evaluate()

    def _evaluate(self) -> Outputs:
        version = sum(p._version for p in self._params)
        found = self._outputs()
        self._rewind()
        if version != sum(p._version for p in self._params):
            raise Unusable("outputs_wrote", WROTE)
        outputs = read(self._loss, found)
        tensors = [found] if isinstance(found, Tensor) else found
        self.eps = max(torch.finfo(tensor.dtype).eps for tensor in tensors if not _counts(tensor))
        if self._shape not in (None, outputs.shape):
            raise Unusable("outputs_changed", "outputs returned tensors of another shape when called again")
        self._shape = outputs.shape
        return outputs


def _on_batches(outputs: Callable[..., Any], batches: int) -> Callable[[], Any]:
    try:
        signature(outputs).bind(batches)
    except TypeError:
        raise TypeError("With most_batches above 1, outputs is called with a number: outputs(batches).") from None
    except ValueError:
        pass  # not written in Python
    return partial(outputs, batches)


def _counts(tensor: Tensor) -> bool:
    """Whether it holds whole numbers, such as classes."""
    return not (tensor.is_floating_point() or tensor.is_complex())


@contextmanager
def agreeing(ranks: Ranks) -> Iterator[None]:
    """What one rank cannot use, none does: all of them raise an error, or none."""
    found: Exception | None = None
    try:
        yield
    except Exception as problem:
        found = problem
    worst = float(ranks.largest(torch.tensor(_severity(found))))
    if worst == _severity(found) and found is not None:
        raise found
    if worst:
        cause = "other_rank" if worst > NONFINITE else "nonfinite_outputs"
        raise Unusable(cause, "outputs could not be used on another rank")


NONFINITE, UNUSABLE = 1.0, 2.0
"""How bad it is: weights of which outputs are not finite are no better place, but others may be."""


def _severity(found: Exception | None) -> float:
    if found is None:
        return 0.0
    return NONFINITE if isinstance(found, Unusable) and found.cause == "nonfinite_outputs" else UNUSABLE
