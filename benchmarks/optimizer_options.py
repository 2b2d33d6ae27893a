"""A step with an option beside one without, on a CPU, for each optimizer; bytes that they keep.

The two take turns on the same weights and gradients, on one thread; timed is the CPU time of the
thread, so that other programs count less. The ratio is the median of the ratios of neighbouring
turns, with their quartiles. Bytes are those of states, and of a file that has them. A step reads
and writes each byte of the states once, on a GPU too.

    python -m benchmarks.optimizer_options state=8bit [--rounds 20] [--tensors 8]
    python -m benchmarks.optimizer_options storage=auto --dtype bfloat16
"""

import argparse
import io
import os
import statistics
from functools import partial
from typing import Any

import torch

from apex.catalogue import optimizers as catalogue
from benchmarks.turns import ratio, take_turns, timed
from tools import quiet_without_reader

# Muon's directions and not its moments take the time.
NAMES = [name for name in catalogue.BY_NAME if name != "FusedMuon"]


def made(
    name: str, options: dict[str, Any], shapes: list[tuple[int, int]], dtype: torch.dtype
) -> torch.optim.Optimizer:
    """An optimizer that has taken a step."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    optimizer: torch.optim.Optimizer = catalogue.makers(**options)[name](params)
    optimizer.step()
    return optimizer


def saved(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a file with the state."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.tell()


def main() -> None:
    """Print a row for each optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("option", help="of a constructor, such as state=8bit or storage=auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for name, value in (("rounds", 20), ("rows", 1024), ("columns", 1024), ("tensors", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    key, value = args.option.split("=")
    shapes = [(args.rows, args.columns)] * args.tensors
    weights = args.rows * args.columns * args.tensors
    print(f"{weights / 1e6:.1f} million {args.dtype} weights; load {os.getloadavg()[0]:.1f}")
    print(f"a weight:      plain ns  {args.option} ns  ratio [quartiles]  bytes  saved")
    for name in NAMES:
        dtype = getattr(torch, args.dtype)
        sides = {way: made(name, {key: way}, shapes, dtype) for way in ("plain", value)}
        turns = take_turns(
            {way: partial(timed, side.step) for way, side in sides.items()}, args.rounds
        )
        times = [1e9 * statistics.median(found) / weights for found in turns.values()]
        kept = [
            sum(x.nbytes for state in side.state.values() for x in state.values() if x.dim())
            for side in sides.values()
        ]
        files = [*map(saved, sides.values())]
        bytes_of = "  ".join(
            f"{one / weights:.2f} -> {two / weights:.2f}" for one, two in (kept, files)
        )
        print(
            f"{name:<14} {times[0]:7.2f} {times[1]:10.2f}   "
            f"{ratio(turns[value], turns['plain'])!s:18} {bytes_of}",
            flush=True,
        )


if __name__ == "__main__":
    with quiet_without_reader():
        main()
