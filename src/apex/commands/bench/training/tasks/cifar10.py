"""CIFAR-10 from its binary files: a byte for the class and 3,072 for the image, 10,000 times each.

The files are those of ``cifar-10-binary.tar.gz``, in ``--data`` or in its folder
``cifar-10-batches-bin``. They are bytes; CIFAR-10 as pickles, which can run code, is not read.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from apex.commands.bench.training.tasks.classification import Classification, Split
from apex.commands.bench.training.tasks.networks import ResNet, vgg16
from apex.commands.bench.training.tasks.task import TaskOptions
from apex.commands.command_line import UsageError

__all__ = ["load", "resnet18", "vgg"]

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"  # in the archive
TRAINING = [f"data_batch_{number}.bin" for number in range(1, 6)]
TEST = ["test_batch.bin"]
IN_FILE, BYTES = 10_000, 1 + 3 * 32 * 32
QUICK, QUICK_TEST = 2048, 1000  # images
# Mean and standard deviation of the training images' channels, of values in [0, 1].
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def load(options: TaskOptions) -> Split:
    """Read the images, with mean 0 and standard deviation 1.

    Raises:
        UsageError: There is no such folder, or its files are not CIFAR-10's.
    """
    folder = _folder(options.data)
    train_x, train_y = _read(folder, TRAINING[:1] if options.quick else TRAINING)
    test_x, test_y = _read(folder, TEST)
    few, few_tests = (QUICK, QUICK_TEST) if options.quick else (None, None)
    train_x, test_x = _normal(train_x[:few]), _normal(test_x[:few_tests])
    return Split(train_x, train_y[:few], test_x, test_y[:few_tests]).to(options.device)


def _folder(data: Path | None) -> Path:
    for folder in (data, data / FOLDER) if data else ():
        if (folder / TEST[0]).is_file():
            return folder
    where = f"--data {data}: there is no {TEST[0]}" if data else "--task cifar10-... needs --data"
    raise UsageError(f"{where}; pass the folder with the unpacked files of {URL}")


def _read(folder: Path, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Give bytes ``(n, 3, 32, 32)`` and classes ``(n)`` of some files."""
    contents = []
    for name in names:
        try:
            content = np.fromfile(folder / name, dtype=np.uint8)
        except OSError as error:
            raise UsageError(f"--data {folder / name}: {error.strerror}") from None
        if content.size != IN_FILE * BYTES:
            raise UsageError(
                f"--data {folder / name}: {content.size} bytes; CIFAR-10's files have "
                f"{IN_FILE * BYTES}"
            )
        contents.append(content.reshape(IN_FILE, BYTES))
    rows = torch.from_numpy(np.concatenate(contents))
    classes = rows[:, 0].long()
    if int(classes.max()) > 9:
        raise UsageError(
            f"--data {folder}: the files have classes above 9, so they are not CIFAR-10's"
        )
    return rows[:, 1:].reshape(-1, 3, 32, 32), classes


def _normal(images: torch.Tensor) -> torch.Tensor:
    images = images.to(torch.float32)
    mean, deviation = (images.new_tensor(values).reshape(3, 1, 1) for values in (MEAN, DEVIATION))
    return (images / 255 - mean) / deviation


def vgg(options: TaskOptions) -> Classification:
    """The network of tutorial T2 and its data: 14,724,042 parameters."""
    return Classification(load(options), model=partial(vgg16, 3), epochs=10)


def resnet18(options: TaskOptions) -> Classification:
    """A network with shortcuts on the same data: 11,173,962 parameters."""
    model = partial(ResNet, (2, 2, 2, 2), classes=10, small=True)
    return Classification(load(options), model=model, epochs=10)
