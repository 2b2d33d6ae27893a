"""Train a classifier in float16. Two lines make the result worse, and no error says so.

    apex check examples/check/train.py
    python examples/check/train.py --fixed
"""

import argparse
import copy

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="without the two mistakes")
    parser.add_argument("--steps", type=int, default=200)
    return parser.parse_args(arguments)


def batch(size=64):
    """Points, and in which quarter of the plane of their first two numbers they are."""
    x = torch.randn(size, 16)
    return x.to(DEVICE), (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long().to(DEVICE)


@torch.no_grad()
def follow(average, model, rate=0.02):
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast.to(slow.dtype), rate)


@torch.no_grad()
def loss_of(model):
    x, y = batch(2048)
    return nn.functional.cross_entropy(model.float()(x), y).item()


def main(arguments=None):
    args = parse(arguments)
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
