"""Networks by name: torchvision's where it is installed, elsewhere the ResNets of ``apex bench``.

Their layers have the names of torchvision's, so checkpoints of one load into the other.
"""

import types

from torch import nn

from apex.commands.bench.training.tasks.networks import ResNet

__all__ = ["build", "names"]

# Their training output is a tuple of the main and auxiliary classifiers'.
AUXILIARY_OUTPUTS = ("inception_v3", "googlenet")


OURS = {
    "resnet18": {"depths": (2, 2, 2, 2)},
    "resnet34": {"depths": (3, 4, 6, 3)},
    "resnet50": {"depths": (3, 4, 6, 3), "bottleneck": True},
    "resnet101": {"depths": (3, 4, 23, 3), "bottleneck": True},
    "resnet152": {"depths": (3, 8, 36, 3), "bottleneck": True},
    "tiny": {"depths": (1, 1), "width": 8},  # for tests, and for a first try on a CPU
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
    return ResNet(**OURS[arch], classes=classes)
