"""Train with FP16_Optimizer around L-BFGS, which evaluates the loss several times in a step."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from common import parse, parser, problem, start

from apex.fp16_utils import FP16_Optimizer


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the loss at the beginning of each step."""
    args = parse(parser(__doc__, 5), argv)
    model, x, y = problem(args)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0, verbose=False)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()  # FP16_Optimizer's, as is backward
        loss = F.mse_loss(model(x).float(), y)
        optimizer.backward(loss)
        return loss

    for step in range(1, args.steps + 1):
        loss = optimizer.step(closure)
        print(f"step {step}: loss {loss.item()}")
    print(f"at the end: loss {F.mse_loss(model(x).float(), y).item()}")


if __name__ == "__main__":
    start(main)
