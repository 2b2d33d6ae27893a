"""Scikit-learn's handwritten digits, enlarged to enough images for large batches.

The 1,797 digits are split first, always alike, and a third of them is held out. Each image to train
on is one of the others, shifted by up to a pixel of its 8x8 and rotated by up to 10 degrees.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex.commands.bench.training.tasks.classification import Classification, Split
from apex.commands.bench.training.tasks.networks import convolution, vgg16
from apex.commands.bench.training.tasks.task import TaskOptions

__all__ = ["cnn", "enlarged", "load", "mlp", "originals", "vgg"]

TRAINING, QUICK = 20_480, 4_096  # images to train on: whole batches of 2048
SHIFT = 1.0  # pixels of 8x8
ROTATION = 10.0  # degrees


def originals() -> Split:
    """Give images ``(n, 1, 8, 8)`` in [0, 1]; a third of each digit's, always the same, to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, labels, test_size=1 / 3, stratify=labels, random_state=0)
    train_x, test_x = (torch.from_numpy(x).float().reshape(-1, 1, 8, 8) for x in parts[:2])
    return Split(train_x, torch.from_numpy(parts[2]), test_x, torch.from_numpy(parts[3]))


def load(size: int, options: TaskOptions) -> Split:
    """Make the images; the same bits at every call.

    Args:
        size: Height and width. The images are in [0, 1].
        options: Less data if ``quick``; the device that the tensors are put on.
    """
    train_x, train_y, test_x, test_y = originals()
    wanted = QUICK if options.quick else TRAINING
    sources = torch.arange(wanted, device="cpu") % len(train_x)
    made: Any = {"device": "cpu", "dtype": torch.float32}
    random = torch.Generator("cpu").manual_seed(0)
    degrees = ROTATION * (2 * torch.rand(wanted, generator=random, **made) - 1)
    shifts = SHIFT * (2 * torch.rand(wanted, 2, generator=random, **made) - 1)
    train_x = enlarged(train_x[sources], size, degrees, shifts)
    few = len(test_x)
    test_x = enlarged(test_x, size, torch.zeros(few, **made), torch.zeros(few, 2, **made))
    return Split(train_x, train_y[sources], test_x, test_y).to(options.device)


def enlarged(
    images: torch.Tensor, size: int, degrees: torch.Tensor, shifts: torch.Tensor
) -> torch.Tensor:
    """Resample images ``(n, 1, 8, 8)`` at ``size``, bilinearly; what comes into view is 0.

    Args:
        images: What to resample.
        size: New height and width.
        degrees: ``(n)``, how far each is turned about its centre, counter-clockwise.
        shifts: ``(n, 2)``, how far to the right and down each is moved, in its own pixels.
    """
    angles = degrees * (math.pi / 180)
    cosines, sines = angles.cos(), angles.sin()
    # affine_grid asks where each output pixel comes from; half the image is 1.
    offsets = -shifts / (images.shape[-1] / 2)
    rows = [
        torch.stack([cosines, -sines, cosines * offsets[:, 0] - sines * offsets[:, 1]], 1),
        torch.stack([sines, cosines, sines * offsets[:, 0] + cosines * offsets[:, 1]], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), [len(images), 1, size, size], align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def mlp(options: TaskOptions) -> Classification:
    """A multi-layer perceptron: 199,818 parameters."""
    return Classification(load(16, options), model=_mlp, epochs=5)


def cnn(options: TaskOptions) -> Classification:
    """Few products and large activations: 79,082 parameters."""
    return Classification(load(16, options), model=_cnn, optimizer="FusedAdam", lr=0.003, epochs=3)


def vgg(options: TaskOptions) -> Classification:
    """The networks of tutorial T2, small enough for a CPU: 922,842 parameters."""
    return Classification(load(32, options), model=partial(vgg16, 1, width=16), epochs=2)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(256, 384), nn.ReLU()),
        *(nn.Linear(384, 256), nn.ReLU()),
        nn.Linear(256, 10),
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        *convolution(1, 32),
        *convolution(32, 32, 2, 2, 0),
        *convolution(32, 64, 2, 2, 0),
        nn.Flatten(),
        *(nn.Linear(1024, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )
