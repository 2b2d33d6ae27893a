"""Train with FP16_Optimizer; half-way save a checkpoint, and go on from it."""

import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from common import parse, parser, problem, start

from apex.fp16_utils import FP16_Optimizer


def make_optimizer(model: torch.nn.Module) -> FP16_Optimizer:
    """Wrap an optimizer whose parameters are 16-bit; or pass ``dynamic_loss_scale=True``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return FP16_Optimizer(optimizer, static_loss_scale=128.0, verbose=False)


def train(
    model: torch.nn.Module,
    optimizer: FP16_Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    steps: range,
) -> None:
    """Take steps, and print the loss of the first one and of the last one."""
    for step in steps:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), y)
        optimizer.backward(loss)  # instead of loss.backward()
        optimizer.step()
        if step in (steps[0], steps[-1]):
            print(f"step {step}: loss {loss.item()}")


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save, load, train."""
    made = parser(__doc__, 200)
    made.add_argument("--save", default="saved.pth", metavar="FILE", help="default: %(default)s")
    args = parse(made, argv)
    folder = os.path.dirname(args.save) or "."
    writable = os.path.isdir(folder) and os.access(folder, os.W_OK)
    if os.path.isdir(args.save or ".") or not writable:
        made.error(f"--save {args.save}: pass a file in a folder that can be written to")

    model, x, y = problem(args)
    optimizer = make_optimizer(model)
    train(model, optimizer, x, y, range(1, args.steps // 2 + 1))

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with open(f"{args.save}.tmp", "wb") as file:
        torch.save(state, file)
    os.replace(f"{args.save}.tmp", args.save)  # the file is never a part of a checkpoint

    model, x, y = problem(args)
    optimizer = make_optimizer(model)
    saved = torch.load(args.save, map_location="cpu")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])  # the float32 masters are in here
    print(f"loaded {args.save}")
    train(model, optimizer, x, y, range(args.steps // 2 + 1, args.steps + 1))


if __name__ == "__main__":
    start(main)
