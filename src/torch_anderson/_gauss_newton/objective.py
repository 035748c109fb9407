"""``Objective``: a loss as means over samples, and a closure for any optimizer; its terms and retained samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from .._options import integer, invalid, real
from .._ranks.ranks import Ranks

Samples = tuple[Tensor, ...]
"""Samples of one term: tensors whose first dimension counts them."""
ADVICE = (
    "In the term {name!r}. Its function gets u and one sample, and is evaluated for all samples at once with "
    "torch.vmap: differentiate with torch.func (grad, jvp, jacrev, hessian) instead of torch.autograd.grad, choose "
    "with torch.where instead of if, and do not convert tensors to numbers. Samples and constants need the type and "
    "device of the model. For a model that vmap cannot evaluate, use Anderson with an ordinary closure."
)


@dataclass(frozen=True, eq=False)
class Term:
    """A term of an ``Objective``: weight times the mean over samples of the sum of squared residuals, or of a loss.

    Args:
        function: the residual at one sample, ``function(u, sample)``; returns a tensor, or a tuple or dictionary of
            tensors. ``u`` is the model as a function of one point. If samples consist of
            several tensors, the function gets one row of each, ``function(u, point, value)``.
        samples: a function that gets a number and returns exactly as many samples, or fixed samples: a tensor, or a
            tuple of tensors, whose first dimension counts the samples.
        count: number of samples to draw; only if ``samples`` is a function.
        weight: factor of the term in the loss.
        loss: None for squares, or a convex function of one sample's output, such as
            ``torch.nn.functional.cross_entropy``. It gets everything that ``function`` returns: the model's output
            first, then data such as the class.
        retain: whether samples whose residual is above the mean are kept for the next evaluation, while the others
            are drawn again; only if ``samples`` is a function. None: only for jumps, because it makes other methods
            worse, and only for squares. Use False for noisy data: residuals that cannot vanish would stay.

    >>> def decay(u, t):
    ...     return torch.func.grad(u)(t).sum() + u(t)
    >>> inside = Term(decay, lambda count: torch.rand(count, 1), count=100, weight=10.0)
    >>> data = Term(lambda u, t, value: u(t) - value, (torch.rand(20, 1), torch.rand(20)))
    >>> Term(lambda u, point: u(point), torch.zeros(10, 2), count=5)
    Traceback (most recent call last):
    ValueError: Invalid count: 5. Allowed: None for samples that are given.
    """

    function: Callable[..., Any]
    samples: Callable[[int], Any] | Tensor | Samples
    _: KW_ONLY
    count: int | None = None
    weight: float = 1.0
    loss: Callable[..., Tensor] | None = None
    retain: bool | None = None
    fixed: bool = field(init=False, repr=False)
    """Whether the samples are fixed."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Invalid function: {self.function!r}. Allowed: a function of u and one sample.")
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"Invalid loss: {self.loss!r}. Allowed: None for squares, or a function of one output.")
        weight = real("weight", self.weight, lambda x: x > 0 and isfinite(x), "a finite number above 0")
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "fixed", not callable(self.samples))
        if callable(self.samples):
            if self.count is None:
                raise ValueError("`count` is needed if samples are drawn by a function.")
            object.__setattr__(self, "count", integer("count", self.count, 1))
        elif self.count is not None:
            raise invalid("count", self.count, "None for samples that are given")
        else:
            object.__setattr__(self, "samples", checked_samples("samples", self.samples))

    @property
    def stays(self) -> bool:
        """Whether jumps retain samples; other losses than squares rarely vanish at all samples."""
        return self.loss is None if self.retain is None else self.retain

    def draw(self, name: str, count: int | None = None) -> Samples:
        """The samples for one evaluation."""
        if not callable(self.samples):
            return self.samples  # type: ignore[return-value]
        wanted: int = count or self.count  # type: ignore[assignment]
        return checked_samples(f"what the sampler of {name!r} returned", self.samples(wanted), wanted)

    def outputs(self, name: str, model: nn.Module, sample: Samples, one: Tensor | None = None) -> tuple[Tensor, ...]:
        """What the function returns at one sample: residuals, or what the loss depends on.

        ``one`` makes all inputs of the model depend on the sample.
        """

        def u(*point: Tensor) -> Tensor:
            if one is not None:
                point = tuple(x * one if x.is_floating_point() else x for x in point)
            return at_point(model, *point)

        returned = self.function(u, *sample)
        several = returned.values() if isinstance(returned, dict) else returned
        outputs = tuple(several) if isinstance(returned, dict | tuple | list) else (returned,)
        if not outputs or not all(isinstance(x, Tensor) for x in outputs):
            kinds = ", ".join(type(x).__name__ for x in outputs) or "nothing"
            raise TypeError(f"The function of {name!r} returned {kinds}. Return a tensor, or several: the residuals.")
        smooth = outputs if self.loss is None else outputs[:1]
        if not any(x.numel() for x in smooth):
            raise TypeError(f"The function of {name!r} returned no number. Return at least one residual.")
        if not all(x.is_floating_point() or x.is_complex() for x in smooth):
            raise TypeError(f"The function of {name!r} returned integers. Return residuals in floating point.")
        return outputs

    def vector(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """The outputs at one sample that the loss depends on, as one vector."""
        return torch.cat([real_view(x).reshape(-1) for x in (outputs if self.loss is None else outputs[:1])])

    def each(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """The loss of each sample, from the outputs of all."""
        if self.loss is not None:
            losses = torch.vmap(self.loss)(*outputs)
            if losses.numel() != len(losses):
                raise TypeError(f"A loss returned {losses.numel() // len(losses)} numbers. Return one for each sample.")
            return losses.reshape(-1)
        return torch.stack([real_view(x).square().reshape(len(x), -1).sum(1) for x in outputs]).sum(0)


def at_point(model: nn.Module, *point: Tensor) -> Tensor:
    """The model at one point: called with a batch of one; a single output is a scalar."""
    outputs = model(*(x.unsqueeze(0) for x in point))
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        raise TypeError(f"The model returned {kind}. Give Objective a module that returns one tensor.")
    output = outputs.squeeze(0)
    return output.reshape(()) if output.numel() == 1 else output


def checked_samples(what: str, given: Any, count: int | None = None) -> Samples:
    """Samples as a tuple of tensors of one length; raises TypeError or ValueError that says what was given."""
    tensors = (given,) if isinstance(given, Tensor) else given
    if not isinstance(tensors, (tuple, list)) or not tensors or not all(isinstance(x, Tensor) for x in tensors):
        raise TypeError(f"Invalid {what}: {type(given).__name__}. Allowed: a tensor, or a tuple of tensors.")
    if any(x.dim() == 0 for x in tensors) or len({len(x) for x in tensors}) != 1 or not len(tensors[0]):
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"Invalid {what}: shapes {shapes}. Allowed: one row for each of at least one sample.")
    if count is not None and len(tensors[0]) != count:
        raise ValueError(f"Invalid {what}: {len(tensors[0])} samples. Allowed: as many as asked for, {count}.")
    return tuple(x.detach() for x in tensors)  # many make points that require gradients


def real_view(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@dataclass
class Retained:
    """The samples of one term's last evaluation, and how large its residuals were."""

    term: Term
    samples: Samples
    sizes: Tensor
    """|r| of each sample."""

    def renew(self, fresh: Samples) -> Samples:
        """Put samples with |r| above the mean among fresh ones, at random places; none if they have another form.

        Random places, since a sampler may order its samples by kind. Where fewer samples are wanted than would stay,
        a random half of them does: the others must be fresh, or all evaluations would have the same ones.
        """
        forms = [[(x.shape[1:], x.dtype, x.device) for x in samples] for samples in (self.samples, fresh)]
        if forms[0] != forms[1] or not self.sizes.isfinite().all():
            return fresh
        device, total = fresh[0].device, len(fresh[0])
        kept = (self.sizes > self.sizes.mean()).nonzero()[:, 0]
        if len(kept) > total:
            kept = kept[torch.randperm(len(kept))[: total // 2].to(device)]
        places = torch.randperm(total)[: len(kept)].to(device)
        return tuple(new.index_copy(0, places, old[kept]) for new, old in zip(fresh, self.samples, strict=True))


class Objective:
    """A loss made of residuals, and a closure for any optimizer of PyTorch.

    The loss is the sum over terms of weight times the mean over samples of the sum of squared residuals, or of the
    term's own loss. When called, the objective draws samples, computes the loss and its gradients, which replace
    earlier ones of the model and of other tensors in the loss, and returns the loss.

    ``objective(name=batch)`` is a closure for these samples, e.g. from a data loader; other terms draw theirs.
    ``objective.draw()`` is a closure for samples that are drawn once and kept. Optimizers that compare losses of
    several calls in one step, such as LBFGS with a line search, need it: ``optimizer.step(objective.draw())``.
    ``GaussNewton.step(objective)`` does this itself.

    With jumps of ``GaussNewton``, or with ``Term(..., retain=True)``, samples whose residual was above their term's
    mean stay for the next evaluation, and only the others are drawn anew (Daw et al. 2023): uniform samples rarely meet
    a shock or a layer. A checkpoint then needs ``objective.state_dict()`` besides those of the model and the optimizer.

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

    def drawn(self, name: str, count: int | None = None) -> Samples:
        """New samples of a term, among which those with large residuals stay."""
        term, kept = self.terms[name], self.retained.get(name)
        samples = term.draw(name, count)
        return samples if term.fixed or kept is None or not term.stays else kept.renew(samples)

    def examples(self, counts: Mapping[str, int]) -> dict[str, Samples]:
        """Samples to look at once: retained ones where there are any; no random numbers are used up.

        So a resumed run draws as an uninterrupted one.
        """
        kept = {name: kept.samples for name, kept in self.retained.items() if kept.term is self.terms.get(name)}
        with torch.random.fork_rng(devices=[]):
            return {name: kept.get(name) or term.draw(name, counts[name]) for name, term in self.terms.items()}

    def population(self, counts: Mapping[str, int]) -> dict[str, Samples]:
        """Samples of all terms in random order."""
        samples = {}
        for name in self.terms:
            drawn = self.drawn(name, counts[name])
            order = torch.randperm(len(drawn[0])).to(drawn[0].device)
            samples[name] = tuple(x[order] for x in drawn)
        return samples

    def retain(self, samples: Mapping[str, Samples], sizes: Mapping[str, Tensor]) -> None:
        """Remember samples of ``population`` that were drawn, and sizes of their residuals."""
        drawn = [name for name, term in self.terms.items() if not term.fixed]
        self.retained = {name: Retained(self.terms[name], samples[name], sizes[name]) for name in drawn}

    def state_dict(self) -> dict[str, Any]:
        """The retained samples: with the states of model and optimizer, all that a run needs to resume.

        The samplers' random numbers are the caller's: save ``torch.get_rng_state()`` or the generators in use.
        """
        kept = {name: kept for name, kept in self.retained.items() if name in self.terms}
        return {"retained": {name: {"samples": list(x.samples), "sizes": x.sizes} for name, x in kept.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the retained samples from a checkpoint; one that does not fit raises and changes nothing.

        The tensors may have been saved on another device.
        """
        kept = state_dict.get("retained")
        if not isinstance(kept, dict):
            raise ValueError("Invalid state_dict: it has no 'retained'. Allowed: what objective.state_dict() returned.")
        if unknown := set(kept) - set(self.terms):
            raise ValueError(f"The checkpoint is of another objective: it has terms {sorted(unknown)}.")
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        retained = {}
        for name, entry in kept.items():
            if not isinstance(entry, dict) or not {"samples", "sizes"} <= entry.keys():
                raise ValueError(f"The checkpoint is damaged: the retained samples of {name!r} are incomplete.")
            sizes = entry["sizes"].to(device)
            samples = checked_samples(f"retained samples of {name!r}", tuple(entry["samples"]), len(sizes))
            retained[name] = Retained(self.terms[name], tuple(x.to(device) for x in samples), sizes)
        self.retained = retained


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
            terms = {name: term for name, term in self.objective.terms.items() if name not in self.given}
            self._drawn = {
                name: self.objective.drawn(name) if term.retain else term.draw(name) for name, term in terms.items()
            }
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
        model, losses, checked = objective.model, [], objective.checked == objective.terms
        for name, term in objective.terms.items():
            outputs = self._outputs(name, samples[name])
            each = term.each(outputs)
            if not checked:
                _check_first(name, outputs if term.loss is None else (outputs[0], each), model)
            losses.append(term.weight * each.mean())
            if term.retain and not term.fixed and name not in self.given:
                objective.retained[name] = Retained(term, samples[name], each.detach().clamp_min(0).sqrt())
        loss = torch.stack([loss.to(losses[0].device) for loss in losses]).sum()
        if not checked:
            own = {id(p) for p in model.parameters()}
            objective.checked = dict(objective.terms)
            objective.outside = [leaf for leaf in leaves(loss) if id(leaf) not in own]
        return loss

    def _outputs(self, name: str, samples: Samples) -> tuple[Tensor, ...]:
        """What the function of a term returns at all samples."""
        objective, term = self.objective, self.objective.terms[name]

        def at_sample(*sample: Tensor) -> tuple[Tensor, ...]:
            return term.outputs(name, objective.module, sample)

        try:
            return torch.vmap(at_sample, randomness="different")(*samples)  # type: ignore[no-any-return]
        except Exception as problem:
            problem.add_note(ADVICE.format(name=name))
            raise


def _check_first(name: str, outputs: tuple[Tensor, ...], model: nn.Module) -> None:
    """Raise for residuals or losses that are not finite from the start, or do not depend on the weights."""
    if not all(x.isfinite().all() for x in outputs):
        raise ValueError(
            f"The residual or loss of {name!r} is not finite at some sample of the first evaluation. Check its "
            "derivatives there: a square root or an absolute value has none at 0."
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError("An Objective has no gradient within torch.inference_mode(). Call step() outside of it.")
    trains = any(p.requires_grad for p in model.parameters())
    if trains and torch.is_grad_enabled() and not any(x.requires_grad for x in outputs):
        raise ValueError(f"The residual of {name!r} does not depend on the model's weights. Compute it from u(point).")


def leaves(loss: Tensor) -> list[Tensor]:
    """The tensors to which ``loss.backward()`` adds gradients."""
    tensors, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            tensors.append(leaf)
        waiting += [other for other, _ in node.next_functions]
    return tensors


class Unusable(Exception):
    """Residuals that a jump cannot use, for reasons that depend on data; ``cause`` is the name that is counted."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause
