"""The networks for small images: VGG16 and ResNet-18, as they are used at 32x32."""

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["convolution", "resnet18", "vgg16"]

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

    Configuration D of Simonyan and Zisserman (2014), with batchnorm, and with one linear layer in
    place of three, because 32x32 ends at 1x1.

    Args:
        channels: Of the images.
        width: Channels of the first layers; 64 in the paper. The last have 8 times as many.
        classes: Number of outputs.
    """
    layers: list[nn.Module] = []
    for convolutions, times in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        for _ in range(convolutions):
            layers += convolution(channels, times * width)
            channels = times * width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


class _Block(nn.Module):
    """Two convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        first, second = convolution(channels, out, stride=stride), convolution(out, out)[:2]
        self.main = nn.Sequential(*first, *second)
        changes = stride > 1 or channels != out
        projection = convolution(channels, out, 1, stride, 0)[:2] if changes else []
        self.shortcut = nn.Sequential(*projection)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.shortcut(x))


def resnet18(classes: int = 10) -> nn.Sequential:
    """Build ResNet-18 (He et al., 2015) for colour images of 32x32.

    The first convolution is 3x3 without stride and there is no first pooling, as usual at 32x32.
    """
    layers, channels = convolution(3, 64), 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_Block(channels, out, stride), _Block(out, out, 1)]
        channels = out
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )
