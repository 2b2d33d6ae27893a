"""DCGAN (Radford et al., 2016) on digits: two models, two optimizers, a scale for each loss.

A discriminator learns to tell digits (loss 0) from generated images (loss 1), and a generator
learns to have its images held for digits (loss 2). `examples/dcgan` imports the networks.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from apex.commands.bench.training.tasks import digits
from apex.commands.bench.training.tasks.classification import Batches
from apex.commands.bench.training.tasks.task import Task, TaskOptions

if TYPE_CHECKING:
    from apex.commands.bench.training.precision import Precision

__all__ = ["digits_dcgan", "discriminator", "generator"]

SIZE = 16
NOISE = 64  # numbers that an image is made of
CHANNELS = 24  # of the hidden layer next to the image


def digits_dcgan(options: TaskOptions) -> Task:
    """It has no accuracy; the loss that is shown is the discriminator's."""
    images = 2 * digits.load(SIZE, options).train_x - 1  # as tanh gives them
    return Task(
        model=lambda: (discriminator(SIZE, CHANNELS), generator(SIZE, NOISE, CHANNELS)),
        loader=lambda batch_size, seed: Batches((images,), batch_size, seed, _with_noise),
        step=_step, losses=3, optimizer="FusedAdam", lr=0.001, epochs=3,
    )  # fmt: skip


def _step(
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


def _with_noise(images: torch.Tensor, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(images), NOISE, 1, 1
    noise = torch.randn(shape, generator=random, device="cpu", dtype=torch.float32)
    return images, noise.to(images.device)  # the same on every device


def _adversarial(scores: torch.Tensor, truth: float) -> torch.Tensor:
    scores = scores.float()
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))


def generator(size: int, nz: int, ngf: int) -> nn.Sequential:
    """Map noise ``(n, nz, 1, 1)`` to images ``(n, 1, size, size)`` in [-1, 1].

    ``size`` is a power of two from 8 on. The last hidden layer has ``ngf`` channels, each before it
    twice as many.
    """
    channels = ngf * size // 8
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(nz, channels, 4, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    ]
    while channels > ngf:
        channels //= 2
        layers += [nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
    layers += [nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh()]
    return _initialized(nn.Sequential(*layers))


def discriminator(size: int, ndf: int) -> nn.Sequential:
    """Map images ``(n, 1, size, size)`` to scores ``(n)``; above 0 the image is held for real.

    ``size`` is a power of two from 8 on. The first layer has ``ndf`` channels, each after it twice
    as many.
    """
    channels = ndf
    layers: list[nn.Module] = [nn.Conv2d(1, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for _ in range(size.bit_length() - 4):  # down to 4x4
        channels *= 2
        layers += [nn.Conv2d(channels // 2, channels, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.LeakyReLU(0.2)]
    layers += [nn.Conv2d(channels, 1, 4, bias=False), nn.Flatten(0)]
    return _initialized(nn.Sequential(*layers))


def _initialized(network: nn.Sequential) -> nn.Sequential:
    """Draw weights as DCGAN does: standard deviation 0.02, around 0 or, in batchnorm, 1."""
    for layer in network:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.02)
        elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, 0.0, 0.02)
    return network
