"""ResNet-50 at 224x224, as published tables have it.

Without ``--data`` each epoch has one batch of random images with random classes and trains on it
again and again; there is no accuracy. With ``--data`` there is one folder for each class, and the
last tenth of the files of a class, by name, is held out.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apex.bench.cli import UsageError
from apex.bench.training.tasks.classification import Classification
from apex.bench.training.tasks.networks import ResNet
from apex.bench.training.tasks.task import TaskOptions

__all__ = ["resnet50"]

SIZE, CLASSES = 224, 1000
STEPS, QUICK = 50, 5  # in an epoch of random images
QUICK_FILES = 64  # to train on
AT_ONCE = 64  # test images in a forward pass
LR = 0.02
WORKERS = 8  # at most, that read files
ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
# Of ImageNet's channels, of values in [0, 1].
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Files = list[tuple[Path, int]]  # with their classes


def resnet50(options: TaskOptions) -> Classification:
    """1,000 classes and 25,557,032 parameters, or the classes in the folder."""
    if options.data is None:
        random = _random_images(options)
        return Classification(
            model=_model(CLASSES), loader=random, accuracy=None, test_loss=None, lr=LR
        )
    train, held, classes = _listed(options.data)
    if options.quick:  # every so many, so that there are several classes
        train, held = (part[:: max(1, len(part) // QUICK_FILES)] for part in (train, held))

    def loader(batch_size: int, seed: int) -> Iterable[Any]:
        if batch_size > len(train):
            raise UsageError(f"--batch {batch_size}: there are {len(train)} images")
        random = torch.Generator().manual_seed(seed)
        return _read(train, batch_size, options, shuffle=True, generator=random, drop_last=True)

    def test() -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for x, y in _read(held, AT_ONCE, options):
            yield x.to(options.device), y.to(options.device)

    return Classification(
        model=_model(classes), loader=loader, test=test, test_size=len(held), lr=LR
    )


def _model(classes: int) -> Callable[[], ResNet]:
    return partial(ResNet, (3, 4, 6, 3), bottleneck=True, classes=classes)


def _random_images(options: TaskOptions) -> Callable[[int, int], Iterable[Any]]:
    def loader(batch_size: int, seed: int) -> Iterable[Any]:
        random = torch.Generator().manual_seed(seed)
        images = torch.randn(batch_size, 3, SIZE, SIZE, generator=random)
        classes = torch.randint(CLASSES, (batch_size,), generator=random)
        batch = images.to(options.device), classes.to(options.device)
        return [batch] * (QUICK if options.quick else STEPS)

    return loader


def _read(files: Files, batch_size: int, options: TaskOptions, **order: Any) -> Iterable[Any]:
    """Read images and their classes in processes of their own."""
    data: Any = files  # a list is a dataset of torch's
    return torch.utils.data.DataLoader(
        data,
        batch_size,
        collate_fn=_images,
        num_workers=0 if options.quick else min(WORKERS, os.cpu_count() or 1),
        pin_memory=options.device.type == "cuda",
        **order,
    )


def _images(files: Files) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([_image(path) for path, _ in files]), torch.tensor([n for _, n in files])


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
