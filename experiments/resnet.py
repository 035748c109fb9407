"""Residual networks: ResNet-50 for images as large as ImageNet's, ResNet-20 for small ones (He et al., 2015).

ResNet-50 is "v1.5": where a stage halves the image, the 3x3 convolution of its first block strides, not the 1x1 before.
ResNet-20 is the one for CIFAR, of 6n + 2 layers with n = 3, and has smaller brothers. All project the shortcut by a 1x1
convolution where the shape changes (option B), and draw the weights of convolutions with Kaiming's deviation (normal,
fan-out, ReLU).
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the image's size up to the stride; it has no bias, as BatchNorm follows."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Residual(nn.Module):
    """`relu(branch(x) + shortcut(x))`, with a projection as shortcut where the branch changes the shape."""

    def __init__(self, branch: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        return functional.relu(self.branch(x) + self.shortcut(x), inplace=True)


def basic(inputs: int, width: int, stride: int) -> Residual:
    """Return a block of two 3x3 convolutions (ResNet-20)."""
    branch = nn.Sequential(
        *(conv(inputs, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(conv(width, width, 3), nn.BatchNorm2d(width)),
    )
    return Residual(branch, inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """Return a block of 1x1, 3x3 and 1x1 convolutions, the last four times as wide (ResNet-50)."""
    branch = nn.Sequential(
        *(conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)),
    )
    return Residual(branch, inputs, 4 * width, stride)


def stage(
    block: Callable[[int, int, int], Residual], inputs: int, width: int, expansion: int, blocks: int, stride: int
) -> nn.Sequential:
    """Return `blocks` blocks of one width, the first of which strides."""
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(expansion * width, width, 1) for _ in range(blocks - 1)))


def initialise(model: nn.Module, *, zero_gamma: bool) -> None:
    """Draw convolutions by Kaiming; `zero_gamma`: a branch's last BatchNorm is zero, so blocks start as shortcuts."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif zero_gamma and isinstance(module, Residual):
            nn.init.zeros_(module.branch[-1].weight)  # type: ignore[arg-type]


def assemble(*body: nn.Module, width: int, classes: int, zero_gamma: bool) -> nn.Sequential:
    """Put a classifier on top of a stem and stages, the last of which has `width` channels, and draw the weights."""
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    model = nn.Sequential(*body, head)
    initialise(model, zero_gamma=zero_gamma)
    return model


def resnet50(classes: int = 1000, *, zero_gamma: bool = False) -> nn.Sequential:
    """Return ResNet-50.

    >>> sum(p.numel() for p in resnet50().parameters())
    25557032
    """
    return assemble(
        nn.Sequential(conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)),
        stage(bottleneck, 64, 64, 4, blocks=3, stride=1),
        stage(bottleneck, 256, 128, 4, blocks=4, stride=2),
        stage(bottleneck, 512, 256, 4, blocks=6, stride=2),
        stage(bottleneck, 1024, 512, 4, blocks=3, stride=2),
        width=2048,
        classes=classes,
        zero_gamma=zero_gamma,
    )


def small_resnet(
    classes: int = 10, channels: int = 3, width: int = 16, depth: int = 3, *, zero_gamma: bool = False
) -> nn.Sequential:
    """Return a ResNet of 6 x depth + 2 layers for small images of any number of channels; by default ResNet-20.

    >>> sum(p.numel() for p in small_resnet().parameters())
    272474
    """
    return assemble(
        nn.Sequential(conv(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        stage(basic, width, width, 1, blocks=depth, stride=1),
        stage(basic, width, 2 * width, 1, blocks=depth, stride=2),
        stage(basic, 2 * width, 4 * width, 1, blocks=depth, stride=2),
        width=4 * width,
        classes=classes,
        zero_gamma=zero_gamma,
    )
