"""One row of the data is not finite. ``--fixed`` leaves such rows out."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def measurements() -> tuple[torch.Tensor, torch.Tensor]:
    """Make 512 rows of eight sensors; in row 300 one gave nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 8, generator=generator)
    y = x.sum(1, keepdim=True)
    x[300, 5] = float("nan")
    return x, y


def main(argv: list[str] | None = None) -> None:
    """Fit a small network to the sum of the sensors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    x, y = measurements()
    if args.fixed:
        good = torch.isfinite(x).all(1)
        x, y = x[good], y[good]
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    for step, (inputs, targets) in enumerate(loader, 1):
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
