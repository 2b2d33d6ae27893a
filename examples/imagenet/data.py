"""Images for training and evaluation: folders of files, or synthetic ones.

A data set's item is asked for by ``(epoch, index)`` and depends on these and the seed alone, random
crops included. Worker processes, the number of ranks and a resume in mid-epoch change nothing.

Items are uint8: a quarter of float32's bytes between the processes and to the device, where
``on_device`` normalises them.
"""

import math
import os
import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "Batch",
    "ImageFolder",
    "Images",
    "Synthetic",
    "load_batches",
    "on_device",
    "seed_of",
    "splits",
]

Item = tuple[torch.Tensor, int]  # uint8 image (3, H, W), label
Batch = tuple[torch.Tensor, torch.Tensor]  # (N, 3, H, W), int64 labels (N)

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)  # of ImageNet's training images, by channel
STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
KEPT = 224 / 256  # the part of the shorter side that evaluation sees


def seed_of(*parts: int | str) -> int:
    """Mix numbers into a seed of 63 bits, the same in every process."""
    return random.Random("/".join(map(str, parts))).getrandbits(63)


class Images(Dataset[Item]):
    """A data set of which the classes and the number of items are known."""

    classes: list[str]

    def __len__(self) -> int:
        raise NotImplementedError


class ImageFolder(Images):
    """Image files in ``root/<class>/``, at any depth; labels are the sorted classes' positions.

    Args:
        root: Folder with a folder for each class.
        size: Height and width of the items.
        seed: What the random crops depend on, with epoch and index; ``None`` for centre crops.

    Raises:
        ModuleNotFoundError: Pillow, which reads the files, is not installed.
        ValueError: There is no such folder, or there are no images in it.
    """

    def __init__(self, root: str, size: int, seed: int | None) -> None:
        try:
            import PIL  # noqa: F401
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "reading image files needs Pillow: pip install pillow. "
                "Without DIR this example trains on synthetic images."
            ) from None
        if not os.path.isdir(root):
            raise ValueError(f"there is no folder {root}; DIR must contain train/ and val/.")
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.files = [
            (os.path.join(folder, name), label)
            for label, class_name in enumerate(self.classes)
            for folder, _, names in sorted(os.walk(os.path.join(root, class_name)))
            for name in sorted(names)
            if name.lower().endswith(SUFFIXES)
        ]
        if not self.files:
            raise ValueError(
                f"no images in {root}; it must contain a folder for each class, with files "
                f"that end in {', '.join(SUFFIXES)}."
            )
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: tuple[int, int]) -> Item:
        from PIL import Image

        epoch, index = key
        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        if self.seed is None:
            return pixels(resized(image, centre(image.size, KEPT), self.size)), label
        rng = random.Random(seed_of(self.seed, epoch, index))
        image = resized(image, random_box(image.size, rng), self.size)
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return pixels(image), label


Box = tuple[float, float, float, float]  # left, top, right, bottom


def random_box(size: tuple[int, int], rng: random.Random) -> Box:
    """A box of 8 % to 100 % of the area, its sides 3:4 to 4:3, as in Inception's training."""
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return (left, top, left + w, top + h)
    return centre(size, 1.0)  # none fitted: the image is long and narrow


def centre(size: tuple[int, int], part: float) -> Box:
    """A square in the middle whose side is ``part`` of the shorter side."""
    width, height = size
    side = min(size) * part
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side)


