"""Residuals of a block of samples as a clean graph of ATen calls, and rows of their Jacobian from factors.

``torch.func`` evaluates a PINN's residual with many small operations. Here it is traced once with ``make_fx`` for a
block of N samples. Copies, products with zero tangents and duplicates are removed, and the rest runs as plain calls.

In the trace a weight matrix W occurs in products A W' only, where A (N x in) belongs to the samples. With B (N x out)
the derivative of the residuals by such a product, the rows of the Jacobian are sums of B (x) A over the uses of W, and
one backward pass gives B for all samples.

This is the only module that depends on parts of torch that may change. Whoever uses it compares its results with those
of ``torch.func``, and does without it where it raises or differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

Function = Callable[..., Tensor]
"""Residuals (N, p) of N samples: ``function(*weights, *constants, ones, *samples)``."""

ATEN = torch.ops.aten
SQUEEZES = {ATEN.squeeze.dims, ATEN.squeeze.dim, ATEN.squeeze.default}
MAKERS = {
    *(ATEN.zeros.default, ATEN.ones.default, ATEN.full.default, ATEN.eye.default, ATEN._efficientzerotensor.default),
    *(ATEN.arange.default, ATEN.arange.start, ATEN.arange.start_step),
}
LIKE = {
    *(ATEN.zeros_like.default, ATEN.ones_like.default, ATEN.full_like.default),
    *(ATEN.new_zeros.default, ATEN.new_ones.default, ATEN.new_full.default),
}
"""Operations whose results depend on no numbers, and those that depend on the shape and type of a tensor alone."""
COPIES = {ATEN._to_copy.default, ATEN.clone.default, ATEN.expand.default, ATEN.view.default, ATEN._unsafe_view.default}
ALIASES = {ATEN.alias.default, ATEN.detach.default}
RESHAPES = {ATEN.view.default, ATEN._unsafe_view.default}
VIEWS = COPIES | ALIASES | {ATEN.t.default, ATEN.unsqueeze.default, ATEN.transpose.int, ATEN.select.int}
VIEWS |= SQUEEZES
SPREAD = {ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.sub.Tensor, ATEN.expand.default}
"""Operations for which a parameter is given to each sample as its own copy."""


class Untraceable(Exception):
    """The trace contains something that its users cannot handle."""


# ------------------------------------------------------------------------------------------------------- the graph


def trace(function: Function, arguments: Sequence[Tensor]) -> GraphModule:
    """The function as a graph for arguments of these shapes, without needless operations."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        module = make_fx(function)(*arguments)
    module.graph.eliminate_dead_code()
    zeros = _fold(module)
    _without_writes(module.graph)
    _simplify(module.graph, zeros)
    module.graph.eliminate_dead_code()
    for _ in range(2):
        module.graph = fx_graph_cse(module.graph)
        module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _fold(module: GraphModule) -> set[Node]:
    """Compute once what depends on no argument, such as directions of derivatives; returns what is zero."""
    known: dict[Node, Any] = {}
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function":
            continue
        if node.target in LIKE:
            meta = _meta(inputs[0])
            like = torch.empty((), dtype=meta.dtype, device=getattr(meta, "device", None)).expand(meta.shape)
            known[node] = node.target(like, *node.args[1:], **node.kwargs)
        elif node.target in MAKERS or (inputs and known.keys() >= {*inputs}):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    return _stored(module, known)


def _stored(module: GraphModule, known: dict[Node, Any]) -> set[Node]:
    """Make known tensors attributes of the module; returns those that are zero."""
    zeros = set()
    for place, (node, found) in enumerate(known.items()):
        if not isinstance(found, Tensor) or found.is_meta or known.keys() >= {*node.users}:
            continue
        value = torch.zeros(found.shape, dtype=found.dtype, device=found.device)
        module.register_buffer(f"folded{place}", value if found._is_zerotensor() else value.copy_(found))
        with module.graph.inserting_after(node):
            constant = module.graph.get_attr(f"folded{place}")
        constant.meta["val"] = value
        node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in known)
        if not value.any():
            zeros.add(constant)
    for node in reversed(known):
        if not node.users:
            module.graph.erase_node(node)
    return zeros


def _simplify(graph: Graph, zeros: set[Node]) -> None:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _is_zero(node, zeros):
            zeros.add(node)
        if (same := _equal_to(node, zeros)) is not None:
            node.replace_all_uses_with(same)
        elif node.target in RESHAPES and node.args[0].target in RESHAPES:
            node.args = (node.args[0].args[0], *node.args[1:])


def _is_zero(node: Node, zeros: set[Node]) -> bool:
    """Whether a node is zero since its arguments are: tangents of what does not depend on a direction."""
    if node.target in VIEWS:
        return _first(node) in zeros
    products = (ATEN.mm.default, ATEN.mul.Tensor, ATEN.mul.Scalar)
    return node.target in products and any(argument in zeros for argument in node.all_input_nodes)


