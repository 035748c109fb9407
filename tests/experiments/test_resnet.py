import pytest
import torch

from experiments.resnet import Residual, resnet50, small_resnet


def by_hand_50() -> int:
    """Parameters of ResNet-50 from its description: a convolution in*out*k*k, a BatchNorm 2 a channel."""
    total, inputs = 3 * 64 * 49 + 2 * 64, 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        total += inputs * 4 * width + 8 * width  # the projection of the first block
        for _ in range(blocks):
            total += inputs * width + 9 * width**2 + 4 * width**2 + 2 * (width + width + 4 * width)
            inputs = 4 * width
    return total + 2048 * 1000 + 1000


def test_resnet50_has_the_parameters_of_the_common_one():
    assert sum(p.numel() for p in resnet50().parameters()) == 25_557_032 == by_hand_50()


@pytest.mark.parametrize("channels", [1, 3])
def test_resnet20_has_twenty_layers_and_takes_any_number_of_channels(channels):
    model = small_resnet(classes=7, channels=channels)
    weights = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(weights) + 1 == 20
    assert model(torch.zeros(2, channels, 28, 28)).shape == (2, 7)


def test_the_3x3_convolution_strides():
    strides = [[m.stride[0] for m in block.branch if isinstance(m, torch.nn.Conv2d)] for block in resnet50()[2]]
    assert strides == [[1, 2, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]


def test_an_image_is_halved_five_times():
    model = resnet50(classes=10).eval()
    assert model[:5](torch.zeros(1, 3, 64, 64)).shape == (1, 2048, 2, 2)


def test_with_zero_gamma_a_block_starts_as_its_shortcut():
    block = next(m for m in small_resnet(zero_gamma=True).modules() if isinstance(m, Residual))
    x = torch.rand(2, 16, 8, 8)
    assert torch.equal(block(x), x)
    block = next(m for m in small_resnet().modules() if isinstance(m, Residual))
    assert not torch.equal(block(x), x)
