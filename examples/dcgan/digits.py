"""Scikit-learn's digits as images, and how much like them generated images are."""

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Judge", "load"]


def load(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the 1,797 digits, enlarged from 8x8, with a margin of an eighth on each side.

    Args:
        size: Height and width of an image, a multiple of eight.

    Returns:
        Images ``(1797, 1, size, size)`` in [-1, 1], float32, and labels ``(1797)``.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels / 8 - 1).float().reshape(-1, 1, 8, 8)
    margin = size // 8
    inner = (size - 2 * margin,) * 2
    images = F.interpolate(images, size=inner, mode="bilinear", align_corners=False)
    images = images.clamp(-1, 1)  # sums of rounded weights go beyond by an ulp
    return F.pad(images, (margin,) * 4, value=-1.0), torch.from_numpy(labels)


class Judge:
    """A classifier of digits that scores images; trained in float32 on half of the digits.

    Make it before ``amp.initialize``, whose casts would reach its training too.

    Args:
        images: As ``load`` gives them.
        labels: Their digits.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        inputs, half = images[0].numel(), len(images) // 2
        self.network = nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 10)
        ).to(images.device)
        optimizer = torch.optim.Adam(self.network.parameters(), lr=3e-3)
        for _ in range(200):
            optimizer.zero_grad()
            F.cross_entropy(self.network(images[:half]), labels[:half]).backward()
            optimizer.step()
        right = self._probabilities(images[half:]).argmax(dim=1) == labels[half:]
        self.accuracy = right.float().mean().item()
        self.best = self.score(images[half:])  # of digits that it has not seen

    def score(self, images: torch.Tensor) -> float:
        """Inception score (Salimans et al., 2016) with this classifier, from 1 to 10.

        It is ``exp(mean KL(p(digit | image) || p(digit)))``: 10 where every image is surely one
        digit and all ten are equally frequent, 1 where all images are alike to the classifier.
        """
        each = self._probabilities(images).double()
        overall = each.mean(dim=0)
        divergence = (torch.xlogy(each, each) - torch.xlogy(each, overall)).sum(dim=1)
        return divergence.mean().exp().item()

    @torch.no_grad()
    def _probabilities(self, images: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.network(images.float()), dim=1)
