"""The ImageNet example with a tiny network on tiny images, run in this process."""

import functools
import types
from unittest import mock

import torch
from torch import nn

from apex import amp
from tests.examples.imported import EXAMPLES, program

FOLDER = EXAMPLES / "imagenet"
LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"

# Three steps an epoch, the last one of a smaller batch; batches of 3 and 4 images to evaluate.
TINY = "-a tiny --image-size 16 --classes 3 --synthetic-images 28 -b 10 -j 0 -p 1 --lr 10"
SHORT = f"{TINY} --epochs 2 --checkpoint-freq 2 --opt-level"

main_amp = program("imagenet", "main_amp")
checkpoint, data, meters, models = (
    getattr(main_amp, name) for name in ("checkpoint", "data", "meters", "models")
)


class Killed(BaseException):
    """Ends a run; nothing may catch it."""


def kill_at(name, number):
    """Make a function of the example raise at its n-th call; give back what undoes it."""
    owner, _, attribute = name.rpartition(".")
    where = functools.reduce(getattr, owner.split("."), types.SimpleNamespace(main_amp=main_amp))
    original, left = getattr(where, attribute), [number]

    def dying(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return original(*args, **kwargs)

    setattr(where, attribute, dying)
    return lambda: setattr(where, attribute, original)


def with_dropout(arch, classes, **options):
    """A network whose outputs depend on the state of the random generator too."""
    return nn.Sequential(build(arch, classes, **options), nn.Dropout(0.5))


build = models.build


def run(words, moment=None, *, dropout=True):
    """Run the example in this process, on a CPU, killed at a moment or not."""
    models.build = with_dropout if dropout else build
    undo = kill_at(*moment) if moment else lambda: None
    try:
        with mock.patch("torch.cuda.is_available", return_value=False):
            main_amp.main(words.split())
    except Killed:
        return False
    finally:
        undo()
        models.build = build
        amp.reset()
    return True


def read(path):
    return torch.load(path, weights_only=True)
