"""``Objective``: a loss as means over samples, and a closure for any optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._ranks.ranks import Ranks
from .retained import Retained
from .term import ADVICE, Samples, Term, at_point, checked_samples


class Objective:
    """A loss made of residuals, and a closure for any optimizer of PyTorch.

    The loss is the sum over terms of weight times the mean over samples of the sum of squared residuals, or of the
    term's own loss. When called, the objective draws samples, computes the loss and its gradients, which replace
    earlier ones of the model and of other tensors in the loss, and returns the loss.

    ``objective(name=batch)`` is a closure for these samples, e.g. from a data loader; other terms draw theirs.
    ``objective.draw()`` is a closure for samples that are drawn once and kept. Optimizers that compare losses of
    several calls in one step, such as LBFGS with a line search, need it: ``optimizer.step(objective.draw())``.
    ``GaussNewton.step(objective)`` does this itself.

    With tangent jumps, or with ``Term(..., retain=True)``, samples whose residual was above their term's mean stay for
    the next evaluation, and only the others are drawn anew (Daw et al. 2023): uniform samples rarely meet a shock or a
    layer. A checkpoint then needs ``objective.state_dict()`` besides those of the model and the optimizer.

    Args:
        model: a module. ``u(point)`` calls it with a batch of one and drops that dimension; a single output is
            returned as a scalar. ``objective.u`` is that function.
        terms: at least one ``Term``, by name.

    >>> import torch
    >>> from torch.func import grad
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> def decay(u, t):
    ...     return grad(u)(t).sum() + u(t)
    >>> objective = Objective(
    ...     model,
    ...     interior=Term(decay, lambda count: torch.rand(count, 1), count=100),
    ...     start=Term(lambda u, t, value: u(t) - value, (torch.zeros(1, 1), torch.ones(1)), weight=10.0),
    ... )
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> bool(optimizer.step(objective) > 0)
    True
    """

    def __init__(self, model: nn.Module, **terms: Term):
        if not isinstance(model, nn.Module):
            raise TypeError(f"Invalid model: {type(model).__name__}. Allowed: a torch.nn.Module.")
        if not terms:
            raise ValueError("Invalid terms: none. Allowed: at least one, e.g. Objective(model, interior=Term(...)).")
        for name, term in terms.items():
            if not isinstance(term, Term):
                raise TypeError(f"Invalid term {name!r}: {type(term).__name__}. Allowed: a torch_anderson.Term.")
        self.model = model
        self.terms = terms
        self.checked: dict[str, Term] = {}
        """Terms whose residuals were found to be finite and to depend on the weights."""
        self.outside: list[Tensor] = []
        """Trained tensors that the loss depends on but that are not the model's: their gradients are zeroed too."""
        self.retained: dict[str, Retained] = {}
        """Samples of the last evaluation, by the names of terms."""

    def __call__(self, **samples: Any) -> Any:
        """Zero the gradients, draw samples, compute the loss and its gradient; or make a closure for given samples."""
        return self.bind(**samples) if samples else self.bind()()

    def bind(self, **given: Any) -> Closure:
        """Make a closure for samples given by the names of terms; others are drawn when it is first called."""
        for name in given:
            if name not in self.terms:
                raise TypeError(f"Invalid term {name!r}. Allowed: {', '.join(map(repr, self.terms))}.")
        return Closure(self, {name: checked_samples(f"samples of {name!r}", x) for name, x in given.items()})

    def draw(self, **given: Any) -> Closure:
        """Make a closure for samples that stay: those given by the names of terms, others drawn now."""
        closure = self.bind(**given)
        closure.draw()
        return closure

    def u(self, *point: Tensor) -> Tensor:
        """The model at one point."""
        return at_point(self.module, *point)

    @property
    def module(self) -> nn.Module:
        """The model without the wrapper that trains it on several ranks."""
        return self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model

    def fresh(self, name: str) -> Samples:
        """The samples of a term for a gradient; retained ones are among them if that was asked for."""
        term = self.terms[name]
        return self.drawn(name) if term.retain else term.draw(name)

    def drawn(self, name: str, count: int | None = None) -> Samples:
        """New samples of a term, among which those with large residuals stay."""
        term, kept = self.terms[name], self.retained.get(name)
        samples = term.draw(name, count)
        if term.fixed or kept is None or not term.stays or not kept.fits(samples):
            return samples
        return kept.renew(samples)

    def examples(self, counts: Mapping[str, int]) -> dict[str, Samples]:
        """Samples to look at once: retained ones where there are any; no random numbers are used up.

        So a resumed run draws as an uninterrupted one.
        """
        kept = {name: kept.samples for name, kept in self.retained.items() if kept.term is self.terms.get(name)}
        with torch.random.fork_rng(devices=[]):
            return {name: kept.get(name) or term.draw(name, counts[name]) for name, term in self.terms.items()}

    def population(self, counts: Mapping[str, int]) -> dict[str, Samples]:
        """Samples of all terms in random order."""
        found = {}
        for name in self.terms:
            samples = self.drawn(name, counts[name])
            order = torch.randperm(len(samples[0])).to(samples[0].device)
            found[name] = tuple(x[order] for x in samples)
        return found

    def retain(self, samples: Mapping[str, Samples], sizes: Mapping[str, Tensor]) -> None:
        """Remember samples of ``population`` that were drawn, and sizes of their residuals."""
        drawn = [name for name, term in self.terms.items() if not term.fixed]
        self.retained = {name: Retained(self.terms[name], samples[name], sizes[name]) for name in drawn}

    def state_dict(self) -> dict[str, Any]:
        """The retained samples: with the states of model and optimizer, all that a run needs to resume.

        The samplers' random numbers are the caller's: save ``torch.get_rng_state()`` or the generators in use.
        """
        return {"retained": {name: kept.state_dict() for name, kept in self.retained.items() if name in self.terms}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the retained samples from a checkpoint; one that does not fit raises and changes nothing."""
        kept = state_dict.get("retained")
        if not isinstance(kept, dict):
            raise ValueError("Invalid state_dict: it has no 'retained'. Allowed: what objective.state_dict() returned.")
        if unknown := set(kept) - set(self.terms):
            raise ValueError(f"The checkpoint is of another objective: it has terms {sorted(unknown)}.")
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.retained = {name: _loaded(name, self.terms[name], found, device) for name, found in kept.items()}


def _loaded(name: str, term: Term, found: Any, device: torch.device) -> Retained:
    """Undo ``Retained.state_dict``; the tensors may have been saved on another device."""
    if not isinstance(found, dict) or not {"samples", "sizes"} <= found.keys():
        raise ValueError(f"The checkpoint is damaged: the retained samples of {name!r} are incomplete.")
    samples = checked_samples(f"retained samples of {name!r}", tuple(found["samples"]), len(found["sizes"]))
    return Retained(term, tuple(x.to(device) for x in samples), found["sizes"].to(device))


class Closure:
    """An objective on samples that stay: a closure for any optimizer."""

    def __init__(self, objective: Objective, given: Mapping[str, Samples]):
        self.objective = objective
        self.given = given
        self.ranks: Ranks | None = None
        """The ranks that average their gradients; None: those of ``DistributedDataParallel``, if that is the model."""
        self._drawn: dict[str, Samples] | None = None

    @property
    def bound(self) -> dict[str, Samples]:
        """The samples that are known by now."""
        return {**self.given, **(self._drawn or {})}

    def draw(self) -> Mapping[str, Samples]:
        """The samples of all terms; those that were not given are drawn once."""
        if self._drawn is None:
            objective = self.objective
            self._drawn = {name: objective.fresh(name) for name in objective.terms if name not in self.given}
        return self.bound

    def __call__(self) -> Tensor:
        """Compute the loss and its gradient, which replaces earlier ones; returns the loss."""
        self.objective.model.zero_grad()
        with torch.enable_grad():
            loss = self.loss()
            for tensor in self.objective.outside:
                tensor.grad = None
            loss.backward()
        return self._averaged(loss.detach())

    def _averaged(self, loss: Tensor) -> Tensor:
        """The mean of a loss over ranks; gradients are replaced by theirs, which are the same bits on all ranks.

        ``DistributedDataParallel`` cannot do it: residuals differentiate the model itself, within ``torch.func``.
        """
        model = self.objective.model
        wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        ranks = self.ranks or Ranks(model.process_group if wrapped else None)
        if ranks.size == 1 or not (self.ranks or wrapped):
            return loss
        leaves = [p for p in (*self.objective.module.parameters(), *self.objective.outside) if p.requires_grad]
        known = torch.tensor([float(p.grad is not None) for p in leaves], dtype=torch.float64, device="cpu")
        used = [p for p, count in zip(leaves, ranks.sum(known).tolist(), strict=True) if count]
        for kind in dict.fromkeys((p.device, p.dtype) for p in used):
            alike = [p for p in used if (p.device, p.dtype) == kind]
            mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
            means = ranks.mean(torch.cat([x.reshape(-1) for x in mine])).split([p.numel() for p in alike])
            for p, mean in zip(alike, means, strict=True):
                p.grad = mean.view(p.shape)
        return ranks.mean(loss)

    def loss(self) -> Tensor:
        """The loss, with its graph."""
        objective, samples = self.objective, self.draw()
        losses, known = [], objective.checked == objective.terms
        for name, term in objective.terms.items():
            found = self._evaluated(name)
            each = term.each(found)
            if not known:
                _check_first(name, found if term.loss is None else (found[0], each), objective.model)
            losses.append(term.weight * each.mean())
            if term.retain and not term.fixed and name not in self.given:
                objective.retained[name] = Retained(term, samples[name], each.detach().clamp_min(0).sqrt())
        loss = torch.stack([loss.to(losses[0].device) for loss in losses]).sum()
        if not known:
            objective.checked, objective.outside = dict(objective.terms), _leaves_outside(objective.model, loss)
        return loss

    def _evaluated(self, name: str) -> tuple[Tensor, ...]:
        """The residuals of a term at all samples."""
        objective, term = self.objective, self.objective.terms[name]

        def residual(*sample: Tensor) -> tuple[Tensor, ...]:
            return term.outputs(name, objective.module, sample)

        try:
            return torch.vmap(residual, randomness="different")(*self.draw()[name])  # type: ignore[no-any-return]
        except Exception as problem:
            problem.add_note(ADVICE.format(name=name))
            raise


def _check_first(name: str, found: tuple[Tensor, ...], model: nn.Module) -> None:
    """Raise for residuals or losses that are not finite from the start, or do not depend on the weights."""
    if not all(x.isfinite().all() for x in found):
        raise ValueError(
            f"The residual or loss of {name!r} is not finite at some sample of the first evaluation. Check its "
            "derivatives there: a square root or an absolute value has none at 0."
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError("An Objective has no gradient within torch.inference_mode(). Call step() outside of it.")
    trains = any(p.requires_grad for p in model.parameters())
    if trains and torch.is_grad_enabled() and not any(x.requires_grad for x in found):
        raise ValueError(f"The residual of {name!r} does not depend on the model's weights. Compute it from u(point).")


def _leaves_outside(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The tensors to which ``loss.backward()`` adds gradients, but for the model's parameters."""
    own = {id(p) for p in model.parameters()}
    return [leaf for leaf in leaves(loss) if id(leaf) not in own]


def leaves(loss: Tensor) -> list[Tensor]:
    """The tensors to which ``loss.backward()`` adds gradients."""
    found, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        waiting += [other for other, _ in node.next_functions]
    return found
