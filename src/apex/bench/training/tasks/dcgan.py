"""DCGAN (Radford et al., 2016) on digits: two models, two optimizers, a scale for each loss.

A discriminator learns to tell digits (loss 0) from generated images (loss 1), and a generator
learns to have its images held for digits (loss 2). `examples/dcgan` is the same with pictures.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from apex.bench.training.tasks import digits
from apex.bench.training.tasks.batches import Batches
from apex.bench.training.tasks.task import Task, TaskOptions

if TYPE_CHECKING:
    from apex.bench.training.precision import Precision

__all__ = ["DcganDigits"]

SIZE = 16
NOISE = 64  # numbers that an image is made of
CHANNELS = 24  # of the layer next to the image


class DcganDigits(Task):
    """It has no accuracy; the loss that is shown is the discriminator's."""

    optimizer = "FusedAdam"
    lr = 0.001
    epochs = 3
    unit = "images"
    losses = 3

    def __init__(self, options: TaskOptions) -> None:
        self.images = 2 * digits.load(SIZE, options).train_x - 1  # as tanh gives them

    def model(self) -> Sequence[nn.Module]:
        """Build the discriminator and the generator."""
        return _discriminator(), _generator()

    def loader(self, batch_size: int, seed: int) -> "_WithNoise":
        """Give images, and the noise that as many others are made of."""
        return _WithNoise(Batches((self.images,), batch_size, seed), seed)

    def step(
        self,
        precision: "Precision",
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        batch: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Train the discriminator, then the generator."""
        discriminator, generator = models
        of_discriminator, of_generator = optimizers
        real, noise = batch
        of_discriminator.zero_grad()  # also of what the generator's loss left there
        with precision.forward():
            loss_real = _adversarial(discriminator(real), 1.0)
        precision.backward(loss_real, of_discriminator, 0)
        with precision.forward():
            fake = generator(noise)
            loss_fake = _adversarial(discriminator(fake.detach()), 0.0)
        precision.backward(loss_fake, of_discriminator, 1)
        precision.step(of_discriminator)

        of_generator.zero_grad()
        with precision.forward():
            loss_generator = _adversarial(discriminator(fake), 1.0)
        precision.backward(loss_generator, of_generator, 2)
        precision.step(of_generator)
        return loss_real.detach() + loss_fake.detach()


class _WithNoise:
    """Batches with noise, drawn on the CPU so that every device has the same."""

    def __init__(self, batches: Batches, seed: int) -> None:
        self._batches = batches
        self._seed = seed

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = torch.Generator().manual_seed(self._seed)
        for (images,) in self._batches:
            noise = torch.randn(len(images), NOISE, 1, 1, generator=random)
            yield images, noise.to(images.device)


def _adversarial(scores: torch.Tensor, truth: float) -> torch.Tensor:
    scores = scores.float()
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))


def _generator() -> nn.Module:
    """Map noise ``(n, NOISE, 1, 1)`` to images ``(n, 1, 16, 16)`` in [-1, 1]."""
    wide = 2 * CHANNELS
    return _initialized(
        nn.Sequential(
            *(nn.ConvTranspose2d(NOISE, wide, 4, bias=False), nn.BatchNorm2d(wide), nn.ReLU()),
            nn.ConvTranspose2d(wide, CHANNELS, 4, 2, 1, bias=False),
            *(nn.BatchNorm2d(CHANNELS), nn.ReLU()),
            *(nn.ConvTranspose2d(CHANNELS, 1, 4, 2, 1, bias=False), nn.Tanh()),
        )
    )


def _discriminator() -> nn.Module:
    """Map images to scores ``(n)``; above 0 the image is held for real."""
    wide = 2 * CHANNELS
    return _initialized(
        nn.Sequential(
            *(nn.Conv2d(1, CHANNELS, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)),
            nn.Conv2d(CHANNELS, wide, 4, 2, 1, bias=False),
            *(nn.BatchNorm2d(wide), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(wide, 1, 4, bias=False), nn.Flatten(0)),
        )
    )


def _initialized(network: nn.Sequential) -> nn.Sequential:
    """Draw weights as the paper does: standard deviation 0.02, around 0 or, in batchnorm, 1."""
    for layer in network:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.02)
        elif isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(layer.weight, 0.0, 0.02)
    return network
