"""A step with ``state="8bit"`` beside one with float32 states, on a CPU; bytes of the states.

The two take turns on the same weights and gradients, on one thread; timed is the CPU time of the
thread, so that other programs count less. The ratio is the median of the ratios of neighbouring
turns, with their quartiles. A step reads and writes each byte of the states once, on a GPU too.

    python -m benchmarks.eight_bit [--rounds 20] [--rows 1024] [--columns 1024] [--tensors 8]
"""

import argparse
import os
import statistics
from functools import partial

import torch

from apex.catalogue import optimizers as catalogue
from benchmarks.turns import ratio, take_turns, timed
from tools import quiet_without_reader

# Muon's directions and not its moments take the time.
NAMES = [name for name in catalogue.WITH_8_BITS if name != "FusedMuon"]


def made(name: str, state: str, shapes: list[tuple[int, int]]) -> torch.optim.Optimizer:
    """An optimizer that has taken a step."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape)
    optimizer: torch.optim.Optimizer = catalogue.makers(state=state)[name](params)
    optimizer.step()
    return optimizer


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
    print("a weight:       float32 ns  8 bits ns  ratio [quartiles]   bytes  8 bits")
    for name in NAMES:
        sides = {state: made(name, state, shapes) for state in ("plain", "8bit")}
        ways = {state: partial(timed, side.step) for state, side in sides.items()}
        turns = take_turns(ways, args.rounds)
        times = [1e9 * statistics.median(found) / weights for found in turns.values()]
        kept = [
            sum(x.nbytes for state in side.state.values() for x in state.values() if x.dim())
            / weights
            for side in sides.values()
        ]
        print(
            f"{name:<14} {times[0]:11.2f} {times[1]:10.2f}   "
            f"{ratio(turns['8bit'], turns['plain'])!s:17}{kept[0]:11.2f} {kept[1]:7.2f}"
        )


if __name__ == "__main__":
    with quiet_without_reader():
        main()
