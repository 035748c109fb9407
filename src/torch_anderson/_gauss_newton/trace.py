"""Residuals of a block of samples as a clean graph of ATen calls.

``torch.func`` evaluates a PINN's residual with many small operations. Here it is traced once with ``make_fx`` for a
block of N samples. Copies, products with zero tangents and duplicates are removed, and the rest runs as plain calls.

This module and ``factors`` are the only ones that depend on parts of torch that may change. Code that uses them
compares their results with those of ``torch.func``, and does without them where they raise or differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class Untraceable(Exception):
    """The trace contains something that its users cannot handle."""


def trace(function: Function, arguments: Sequence[Tensor]) -> GraphModule:
    """The function as a graph for arguments of these shapes, without needless operations."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # All nodes share one mode for their shapes: if each makes its own, tracing takes twice as long.
    with torch.no_grad(), tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        module = make_fx(function)(*arguments)
    module.graph.eliminate_dead_code()
    zeros = _fold(module)
    _without_writes(module.graph)
    _simplify(module.graph, zeros)
    module.graph.eliminate_dead_code()
    _merge(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _fold(module: GraphModule) -> set[Node]:
    """Compute once what depends on no argument, such as directions of derivatives; returns the nodes that are zero.

    The tensors become attributes of the module.
    """
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
    zeros = set()
    for place, (node, result) in enumerate(known.items()):
        if not isinstance(result, Tensor) or result.is_meta or known.keys() >= {*node.users}:
            continue
        value = torch.zeros(result.shape, dtype=result.dtype, device=result.device)
        module.register_buffer(f"folded{place}", value if result._is_zerotensor() else value.copy_(result))
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
            if node.target is ATEN.clone.default:  # made for a view that its argument may not have
                for user in node.users:
                    user.target = ATEN.reshape.default if user.target in RESHAPES else user.target
            node.replace_all_uses_with(same)
        elif node.target in RESHAPES and node.args[0].target in RESHAPES:
            node.args = (node.args[0].args[0], *node.args[1:])


def _merge(graph: Graph) -> None:
    """Compute equal expressions once. torch's own function for it would load the compiler, which takes a second."""
    first: dict[Any, Node] = {}
    for node in graph.nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op != "call_function" or random or node.is_impure():
            continue
        same = first.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)


def _key(argument: Any) -> Any:
    """The argument of a node as a key of a dictionary; 1, 1.0 and True, and 0.0 and -0.0, have different ones."""
    if isinstance(argument, Node):
        return argument
    if isinstance(argument, Mapping):
        return tuple((name, _key(value)) for name, value in sorted(argument.items()))
    if isinstance(argument, list | tuple):
        return tuple(map(_key, argument))
    return type(argument), repr(argument)


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


def shape(node: Node) -> tuple[int, ...]:
    """The shape that a node had in the trace."""
    return tuple(getattr(_meta(node), "shape", ()))


def rounds(module: GraphModule, dtype: torch.dtype) -> bool:
    """Whether some number is rounded to a type with fewer digits than this one."""
    copies = [_meta(node) for node in module.graph.nodes if node.target is ATEN._to_copy.default]
    return any(x is not None and x.is_floating_point() and x.element_size() < dtype.itemsize for x in copies)


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