def resized(image: "Image.Image", box: Box, size: int) -> "Image.Image":
    """Crop to ``box`` and scale to ``size`` x ``size``."""
    from PIL import Image

    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def pixels(image: "Image.Image") -> torch.Tensor:
    """The uint8 tensor (3, H, W) of an RGB image."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()


class Synthetic(Images):
    """A fixed coarse pattern for each class, plus noise: a network learns it within an epoch.

    Args:
        count: Number of images.
        classes: Number of classes, which follow each other.
        size: Height and width.
        split: Images of another split have the same patterns with other noise.
    """

    def __init__(self, count: int, classes: int, size: int, split: str) -> None:
        self.count, self.size, self.split = count, size, split
        self.classes = [str(label) for label in range(classes)]
        generator = torch.Generator().manual_seed(seed_of("patterns"))
        self.patterns = torch.randn(classes, 3, 4, 4, generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: tuple[int, int]) -> Item:
        _, index = key
        label = index % len(self.classes)
        generator = torch.Generator().manual_seed(seed_of(self.split, index))
        noise = torch.randn(3, self.size, self.size, generator=generator)
        cells = torch.arange(self.size) * 4 // self.size  # F.interpolate would be cast at O1
        pattern = self.patterns[label][:, cells][:, :, cells]
        return (128 + 32 * (pattern + noise)).clamp(0, 255).to(torch.uint8), label


def splits(args: Any) -> tuple[Images | None, Images]:
    """The images to train on and those to evaluate on, as the options say.

    Returns:
        The training set, ``None`` with ``--evaluate``, and the validation set.

    Raises:
        ValueError: DIR is not a folder of images, or its two parts have other classes.
    """
    if args.dir is None:
        count, shape = args.synthetic_images, (args.classes, args.image_size)
        val_set = Synthetic(math.ceil(count / 4), *shape, split="val")
        return None if args.evaluate else Synthetic(count, *shape, split="train"), val_set
    train, val = (os.path.join(args.dir, name) for name in ("train", "val"))
    val_images = ImageFolder(val, args.image_size, None)
    if args.evaluate:
        return None, val_images
    train_images = ImageFolder(train, args.image_size, args.seed)
    if train_images.classes != val_images.classes:
        odd = sorted({*train_images.classes} ^ {*val_images.classes})
        raise ValueError(
            f"{train} and {val} must have the same class folders; in one of them alone: "
            f"{', '.join(odd[:10])}."
        )
    return train_images, val_images


def load_batches(
    dataset: Images,
    keys: list[tuple[int, int]],
    batch_size: int,
    *,
    first: int = 0,
    workers: int = 0,
    pin: bool = False,
) -> Iterable[Batch]:
    """Load ``keys`` in batches, from batch ``first`` on; the last one may be smaller."""
    starts = range(first * batch_size, len(keys), batch_size)
    batches = [keys[start : start + batch_size] for start in starts]
    return DataLoader(dataset, batch_sampler=batches, num_workers=workers, pin_memory=pin)


def on_device(
    batches: Iterable[Batch],
    device: torch.device,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Iterator[Batch]:
    """Yield normalised float32 images and their labels on ``device``.

    On a GPU a batch is copied and normalised on a stream of its own while the one before it is in
    use; on a CPU it is done when the batch is asked for, with the same result.
    """
    mean = torch.tensor(MEAN, device=device).view(3, 1, 1)
    std = torch.tensor(STD, device=device).view(3, 1, 1)

    def moved(images: torch.Tensor, labels: torch.Tensor) -> Batch:
        images = images.to(device, non_blocking=True).to(memory_format=memory_format)
        return (images.float() - mean) / std, labels.to(device, non_blocking=True)

    if device.type != "cuda":
        for batch in batches:
            yield moved(*batch)
        return
    side, before = torch.cuda.Stream(device), None
    side.wait_stream(torch.cuda.current_stream(device))  # mean and std are made there
    for batch in batches:
        with torch.cuda.stream(side):
            current = moved(*batch), side.record_event()
        if before is not None:
            yield handed_over(*before)
        before = current
    if before is not None:
        yield handed_over(*before)


def handed_over(batch: Batch, ready: torch.cuda.Event) -> Batch:
    """Make the current stream wait for ``batch``, and its memory live until that is done with it.

    Without ``record_stream`` the allocator would give the memory to the next copy, which does not
    wait for the current stream.
    """
    stream = torch.cuda.current_stream(batch[0].device)
    stream.wait_event(ready)
    for tensor in batch:
        tensor.record_stream(stream)
    return batch