def _equal_to(node: Node, zeros: set[Node]) -> Node | None:
    """An earlier node with the same value."""
    first = _first(node)
    if first is None:
        return None
    if node.target in ALIASES or (node.target in COPIES and _alike(node, first)):
        return first
    if node.target is ATEN.t.default and first.target is ATEN.t.default:
        return first.args[0]  # type: ignore[return-value]
    if node.target is ATEN.mul.Scalar and node.args[1] == 1 and _alike(node, first):
        return first
    if node.target is ATEN.add.Tensor and len(node.args) == 2 and not node.kwargs:
        for kept, dropped in (node.args, node.args[::-1]):
            if dropped in zeros and isinstance(kept, Node) and _alike(kept, node):
                return kept
    return None


def _first(node: Node) -> Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None


def _meta(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("tensor_meta"))


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(getattr(_meta(node), "shape", ()))


def _alike(one: Node, other: Node) -> bool:
    """Whether two nodes are known to have the same shape and type."""
    a, b = _meta(one), _meta(other)
    if a is None or b is None:
        return False
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def _without_writes(graph: Graph) -> None:
    """Replace operations that write to a tensor, such as those of one_hot, by those that return a new one.

    Views of the tensor would still show the old numbers; the comparison with the plain way notices that.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in order:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        written, packet = _first(node), getattr(ATEN, schema.name.removeprefix("aten::").removesuffix("_"), None)
        if written is None or packet is None or schema.overload_name not in ("", *packet.overloads()):
            raise Untraceable(f"{node.target} writes to a tensor")
        node.target = getattr(packet, schema.overload_name or "default")
        later = {other for other, place in order.items() if place > order[node]}
        written.replace_all_uses_with(node, delete_user_cb=later.__contains__)


# --------------------------------------------------------------------------------------------------------- the rows


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

    def __call__(self, arguments: Sequence[Tensor], sums: Tensor, out: Sequence[Tensor]) -> None:
        """Write the rows of weighted sums of residuals, by weights (rows, N, p), to ``out``: (N, rows, numbers)."""
        with torch.enable_grad():
            residuals, outputs, factors = self.forward(*arguments)
        given = iter(factors)
        left = [None if use.factor is None else next(given).detach() for use in self.uses]
        for j, weights in enumerate(sums):
            more = j < len(sums) - 1
            slopes = torch.autograd.grad(residuals, outputs, weights, retain_graph=more, allow_unused=True)
            self._write(left, slopes, [part[:, j] for part in out])

    def _write(self, left: Sequence[Tensor | None], slopes: Sequence[Tensor | None], out: Sequence[Tensor]) -> None:
        """Rows of one residual of each sample."""
        pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in out]
        sums: list[list[Tensor]] = [[] for _ in out]
        for use, a, b in zip(self.uses, left, slopes, strict=True):
            if b is None:
                continue
            if a is None:
                sums[use.parameter].append(b.reshape(self.count, -1, out[use.parameter].shape[1]).sum(1))
            else:  # several rows of a sample in one product lie one after the other
                a, b = (x.reshape(self.count, -1, x.shape[-1]) for x in (a, b))
                pairs[use.parameter].append((b, a) if use.transposed else (a, b))
        for part, products, terms in zip(out, pairs, sums, strict=True):
            if products:
                one, other = (torch.cat(x, 1) for x in zip(*products, strict=True))
                torch.bmm(one.mT, other, out=part.unflatten(1, (one.shape[2], other.shape[2])))
            else:
                part.zero_()
            for term in terms:
                part += term


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
    size, plain = _shape(node), not node.kwargs
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
    if len(used) > 1 or roots[used[0]][1] or not _is_tail(_shape(used[0]), size):
        raise Untraceable(f"{node.target} of {len(used)} parameters")
    if node.target is ATEN.add.Tensor and len(args) == 2 and plain:
        return [Use(roots[used[0]][0], _tapped(graph, node))]
    if node.target in SPREAD:
        return [Use(roots[used[0]][0], _spread(graph, node, used[0], size))]
    raise Untraceable(str(node.target))


def _is_tail(shape: tuple[int, ...], size: tuple[int, ...]) -> bool:
    return len(shape) < len(size) and size[len(size) - len(shape) :] == shape


def _tapped(graph: Graph, node: Node) -> Node:
    """Differentiate by the result of this operation."""
    with graph.inserting_after(node):
        tapped = graph.call_function(_differentiable, (node,))
    node.replace_all_uses_with(tapped)
    tapped.args = (node,)
    return tapped


def _spread(graph: Graph, node: Node, parameter: Node, size: tuple[int, ...]) -> Node:
    """Give the operation a copy of the parameter for each sample, and differentiate by that."""
    shape = _shape(parameter)
    ones = [1] * (len(size) - len(shape) - 1)
    with graph.inserting_before(node):
        copies = graph.call_function(ATEN.expand.default, (parameter, [size[0], *ones, *shape]))
        tapped = graph.call_function(_differentiable, (copies,))
    node.replace_input_with(parameter, tapped)
    return tapped


def _differentiable(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
