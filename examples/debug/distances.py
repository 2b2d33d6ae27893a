"""Distances between all pairs, those of a point to itself too. ``--fixed`` keeps roots off zero."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Distances(nn.Module):
    """The Euclidean distance between each two rows."""

    def __init__(self, *, fixed: bool = False) -> None:
        super().__init__()
        self.smallest = 1e-12 if fixed else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(n, width)`` to ``(n, n)``."""
        squares = (x[:, None] - x[None]).square().sum(-1)
        return (squares + self.smallest).sqrt()


def main(argv: list[str] | None = None) -> None:
    """Learn two coordinates for each of twelve towns from the distances between them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    towns = torch.rand(12, 2)
    wanted = torch.cdist(towns, towns)
    model = nn.Sequential(nn.Linear(12, 2), Distances(fixed=args.fixed))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(1, args.steps + 1):
        loss = F.mse_loss(model(torch.eye(12)), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
