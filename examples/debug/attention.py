"""Attention whose scores overflow in float16. ``--fixed`` divides before the product."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

WIDTH = 64


class Attention(nn.Module):
    """One head of self-attention."""

    def __init__(self, *, fixed: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map words ``(batch, words, width)`` to the values that they attend to."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.fixed:
            scores = (q / math.sqrt(WIDTH)) @ k.transpose(1, 2)
        else:
            scores = (q @ k.transpose(1, 2)) / math.sqrt(WIDTH)
        return torch.softmax(scores, -1) @ v


class Classifier(nn.Module):
    """Attention, and a linear layer on the mean of its words."""

    def __init__(self, *, fixed: bool = False) -> None:
        super().__init__()
        self.attention = Attention(fixed=fixed)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map words ``(batch, words, width)`` to two scores."""
        return self.head(self.attention(x).mean(1))


def main(argv: list[str] | None = None) -> None:
    """Train on features of a camera that nobody has normalised: numbers of 0 to 255."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Classifier(fixed=args.fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for step in range(1, args.steps + 1):
        x = 255 * torch.rand(16, 8, WIDTH)
        y = (x.mean((1, 2)) > 127.5).long()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
