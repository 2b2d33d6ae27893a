"""Train a classifier in float16. Two lines make the result worse; ``--fixed`` is without these."""

import argparse
import copy

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Make points; a label is the quarter of the plane that the first two numbers are in."""
    x = torch.randn(size, 16)
    return x.to(DEVICE), (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long().to(DEVICE)


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, rate: float = 0.02) -> None:
    """Move the average a little towards the model."""
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast.to(slow.dtype), rate)


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    """Evaluate a model on new points."""
    x, y = batch(2048)
    return nn.functional.cross_entropy(model.float()(x), y).item()


def main(argv: list[str] | None = None) -> None:
    """Train, and print the losses of the model and of its average."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(DEVICE)
    average = copy.deepcopy(model) if args.fixed else copy.deepcopy(model).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE)
    for _ in range(args.steps):
        x, y = batch()
        with torch.autocast(DEVICE, dtype=torch.float16):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if args.fixed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        follow(average, model)
    print(f"loss {loss_of(model):.4f}, of the average {loss_of(average):.4f}")


if __name__ == "__main__":
    main()
