"""Generator and discriminator of DCGAN (Radford et al., 2016), for square grey images."""

from torch import nn

__all__ = ["discriminator", "generator"]


def generator(size: int, nz: int, ngf: int) -> nn.Sequential:
    """Map noise ``(n, nz, 1, 1)`` to images ``(n, 1, size, size)`` in [-1, 1].

    Args:
        size: Height and width of an image, a power of two from 8 on.
        nz: Length of the noise.
        ngf: Channels of the last hidden layer; each layer before has twice as many.
    """
    channels = ngf * size // 8
    layers = [nn.ConvTranspose2d(nz, channels, 4, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    while channels > ngf:
        channels //= 2
        layers += [nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
    layers += [nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh()]
    return _initialized(nn.Sequential(*layers))


def discriminator(size: int, ndf: int) -> nn.Sequential:
    """Map images ``(n, 1, size, size)`` to scores ``(n)``; above 0 the image is held for real.

    Args:
        size: Height and width of an image, a power of two from 8 on.
        ndf: Channels of the first layer; each layer after it has twice as many.
    """
    channels = ndf
    layers = [nn.Conv2d(1, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
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
