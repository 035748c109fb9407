"""A physics-informed network, and the Burgers operator applied to it.

The derivatives of the network in space and time are propagated forward with the value, in one matrix product per layer,
instead of by nested differentiation. The backward pass is written out too: it needs no graph, works in buffers that are
kept from call to call, and processes the points in chunks that fit the cache.

Each neuron has four or more streams: value, Laplacian, derivative in time, and derivatives along orthonormal
directions of space, the first of which is the diagonal (1, ..., 1). For an activation a(z) with slope s and z' a
derivative stream, a' = s z' and the Laplacian is s (lap z + bend * sum of z'^2 over space), bend = a''(z) / s.
"""

from collections.abc import Hashable, Iterator
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..solutions import burgers

VALUE, LAPLACIAN, TIME, SPACE = range(4)
OUTPUTS = 4
"""Streams that the operator needs of the last layer: of those in space, the diagonal alone."""
CHUNK = 2**18
"""Numbers in the streams of one layer: about what a core's cache holds."""
ACTIVATIONS = ("tanh", "relu")


class Network(nn.Module):
    """A multilayer perceptron from (x_1, ..., x_{d-1}, t) to a number, with Xavier's first weights."""

    def __init__(self, dimensions: int, width: int, depth: int, activation: str, dtype: torch.dtype):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"Invalid activation: {activation!r}, must be one of {', '.join(ACTIVATIONS)}")
        if min(dimensions - 1, width, depth) < 1:
            raise ValueError(f"Invalid network: {dimensions=}, {width=}, {depth=}, at least 2, 1 and 1 are needed")
        self.activation = activation
        sizes = [dimensions, *[width] * depth, 1]
        linear = [nn.Linear(before, after, dtype=dtype) for before, after in pairwise(sizes)]
        for layer in linear:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(linear)

    def forward(self, points: Tensor) -> Tensor:
        """The values at points (n, d), as n numbers."""
        *hidden, last = self.layers
        for layer in hidden:
            points = getattr(torch, self.activation)(layer(points))
        return last(points).squeeze(-1)


