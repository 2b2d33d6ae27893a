"""Train on two losses with FP16_Optimizer: two backward passes and one step."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from common import parse, parser, problem, start

from apex.fp16_utils import FP16_Optimizer


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the mean square of one half of the batch and the mean error of the other half."""
    args = parse(parser(__doc__, 200), argv)
    model, x, y = problem(args)
    (x0, x1), (y0, y1) = x.chunk(2), y.chunk(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False)

    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        square = F.mse_loss(model(x0).float(), y0)
        optimizer.backward(square, update_master_grads=False)  # adds up on the model's parameters
        absolute = F.l1_loss(model(x1).float(), y1)
        optimizer.backward(absolute)  # the last one: both gradients go to the masters
        optimizer.clip_master_grads(1.0)
        optimizer.step()
        if step in (1, args.steps):
            print(f"step {step}: losses {square.item()} and {absolute.item()}")


if __name__ == "__main__":
    start(main)
