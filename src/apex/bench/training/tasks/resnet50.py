"""ResNet-50 at 224x224, as published tables have it.

Without ``--data`` each epoch has one batch of random images with random classes and trains on it
again and again; there is no accuracy. With ``--data`` there is one folder for each class, and the
last tenth of the files of a class, by name, is held out.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apex.bench.cli import UsageError
from apex.bench.training.tasks.classification import Classification
from apex.bench.training.tasks.networks import ResNet
from apex.bench.training.tasks.task import TaskOptions

__all__ = ["ResNet50"]

SIZE, CLASSES = 224, 1000
STEPS, QUICK = 50, 5  # in an epoch of random images
QUICK_FILES = 64  # to train on
WORKERS = 8  # at most, that read files
ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
# Of ImageNet's channels, of values in [0, 1].
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Files = list[tuple[Path, int]]  # with their classes


class ResNet50(Classification):
    """1,000 classes, or those in the folder."""

    lr = 0.02
    at_once = 64

    def __init__(self, options: TaskOptions) -> None:
        self._options, self._classes = options, CLASSES
        if options.data is None:
            self.accuracy = self.test_loss = None  # type: ignore[assignment, method-assign]
            return
        self._train, self._held, self._classes = _listed(options.data)
        if options.quick:  # every so many, so that there are several classes
            self._train, self._held = (
                files[:: max(1, len(files) // QUICK_FILES)] for files in (self._train, self._held)
            )
        self.test_size = len(self._held)

    def model(self) -> nn.Module:
        """Build it with random weights: 25,557,032 parameters for 1,000 classes."""
        return ResNet((3, 4, 6, 3), bottleneck=True, classes=self._classes)

    def loader(self, batch_size: int, seed: int) -> Iterable[Any]:
        """Give images and classes."""
        random = torch.Generator().manual_seed(seed)
        if self._options.data is not None:
            if batch_size > len(self._train):
                raise UsageError(f"--batch {batch_size}: there are {len(self._train)} images")
            return self._files(self._train, batch_size, random)
        images = torch.randn(batch_size, 3, SIZE, SIZE, generator=random)
        classes = torch.randint(CLASSES, (batch_size,), generator=random)
        batch = images.to(self._options.device), classes.to(self._options.device)
        return [batch] * (QUICK if self._options.quick else STEPS)

    def test(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Read the images held out."""
        for x, y in self._files(self._held, self.at_once, None):
            yield x.to(self._options.device), y.to(self._options.device)

    def _files(
        self, files: Files, batch_size: int, random: torch.Generator | None
    ) -> Iterable[Any]:
        """Read files, in a random order and in whole batches where there is a generator."""
        return torch.utils.data.DataLoader(
            _Images(files),
            batch_size,
            shuffle=random is not None,
            generator=random,
            drop_last=random is not None,
            num_workers=0 if self._options.quick else min(WORKERS, os.cpu_count() or 1),
            pin_memory=self._options.device.type == "cuda",
        )


class _Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Image files with their classes, read when they are asked for."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, number = self._files[index]
        return _image(path), number


def _listed(folder: Path) -> tuple[Files, Files, int]:
    """List the files to train on and those held out, and count the classes."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    except OSError as error:
        raise UsageError(f"--data {folder}: {error.strerror}") from None
    train: Files = []
    held: Files = []
    for number, name in enumerate(names):
        files = sorted(f for f in (folder / name).rglob("*") if f.suffix.lower() in ENDINGS)
        kept = len(files) - -(-len(files) // 10)
        train += [(file, number) for file in files[:kept]]
        held += [(file, number) for file in files[kept:]]
    if not train:
        endings = " ".join(sorted(ENDINGS))
        raise UsageError(
            f"--data {folder}: a folder for each class is needed, with files of {endings}"
        )
    return train, held, len(names)


def _image(path: Path) -> torch.Tensor:
    """Read the middle of an image, its shorter side enlarged or reduced to 256."""
    import numpy as np
    from PIL import Image, ImageOps

    with Image.open(path) as file:
        scaled = ImageOps.fit(file.convert("RGB"), (256, 256)).crop((16, 16, 240, 240))
    pixels = torch.from_numpy(np.array(scaled)).permute(2, 0, 1) / 255
    mean, deviation = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, DEVIATION))
    return (pixels - mean) / deviation
