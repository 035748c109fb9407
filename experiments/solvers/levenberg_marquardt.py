"""Levenberg-Marquardt of the package torch-levenberg-marquardt, which fits outputs of a module to targets."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import vmap

from torch_anderson import Term

from . import Case, Clock
from .traced import at_one_point, residual_of

PACKAGE = "torch_levenberg_marquardt"
SAMPLES = 1000
"""Points of each term that are drawn for a step."""


def levenberg_marquardt(clock: Clock, rate: float) -> None:
    """With its defaults but for the solver: QR takes several times as long as Cholesky."""
    from torch_levenberg_marquardt.training import LevenbergMarquardtModule

    residuals = Residuals(clock.case)
    fit = LevenbergMarquardtModule(residuals, solve_method="cholesky")
    while True:
        inputs = bundles(clock.case.terms)
        with torch.no_grad():
            targets = torch.zeros_like(residuals(inputs))
        _, loss, stopped, _ = fit.training_step(inputs, targets)
        if stopped:
            fit.reset()
        clock.tick(loss * targets.shape[1])


def bundles(terms: Mapping[str, Term]) -> dict[str, tuple[Tensor, ...]]:
    """Samples of all terms, equally many of each; fixed ones are repeated to the largest number of them."""
    fixed = [len(term.samples[0]) for term in terms.values() if isinstance(term.samples, tuple)]
    count = max(fixed, default=SAMPLES)
    return {name: drawn(term, count) for name, term in terms.items()}


def drawn(term: Term, count: int) -> tuple[Tensor, ...]:
    """So many samples of a term."""
    if callable(term.samples):
        found = term.samples(count)
        return found if isinstance(found, tuple) else (found,)
    assert isinstance(term.samples, tuple)
    return tuple(values[torch.arange(count) % len(values)] for values in term.samples)


class Residuals(nn.Module):
    """The residuals of all terms, one row for each bundle of one sample of each term."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.terms = case.model, case.terms

    def forward(self, samples: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
        """From bundles to residuals, whose mean sum of squares is the loss."""
        u = at_one_point(lambda arguments: self.model(*arguments))

        def bundle(some: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
            return torch.cat([residual_of(term, u)(*some[name]) for name, term in self.terms.items()])

        return vmap(bundle)(dict(samples))
