"""Networks for images: VGG16 at 32x32, and the ResNets."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ResNet", "convolution", "vgg16"]

# Share of a batch in the running statistics. With torch's 0.1 they are far from those of the
# weights after the two dozen steps of a quick run at batch 512.
STATISTICS = 0.3


def convolution(
    channels: int, out: int, kernel_size: int = 3, stride: int = 1, padding: int = 1
) -> list[nn.Module]:
    """Make a convolution with batchnorm and ReLU."""
    layer = nn.Conv2d(channels, out, kernel_size, stride, padding, bias=False)
    return [layer, nn.BatchNorm2d(out, momentum=STATISTICS), nn.ReLU()]


def vgg16(channels: int, width: int = 64, classes: int = 10) -> nn.Sequential:
    """Build VGG16 for images of 32x32.

    Configuration D of Simonyan and Zisserman (2014), with batchnorm, and with one linear layer
    instead of three, because 32x32 ends at 1x1. Images have so many ``channels``, the first layers
    ``width`` (64 in the paper), the last 8 times as many.
    """
    layers: list[nn.Module] = []
    for convolutions, times in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        for _ in range(convolutions):
            layers += convolution(channels, times * width)
            channels = times * width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


class _Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut; of a bottleneck a 3x3 one between two of 1x1."""

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        if bottleneck:
            self.conv1, self.bn1 = _normed(channels, width, 1)
            self.conv2, self.bn2 = _normed(width, width, 3, stride)
            self.conv3, self.bn3 = _normed(width, out, 1)
        else:
            self.conv1, self.bn1 = _normed(channels, width, 3, stride)
            self.conv2, self.bn2 = _normed(width, out, 3)
        changes = stride > 1 or channels != out
        self.downsample = nn.Sequential(*(_normed(channels, out, 1, stride) if changes else ()))
        self.bottleneck = bottleneck

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.bottleneck:
            y = self.bn3(self.conv3(F.relu(y)))
        return F.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """He et al. (2015); the names of the layers are torchvision's, so checkpoints fit both.

    Args:
        depths: Blocks in each stage; a stage after the first halves the size of the image.
        bottleneck: Whether blocks have three convolutions, and four times as many channels.
        width: Channels of the first stage; each later one has twice as many.
        classes: Number of outputs.
        small: For images of 32x32: the first convolution is 3x3 without a stride, there is no
            first pooling, and the running statistics move faster, as in `convolution`.
    """

    def __init__(
        self,
        depths: Sequence[int],
        *,
        bottleneck: bool = False,
        width: int = 64,
        classes: int = 1000,
        small: bool = False,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = _normed(3, width, 3) if small else _normed(3, width, 7, 2)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        self.stages, channels = [f"layer{number}" for number in range(1, len(depths) + 1)], width
        for number, (name, depth) in enumerate(zip(self.stages, depths, strict=True)):
            blocks = []
            for stride in [2 if number else 1] + [1] * (depth - 1):
                blocks.append(_Residual(channels, width, stride, bottleneck=bottleneck))
                channels = 4 * width if bottleneck else width
            self.add_module(name, nn.Sequential(*blocks))
            width *= 2
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif small and isinstance(module, nn.BatchNorm2d):
                module.momentum = STATISTICS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (n, 3, height, width) to logits (n, classes)."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return cast(torch.Tensor, self.fc(x.mean((2, 3))))


def _normed(channels: int, out: int, kernel_size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    layer = nn.Conv2d(channels, out, kernel_size, stride, kernel_size // 2, bias=False)
    return layer, nn.BatchNorm2d(out)
