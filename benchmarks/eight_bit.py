"""A step with ``state="8bit"`` beside one with float32 states, on a CPU; bytes of the states.

The two take turns on the same weights and gradients, on one thread; timed is the CPU time of the
thread, so that other programs count less. The ratio is the median of the ratios of neighbouring
turns, with their quartiles. A step reads and writes each byte of the states once, on a GPU too.

    python benchmarks/eight_bit.py [--rounds 20] [--rows 1024] [--columns 1024] [--tensors 8]
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch

from apex import optimizers

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "FusedAdam": {},
    "FusedLAMB": {},
    "FusedLion": {},
    "FusedSGD": {"lr": 0.1, "momentum": 0.9},
    "FusedAdagrad": {},
    "FusedNovoGrad": {},
}


def made(name: str, state: str, shapes: list[tuple[int, int]]) -> torch.optim.Optimizer:
    """An optimizer that has taken a step."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape)
    optimizer: torch.optim.Optimizer = getattr(optimizers, name)(
        params, state=state, **OPTIMIZERS[name]
    )
    optimizer.step()
    return optimizer


def timed(optimizer: torch.optim.Optimizer) -> float:
    """Seconds of the thread for a step."""
    start = time.thread_time()
    optimizer.step()
    return time.thread_time() - start


def main() -> None:
    """Print a row for each optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("rounds", 20), ("rows", 1024), ("columns", 1024), ("tensors", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [(args.rows, args.columns)] * args.tensors
    weights = args.rows * args.columns * args.tensors
    print(f"{weights / 1e6:.1f} million weights; load {os.getloadavg()[0]:.1f}")
    print("a weight:       float32 ns  8 bits ns  ratio (quartiles)      bytes  8 bits")
    for name in OPTIMIZERS:
        sides = [made(name, state, shapes) for state in ("plain", "8bit")]
        turns = [[timed(side) for side in sides] for _ in range(args.rounds)]
        low, middle, high = statistics.quantiles((two / one for one, two in turns), n=4)
        times = [statistics.median(column) * 1e9 / weights for column in zip(*turns, strict=True)]
        kept = [
            sum(x.nbytes for state in side.state.values() for x in state.values() if x.dim())
            / weights
            for side in sides
        ]
        print(
            f"{name:<14} {times[0]:11.2f} {times[1]:10.2f}  {middle:5.2f} ({low:.2f} to {high:.2f})"
            f"{kept[0]:11.2f} {kept[1]:7.2f}"
        )


if __name__ == "__main__":
    main()