class Operator:
    """L(u) = u_t + u (u_{x_1} + ... + u_{x_{d-1}}) - viscosity * Laplacian of u, for u a network."""

    def __init__(self, network: Network, viscosity: float):
        self.network = network
        self.viscosity = viscosity
        self.sweep = Sweep(network)

    @torch.no_grad()
    def __call__(self, points: Tensor) -> Tensor:
        """L(u) at the points."""
        directions = self.sweep.directions()
        return torch.cat([self._combine(self.sweep.forward(chunk, *directions)) for chunk in self._chunks(points)])

    def mean_square(self, points: Tensor, forcing: Tensor) -> Tensor:
        """Mean of (L(u) - forcing)^2 in float64, differentiable in the weights (once)."""
        if torch.is_grad_enabled():
            return _MeanSquare.apply(self, points, forcing, *self.network.parameters())
        return (self(points) - forcing.double()).square().mean()

    def mean_square_gradient(self, points: Tensor, forcing: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The mean of squares and its gradient, for each parameter in order."""
        total = torch.zeros((), dtype=torch.float64)
        gradients = [torch.zeros_like(parameter) for parameter in self.network.parameters()]
        directions = self.sweep.directions()
        for chunk, target in zip(self._chunks(points), self._chunks(forcing), strict=True):
            streams = self.sweep.forward(chunk, *directions)
            misfit = self._combine(streams) - target
            total += misfit.square().sum() / len(points)
            slopes = self._pull_back(streams, misfit * (2 / len(points)))
            torch._foreach_add_(gradients, self.sweep.backward(chunk, *directions, slopes))
        return total, gradients

    def _chunks(self, points: Tensor) -> Iterator[Tensor]:
        return iter(points.split(self.sweep.chunk))

    def _combine(self, streams: Tensor) -> Tensor:
        value, laplacian, time, space = streams.double()
        return burgers(self.viscosity, value, time, space, laplacian)

    def _pull_back(self, streams: Tensor, gradient: Tensor) -> Tensor:
        """From the gradient in L(u) to that in the four streams."""
        gradient = gradient.to(streams.dtype)
        slopes = (gradient * streams[SPACE], -self.viscosity * gradient, gradient, gradient * streams[VALUE])
        return torch.stack(slopes)


class Stage(NamedTuple):
    """Values of an activation that the backward pass needs."""

    streams: Tensor
    active: Tensor
    slope: Tensor
    squares: Tensor


class _MeanSquare(torch.autograd.Function):
    """Takes the gradient chunk by chunk on the way forward, while the streams of a chunk are in the cache."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, points: Tensor, forcing: Tensor, *parameters: Tensor) -> Tensor:
        value, gradients = operator.mean_square_gradient(points, forcing)
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, *(gradient.to(saved.dtype) * saved for saved in ctx.saved_tensors)


class Sweep:
    """Derivatives forward through a network, gradients back. Streams have the shape (width, streams, points)."""

    def __init__(self, network: Network):
        self.layers = [layer for layer in network.layers if isinstance(layer, nn.Linear)]
        self.tanh = network.activation == "tanh"
        width, dimensions = self.layers[0].weight.shape
        self.chunk = max(1, CHUNK // (width * (SPACE + min(width + 1, dimensions - 1))))
        self._buffers: dict[Hashable, Tensor] = {}
        self._tape: list[Stage] = []

    @property
    def weights(self) -> list[Tensor]:
        """The present weights of the layers, without a graph."""
        return [layer.weight.detach() for layer in self.layers]

    def directions(self) -> tuple[Tensor, Tensor]:
        """Directions of the derivative streams after the value, as columns; and the length of the diagonal.

        Only inner products of the first layer's rows enter the Laplacian, so a basis of the space that they and the
        diagonal span is sufficient. It may be treated as a constant: its rotation with the weights changes nothing to
        first order, because the part of a row outside of it is zero.
        """
        rows = self.weights[0][:, :-1]
        basis, triangle = torch.linalg.qr(torch.cat([torch.ones_like(rows[:1]), rows]).T)
        directions = rows.new_zeros(len(basis) + 1, TIME + basis.shape[1])
        directions[-1, TIME - 1] = 1
        directions[:-1, SPACE - 1 :] = basis
        return directions, triangle[0, 0]

    def forward(self, points: Tensor, directions: Tensor, diagonal: Tensor) -> Tensor:
        """Value, Laplacian, time derivative and sum of the space derivatives at the points, as (4, points)."""
        first, *weights = self.weights
        bias, *biases = (layer.bias.detach().unsqueeze(-1) for layer in self.layers)
        streams = self._buffer("first", len(first), 1 + directions.shape[1], len(points))
        torch.addmm(bias, first, points.T, out=streams[:, VALUE])
        streams[:, LAPLACIAN:] = (first @ directions).unsqueeze(-1)
        self._tape = []
        for weight, bias in zip(weights, biases, strict=True):
            active = self._activate(streams, OUTPUTS if weight is weights[-1] else streams.shape[1])
            streams = self._buffer(("streams", len(self._tape)), len(weight), *active.shape[1:])
            torch.mm(weight, active.flatten(1), out=streams.view(len(weight), -1))
            streams[:, VALUE] += bias
        streams[:, SPACE] *= diagonal
        return streams[0]

    def backward(self, points: Tensor, directions: Tensor, diagonal: Tensor, slopes: Tensor) -> list[Tensor]:
        """The gradient for each parameter, from that in the results of the last ``forward`` (overwritten)."""
        gradients, weights = [], self.weights
        slopes[SPACE] *= diagonal
        slopes = slopes.unsqueeze(0)
        for depth, stage in reversed(list(enumerate(self._tape, 1))):
            gradients += [slopes[:, VALUE].sum(1), slopes.flatten(1) @ stage.active.flatten(1).T]
            before = self._buffer(("slopes", depth % 2), *stage.active.shape)
            torch.mm(weights[depth].T, slopes.flatten(1), out=before.view(len(before), -1))
            slopes = self._deactivate(stage, before)
        first = slopes[:, VALUE] @ points + slopes[:, LAPLACIAN:].sum(-1) @ directions.T
        return [*gradients, slopes[:, VALUE].sum(1), first][::-1]

    def _activate(self, streams: Tensor, kept: int) -> Tensor:
        """The first ``kept`` streams behind the activation; puts what ``_deactivate`` needs on the tape.

        In ``streams`` the Laplacian becomes what the slope multiplies.
        """
        width, _, points = streams.shape
        depth = len(self._tape)
        active = self._buffer(("active", depth), width, kept, points)
        slope = self._buffer(("slope", depth), width, points)
        squares = self._buffer(("squares", depth), width, points)
        if self.tanh:
            # tanh z = 2 sigmoid(2 z) - 1, right to a rounding of 1, in a third of the time of torch.tanh.
            value = torch.mul(streams[:, VALUE], 2, out=active[:, VALUE]).sigmoid_().mul_(2).sub_(1)
            torch.addcmul(slope.new_ones(()), value, value, value=-1, out=slope)
            self._contract(streams[:, SPACE:], streams[:, SPACE:], out=squares)
            streams[:, LAPLACIAN].addcmul_(value, squares, value=-2)
        else:
            value = torch.clamp(streams[:, VALUE], min=0, out=active[:, VALUE])
            torch.sign(value, out=slope)
        torch.mul(streams[:, LAPLACIAN:kept], slope.unsqueeze(1), out=active[:, LAPLACIAN:])
        self._tape.append(Stage(streams, active, slope, squares))
        return active

    def _deactivate(self, stage: Stage, slopes: Tensor) -> Tensor:
        """From the gradient in the active streams (overwritten) to that in the streams before the activation."""
        streams, active, slope, squares = stage
        before = slopes
        if (kept := active.shape[1]) < streams.shape[1]:
            before = self._buffer("padded", *streams.shape)
            before[:, :kept] = slopes
            before[:, kept:] = 0
        if self.tanh:
            total, scratch = (self._buffer(name, *slope.shape) for name in ("total", "scratch"))
            self._contract(streams[:, LAPLACIAN:kept], slopes[:, LAPLACIAN:], out=total)
            torch.mul(slope, squares, out=scratch)
            before[:, VALUE].addcmul_(active[:, VALUE], total, value=-2)
            before[:, VALUE].addcmul_(scratch, slopes[:, LAPLACIAN], value=-2)
            torch.mul(active[:, VALUE], slopes[:, LAPLACIAN], out=scratch)
            before[:, SPACE:].addcmul_(streams[:, SPACE:], scratch.unsqueeze(1), value=-4)
        return before.mul_(slope.unsqueeze(1))

    def _contract(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """The sum of ``left * right`` over the streams."""
        if left.shape[1] > OUTPUTS:
            return torch.sum(torch.mul(left, right, out=self._buffer("products", *left.shape)), 1, out=out)
        torch.mul(left[:, 0], right[:, 0], out=out)
        for stream in range(1, left.shape[1]):
            out.addcmul_(left[:, stream], right[:, stream])
        return out

    def _buffer(self, name: Hashable, *shape: int) -> Tensor:
        """Uninitialised memory that is kept: with fresh memory its first touch would cost more than the arithmetic."""
        size = prod(shape)
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = self.layers[0].weight.detach().new_empty(size)
        return self._buffers[name][:size].view(shape)
