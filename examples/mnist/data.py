"""28x28 images of handwritten digits: scikit-learn's, which it ships, or the files of MNIST."""

import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from apex.commands.bench.training.tasks.digits import originals

AT_LEAST = 20_000  # images to train on: 200 steps of 100 per epoch
SIDE, DIGIT = 28, 20  # of an image, and of the digit in it, as in MNIST

FILES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


def load(
    folder: str | None = None, limit: int | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """Load images ``(n, 1, 28, 28)`` in [0, 1] and labels: a set to train on, a set to test on.

    Args:
        folder: Where the four files of MNIST are, as such or as ``.gz``; None: scikit-learn's.
        limit: Take only so many images to train on.
    """
    images, labels, *test = _digits() if folder is None else _mnist(Path(folder))
    return TensorDataset(images[:limit], labels[:limit]), TensorDataset(*test)


def _mnist(folder: Path) -> list[torch.Tensor]:
    images, labels, test_images, test_labels = (_idx(folder, name) for name in FILES)
    return [_scaled(images), labels.long(), _scaled(test_images), test_labels.long()]


def _digits() -> list[torch.Tensor]:
    """Split the 1,797 digits first; then make shifted copies of the training digits alone."""
    train_x, train_y, test_x, test_y = originals()
    places = (SIDE - DIGIT + 1) ** 2
    order = torch.rand(len(train_x), places, generator=torch.Generator().manual_seed(0)).argsort(1)
    copies = -(-AT_LEAST // len(train_x))  # each at a place of its own
    train_y, train_x = train_y.repeat(copies), _enlarged(train_x).repeat(copies, 1, 1, 1)
    train_x = _placed(train_x, order[:, :copies].T.flatten())
    test_x = _placed(_enlarged(test_x), torch.full((len(test_x),), places // 2))  # in the middle
    return [train_x, train_y, test_x, test_y]


def _enlarged(pixels: torch.Tensor) -> torch.Tensor:
    return F.interpolate(pixels, size=(DIGIT, DIGIT), mode="bilinear", align_corners=False)


def _placed(digits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Put each digit into an empty image, at a place from 0 (top left) to 80 (bottom right)."""
    images = torch.zeros(len(digits), 1, SIDE, SIDE)
    for image, digit, place in zip(images, digits, places.tolist(), strict=True):
        y, x = divmod(place, SIDE - DIGIT + 1)
        image[:, y : y + DIGIT, x : x + DIGIT] = digit
    return images


def _scaled(images: torch.Tensor) -> torch.Tensor:
    return images.unsqueeze(1).float() / 255


def _idx(folder: Path, name: str) -> torch.Tensor:
    """Read a file of bytes in the IDX format: two zeros, a type, the number of sizes, sizes."""
    for file, opened in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if file.is_file():
            with opened(file, "rb") as stream:
                content = stream.read()
            break
    else:
        raise SystemExit(f"--data {folder}: neither {name} nor {name}.gz is there")
    dimensions = content[3]
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, 4 + 4 * dimensions, 4)]
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * dimensions)
    return values.reshape(sizes)
