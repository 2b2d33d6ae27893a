"""Networks by name: torchvision's where it is installed, a ResNet family of our own elsewhere.

The names of our layers are those of torchvision's ResNets, so checkpoints of one load into the
other.
"""

import types

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["build", "names"]

# Their training output is a tuple of the main and auxiliary classifiers'.
AUXILIARY_OUTPUTS = ("inception_v3", "googlenet")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1  # output channels over ``width``

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, channels, H, W) to (N, width, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the 3x3 one has the stride."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = shortcut(channels, 4 * width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, channels, H, W) to (N, 4 * width, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


def shortcut(channels: int, out: int, stride: int) -> nn.Sequential:
    """A projection where the shape changes, else nothing."""
    if stride == 1 and channels == out:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class ResNet(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition" (2015).

    Args:
        block: ``BasicBlock`` or ``Bottleneck``.
        depths: Blocks in each stage; a stage after the first halves the size of the image.
        width: Channels of the first stage; each later one has twice as many.
        classes: Number of outputs.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, ...],
        width: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels, self.stages = width, []
        for number, depth in enumerate(depths, 1):
            blocks = []
            for index in range(depth):
                stride = 2 if number > 1 and index == 0 else 1
                blocks.append(block(channels, width, stride))
                channels = width * block.expansion
            self.stages.append(f"layer{number}")
            self.add_module(self.stages[-1], nn.Sequential(*blocks))
            width *= 2
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (N, 3, H, W) to logits (N, classes)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return self.fc(x.mean(dim=(2, 3)))


OURS = {
    "resnet18": (BasicBlock, (2, 2, 2, 2), 64),
    "resnet34": (BasicBlock, (3, 4, 6, 3), 64),
    "resnet50": (Bottleneck, (3, 4, 6, 3), 64),
    "resnet101": (Bottleneck, (3, 4, 23, 3), 64),
    "resnet152": (Bottleneck, (3, 8, 36, 3), 64),
    "tiny": (BasicBlock, (1, 1), 8),  # for tests, and for a first try on a CPU
}


def torchvision_models() -> types.ModuleType | None:
    """``torchvision.models``, or ``None`` where torchvision is not installed."""
    try:
        import torchvision.models
    except ModuleNotFoundError:
        return None
    return torchvision.models


def names() -> list[str]:
    """What ``build`` knows."""
    theirs = torchvision_models()
    listed = theirs.list_models(module=theirs) if theirs else []
    return sorted({*listed, *OURS} - {*AUXILIARY_OUTPUTS})


def build(arch: str, classes: int, *, pretrained: bool = False) -> nn.Module:
    """Make a network with float32 weights on the CPU.

    Args:
        arch: One of ``names()``.
        classes: Number of outputs.
        pretrained: Load torchvision's first ImageNet weights, which have 1000 classes.

    Raises:
        ValueError: ``arch`` is unknown or has auxiliary outputs, or there are no such weights.
    """
    if arch in AUXILIARY_OUTPUTS:
        raise ValueError(
            f"{arch} is not supported: in training it also returns the logits of auxiliary "
            "classifiers, which this example's loss does not take."
        )
    if arch not in names():
        raise ValueError(f"there is no network {arch!r}; choose from {', '.join(names())}.")
    theirs = torchvision_models()
    if pretrained and (theirs is None or arch == "tiny"):
        raise ValueError("--pretrained needs torchvision and one of its networks.")
    if pretrained and classes != 1000:
        raise ValueError(f"--pretrained weights have 1000 classes; the data have {classes}.")
    if theirs is not None and arch != "tiny":
        weights = "IMAGENET1K_V1" if pretrained else None
        return theirs.get_model(arch, weights=weights, num_classes=classes)
    block, depths, width = OURS[arch]
    return ResNet(block, depths, width, classes)
