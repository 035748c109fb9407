"""Rows of the Jacobian of traced residuals, from factors.

In a trace a weight matrix W occurs in products A W' only, where A (N x in) belongs to the N samples. With B (N x out)
the derivative of the residuals by such a product, the rows of the Jacobian are sums of B (x) A over the uses of W, and
one backward pass gives B for all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .jacobian import Pair
from .trace import ATEN, Untraceable, shape

SPREAD = {ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.sub.Tensor, ATEN.expand.default}
"""Operations for which a parameter is given to each sample as its own copy."""


@dataclass
class Use:
    """One place where the residuals of each sample depend on a parameter."""

    parameter: int
    output: Node
    """By which the residuals are differentiated."""
    factor: Node | None = None
    """A of a product; None where the derivative itself is the row."""
    transposed: bool = False
    """Whether the product is with W', as in linear layers."""


class Factors:
    """Rows of the Jacobian of traced residuals, for a block of samples."""

    def __init__(self, module: GraphModule, parameters: int, count: int):
        graph = Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        self.count = count
        self.uses = _uses(graph, parameters, count)
        last = next(iter(reversed(graph.nodes)))
        factors = [use.factor for use in self.uses if use.factor is not None]
        last.args = ((last.args[0], tuple(use.output for use in self.uses), tuple(factors)),)
        self.forward = GraphModule(module, graph).forward

    def count_uses(self, parameter: int) -> int | None:
        """Number of outer products in a row of this parameter; None if there is more to it."""
        uses = [use.factor for use in self.uses if use.parameter == parameter]
        return None if None in uses else sum(shape(factor)[0] // self.count for factor in uses if factor is not None)

    def __call__(self, arguments: Sequence[Tensor], sums: Tensor, out: Sequence[Tensor | Pair]) -> None:
        """Write the rows of weighted sums of residuals, by weights (p', N, p), to ``out``: (k p', numbers), k <= N."""
        with torch.enable_grad():
            residuals, outputs, factors = self.forward(*arguments)
        given = iter(factors)
        left = [None if use.factor is None else next(given).detach() for use in self.uses]
        for j, weights in enumerate(sums):
            more = j < len(sums) - 1
            slopes = torch.autograd.grad(residuals, outputs, weights, retain_graph=more, allow_unused=True)
            self._write(left, slopes, [part[j :: len(sums)] for part in out])

    def _write(
        self, left: Sequence[Tensor | None], slopes: Sequence[Tensor | None], out: Sequence[Tensor | Pair]
    ) -> None:
        """Rows of one residual of each sample."""
        pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in out]
        sums: list[list[Tensor]] = [[] for _ in out]
        for use, a, b in zip(self.uses, left, slopes, strict=True):
            if b is None:
                continue
            if a is None:
                sums[use.parameter].append(b.reshape(self.count, -1, out[use.parameter].shape[-1]).sum(1))
            else:  # several rows of a sample in one product lie one after the other
                a, b = (x.reshape(self.count, -1, x.shape[-1]) for x in (a, b))
                pairs[use.parameter].append((b, a) if use.transposed else (a, b))
        for part, products, terms in zip(out, pairs, sums, strict=True):
            k = part.shape[0]
            if not products:
                part.zero_()
            else:
                one, other = (torch.cat(x, 1)[:k] for x in zip(*products, strict=True))
                if isinstance(part, Pair):
                    part.write(one, other)
                else:
                    outer = part.unflatten(1, (one.shape[2], other.shape[2]))
                    if part.dtype == one.dtype:
                        torch.bmm(one.mT, other, out=outer)
                    else:
                        outer.copy_(torch.bmm(one.mT, other))
            if isinstance(part, Tensor):
                for term in terms:
                    part += term[:k]


def _uses(graph: Graph, parameters: int, count: int) -> list[Use]:
    """Find all uses of the first ``parameters`` arguments, and make their outputs differentiable."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"][:parameters]
    roots = {node: (index, False) for index, node in enumerate(inputs)}
    uses: list[Use] = []
    for node in list(graph.nodes):
        used = [argument for argument in node.all_input_nodes if argument in roots]
        if node.op != "call_function" or not used:
            continue
        if node.target is ATEN.t.default:
            index, transposed = roots[used[0]]
            roots[node] = (index, not transposed)
        else:
            uses += _uses_in(graph, node, roots, count)
    return uses


def _uses_in(graph: Graph, node: Node, roots: dict[Node, tuple[int, bool]], count: int) -> list[Use]:
    """The uses in one operation; raises ``Untraceable`` for an unknown one."""
    args: Any = node.args
    size, plain = shape(node), not node.kwargs
    if not size or size[0] % count:
        raise Untraceable(f"{node.target} of parameters alone")
    if node.target is ATEN.mm.default and args[1] in roots and args[0] not in roots:
        index, transposed = roots[args[1]]
        return [Use(index, _tapped(graph, node), args[0], transposed)]
    if node.target is ATEN.addmm.default and plain and args[0] in roots and args[2] in roots and args[1] not in roots:
        (index, transposed), (bias, _) = roots[args[2]], roots[args[0]]
        output = _tapped(graph, node)
        return [Use(index, output, args[1], transposed), Use(bias, output)]
    if size[0] != count:
        raise Untraceable(f"{node.target} of several rows of a sample")
    used = [argument for argument in node.all_input_nodes if argument in roots]
    tail = shape(used[0])
    spreads = len(tail) < len(size) and size[len(size) - len(tail) :] == tail
    if len(used) > 1 or roots[used[0]][1] or not spreads:
        raise Untraceable(f"{node.target} of {len(used)} parameters")
    if node.target is ATEN.add.Tensor and len(args) == 2 and plain:
        return [Use(roots[used[0]][0], _tapped(graph, node))]
    if node.target in SPREAD:
        return [Use(roots[used[0]][0], _spread(graph, node, used[0], size))]
    raise Untraceable(str(node.target))


def _tapped(graph: Graph, node: Node) -> Node:
    """Differentiate by the result of this operation."""
    with graph.inserting_after(node):
        tapped = graph.call_function(_differentiable, (node,))
    node.replace_all_uses_with(tapped)
    tapped.args = (node,)
    return tapped


def _spread(graph: Graph, node: Node, parameter: Node, size: tuple[int, ...]) -> Node:
    """Give the operation a copy of the parameter for each sample, and differentiate by that."""
    own = shape(parameter)
    ones = [1] * (len(size) - len(own) - 1)
    with graph.inserting_before(node):
        copies = graph.call_function(ATEN.expand.default, (parameter, [size[0], *ones, *own]))
        tapped = graph.call_function(_differentiable, (copies,))
    node.replace_input_with(parameter, tapped)
    return tapped


def _differentiable(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
