"""Options of ``main_amp.py``: NVIDIA's, and those of synthetic data and exact resuming."""

import argparse
from collections.abc import Callable, Sequence

__all__ = ["parse"]


def true_or_false(text: str) -> bool:
    """What ``--channels-last`` may be followed by; NVIDIA's took any text, "False" too, as true."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(
            f"{text!r} was given, True or False is allowed; put DIR before this option"
        )
    return text.lower() == "true"


def at_least(least: int) -> Callable[[str], int]:
    """A whole number from ``least`` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} was given, it must be at least {least}")
        return int(text)

    number.__name__ = "whole number"  # argparse names it where text is no number
    return number


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the program with a message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="main_amp.py", description="Train an image classifier in mixed precision."
    )
    add = parser.add_argument
    add("dir", metavar="DIR", nargs="?", help="folder with train/ and val/; synthetic data without")
    add("-a", "--arch", default="resnet18", help="network (default: %(default)s)")
    add("-j", "--workers", type=at_least(0), default=4, help="data loading processes per rank")
    add("--epochs", type=at_least(0), default=90, help="number of epochs (default: %(default)s)")
    add("--start-epoch", type=at_least(0), default=0, help="first epoch; --resume has its own")
    add("-b", "--batch-size", type=at_least(1), default=256, help="images per process and step")
    add("--lr", "--learning-rate", type=float, default=0.1, help="for a global batch of 256")
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", "--wd", type=float, default=1e-4)
    add("-p", "--print-freq", type=at_least(1), default=10, help="steps between two lines")
    add("--resume", metavar="FILE", help="checkpoint to go on from; auto: the one here, if any")
    add("-e", "--evaluate", action="store_true", help="evaluate on the validation set and end")
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--prof", metavar="N", type=at_least(0), help="profile ten steps from step N on, and end")
    add(
        "--deterministic",
        action="store_true",
        help="same bits in each run on a GPU; slower; warns where that has no such kernel",
    )
    add("--seed", type=int, default=0, help="of weights, data order, crops, dropout")
    add("--local_rank", "--local-rank", type=at_least(0), help="set by launchers: index of the GPU")
    add("--sync_bn", action="store_true", help="batchnorm over all processes")
    levels = ["O0", "O1", "O2", "O3", "O4", "O5"]
    add("--opt-level", choices=levels, default="O1", help="default: %(default)s, as in amp")
    add("--keep-batchnorm-fp32", choices=["True", "False"], help="default: the level's own")
    add("--loss-scale", metavar="SCALE", help="a number, or dynamic; default: the level's own")
    add("--channels-last", nargs="?", const=True, default=False, type=true_or_false)
    add("--checkpoint-freq", metavar="STEPS", type=at_least(1), help="save within epochs too")
    add("--image-size", type=at_least(1), default=224, help="height and width (default: 224)")
    add("--synthetic-images", type=at_least(1), default=1280, help="training images without DIR")
    add("--classes", type=at_least(1), default=10, help="classes without DIR")
    return parser.parse_args(argv)
