"""The ImageNet example with a tiny network on tiny images, run in this process."""

import contextlib
import functools
from unittest import mock

import torch
from torch import nn

from apex import amp
from tests.examples.imported import EXAMPLES, killed_at, program

FOLDER = EXAMPLES / "imagenet"
LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"

# Three steps an epoch, the last one of a smaller batch; batches of 3 and 4 images to evaluate.
TINY = "-a tiny --image-size 16 --classes 3 --synthetic-images 28 -b 10 -j 0 -p 1 --lr 10"
SHORT = f"{TINY} --epochs 2 --checkpoint-freq 2 --opt-level"

main_amp = program("imagenet", "main_amp")
checkpoint, data, meters, models = (
    getattr(main_amp, name) for name in ("checkpoint", "data", "meters", "models")
)


def with_dropout(arch, classes, **options):
    """A network whose outputs depend on the state of the random generator too."""
    return nn.Sequential(build(arch, classes, **options), nn.Dropout(0.5))


build = models.build


def run(words, moment=None, *, dropout=True):
    """Run the example in this process, on a CPU; say whether it ended by itself.

    ``moment`` is the n-th call of a function, at which the run is killed.
    """
    models.build = with_dropout if dropout else build
    killed = contextlib.nullcontext()
    if moment is not None:
        owner, _, name = moment[0].rpartition(".")
        owner = functools.reduce(getattr, owner.split(".")[1:], main_amp)
        killed = killed_at(owner, name, moment[1])
    try:
        with mock.patch("torch.cuda.is_available", return_value=False), killed:
            main_amp.main(words.split())
    finally:
        models.build = build
        amp.reset()
    return moment is None


def read(path):
    return torch.load(path, weights_only=True)
