"""ResNet-50 at 224x224, as published tables have it.

Without ``--data`` each epoch has one batch of random images with random classes and trains on it
again and again; there is no accuracy. With ``--data`` there is one folder for each class, and the
last tenth of the files of a class, by name, is held out.
"""

import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from apex.bench.cli import UsageError
from apex.bench.training.tasks.task import Task, TaskOptions

__all__ = ["ResNet50"]

SIZE, CLASSES = 224, 1000
STEPS, QUICK = 50, 5  # in an epoch of random images
QUICK_FILES = 64  # to train on
AT_ONCE = 64  # images in a forward pass of the evaluation
WORKERS = 8  # at most, that read files
ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
# Of ImageNet's channels, of values in [0, 1].
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Files = list[tuple[Path, int]]  # with their classes


class ResNet50(Task):
    """Cross-entropy of 1,000 classes, or of those in the folder."""

    lr = 0.02
    unit = "images"

    def __init__(self, options: TaskOptions) -> None:
        self._make = _maker()
        self._options = options
        self._classes = CLASSES
        if options.data is None:
            return
        self._train, self._held, self._classes = _listed(options.data)
        if options.quick:  # every so many, so that there are several classes
            self._train = self._train[:: max(1, len(self._train) // QUICK_FILES)]
            self._held = self._held[:: max(1, len(self._held) // QUICK_FILES)]
        self.accuracy = self._accuracy

    def model(self) -> nn.Module:
        """Build it with random weights: 25,557,032 parameters for 1,000 classes."""
        return cast(nn.Module, self._make(num_classes=self._classes))

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Take the model's outputs in float32."""
        x, y = batch
        return F.cross_entropy(model(x).float(), y)

    def loader(self, batch_size: int, seed: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
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

    def _accuracy(self, model: nn.Module) -> float:
        device = self._options.device
        batches = self._files(self._held, AT_ONCE, None)
        right = sum(int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in batches)
        return 100 * right / len(self._held)

    def _files(
        self, files: Files, batch_size: int, random: torch.Generator | None
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
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


def _maker() -> Any:
    """Find a package that has the network."""
    why = []
    for module in ("torchvision.models", "timm.models.resnet"):
        try:
            return importlib.import_module(module).resnet50
        except Exception as error:  # noqa: BLE001  one built for another torch raises many kinds
            why.append(f"{type(error).__name__}: {error}")
    raise UsageError(
        f"--task resnet50 needs torchvision or timm, built for this torch ({'; '.join(why)})"
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
