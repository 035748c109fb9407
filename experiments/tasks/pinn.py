"""A physics-informed network, and the Burgers operator applied to it.

The derivatives of the network in space and time are propagated forward with the value, in one matrix product per layer,
instead of by nested differentiation. Gradients are taken in chunks of points that fit the cache.

Each neuron has four or more streams: value, Laplacian, derivative in time, and derivatives along orthonormal
directions of space, the first of which is the diagonal (1, ..., 1). For an activation a(z) with slope s and z' a
derivative stream, a' = s z' and the Laplacian is s (lap z + bend * sum of z'^2 over space), bend = a''(z) / s.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..solutions import burgers

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
        self.first: Tensor = network.layers[0].weight  # type: ignore[assignment]
        width, dimensions = self.first.shape
        self.chunk = max(1, CHUNK // (width * (3 + min(width + 1, dimensions - 1))))

    @torch.no_grad()
    def __call__(self, points: Tensor) -> Tensor:
        """L(u) at the points."""
        directions = self.directions()
        return torch.cat([self.apply(chunk, *directions) for chunk in points.split(self.chunk)])

    def mean_square(self, points: Tensor, forcing: Tensor) -> Tensor:
        """Mean of (L(u) - forcing)^2 in float64, differentiable in the weights (once)."""
        if torch.is_grad_enabled():
            return _MeanSquare.apply(self, points, forcing, *self.network.parameters())
        return (self(points) - forcing.double()).square().mean()

    def directions(self) -> tuple[Tensor, Tensor]:
        """Orthonormal directions of space, as columns; and the length of the diagonal, along which is the first.

        Only inner products of the first layer's rows enter the Laplacian, so a basis of the space that they and the
        diagonal span is sufficient. It may be treated as a constant: its rotation with the weights changes nothing to
        first order, because the part of a row outside of it is zero.
        """
        rows = self.first.detach()[:, :-1]
        basis, triangle = torch.linalg.qr(torch.cat([torch.ones_like(rows[:1]), rows]).T)
        return basis, triangle[0, 0]

    def apply(self, points: Tensor, basis: Tensor, diagonal: Tensor) -> Tensor:
        """L(u), differentiable. Slopes have the shape (1 + directions, points, width), the one in time first."""
        first, *rest = (layer for layer in self.network.layers if isinstance(layer, nn.Linear))
        slopes = torch.cat([first.weight[:, -1:], first.weight[:, :-1] @ basis], 1).T.unsqueeze(1)
        value, laplacian = first(points), points.new_zeros(())
        for layer in rest:
            if self.network.activation == "tanh":
                value = value.tanh()
                slope = 1 - value.square()
                laplacian = slope * (laplacian - 2 * value * slopes[1:].square().sum(0))
            else:
                slope = (value > 0).to(value.dtype)
                value, laplacian = value.relu(), slope * laplacian
            slopes = slope * (slopes[:2] if layer is rest[-1] else slopes)
            streams = torch.cat([laplacian.unsqueeze(0), slopes]) @ layer.weight.T
            value, laplacian, slopes = layer(value), streams[0], streams[1:]
        value, laplacian, time, along = (each.squeeze(-1).double() for each in (value, laplacian, *slopes))
        return burgers(self.viscosity, value, time, diagonal * along, laplacian)


class _MeanSquare(torch.autograd.Function):
    """Takes the gradient chunk by chunk on the way forward, while the streams of a chunk are in the cache."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, points: Tensor, forcing: Tensor, *parameters: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        directions = operator.directions()
        for chunk, target in zip(points.split(operator.chunk), forcing.split(operator.chunk), strict=True):
            with torch.enable_grad():
                loss = (operator.apply(chunk, *directions) - target).square().sum() / len(points)
                torch._foreach_add_(gradients, torch.autograd.grad(loss, list(operator.network.parameters())))
            total += loss.detach()
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, *(gradient.to(saved.dtype) * saved for saved in ctx.saved_tensors)
