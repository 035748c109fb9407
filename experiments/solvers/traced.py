"""Loss and gradient of an objective as plain calls of torch's operations, traced once: for the peers.

``GaussNewton`` traces its residuals; this gives other optimizers the same advantage. It is no part of the library.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from torch_anderson import Objective, Term

Samples = Mapping[str, tuple[Tensor, ...]]
COPIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)


class TracedLoss:
    """Computes the loss of an objective on samples, and its gradient."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.parameters = dict(objective.model.named_parameters())
        self.graph: Callable[..., Any] | None = None

    def on(self, samples: Samples) -> Callable[[], Tensor]:
        """A closure for these samples, for any optimizer."""

        def closure() -> Tensor:
            weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
            if self.graph is None:
                self.graph = shortened(self.trace(weights, samples))
            with torch.no_grad():
                gradients, loss = self.graph(weights, dict(samples))
            for name, parameter in self.parameters.items():
                parameter.grad = gradients[name]
            return loss

        return closure

    def trace(self, weights: Mapping[str, Tensor], samples: Samples) -> fx.GraphModule:
        """The gradient and the loss, the sum over terms of weight times the mean of squares, as a graph."""

        def loss(some_weights: Any, some_samples: Any) -> Tensor:
            u = at_one_point(partial(functional_call, self.objective.model, some_weights))
            parts = [vmap(residual_of(term, u))(*some_samples[name]) for name, term in self.objective.terms.items()]
            return torch.stack([part.square().sum(1).mean() for part in parts]).sum()

        return make_fx(grad_and_value(loss))(dict(weights), dict(samples))


def at_one_point(model: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The model as a function of one point; a single output is a scalar."""

    def u(point: Tensor) -> Tensor:
        found = model((point.unsqueeze(0),)).squeeze(0)
        return found.reshape(()) if found.numel() == 1 else found

    return u


def residual_of(term: Term, u: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The residuals of a term at one sample as a vector, weighted."""

    def residual(*sample: Tensor) -> Tensor:
        found = term.function(u, *sample)
        parts = found if isinstance(found, tuple) else (found,)
        return term.weight**0.5 * torch.cat([part.reshape(-1) for part in parts])

    return residual


def shortened(module: fx.GraphModule) -> fx.GraphModule:
    """Without copies and without operations that repeat others."""
    seen: dict[Any, fx.Node] = {}
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            continue
        signature = node.target, str(node.args), str(node.kwargs)
        same = node.args[0] if node.target in COPIES else seen.setdefault(signature, node)
        if same is not node:
            node.replace_all_uses_with(same)
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module
