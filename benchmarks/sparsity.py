"""What 2:4 masks and the search for an order of the channels take: CPU seconds of one thread.

Masks are of a weight of 4096 x 4096; the search is of a weight of rows x input channels. The least
of some calls.

    python -m benchmarks.sparsity [--calls 3]
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from apex.contrib.sparsity import create_mask
from apex.contrib.sparsity._permutation import best_order
from benchmarks.turns import timed
from tools import quiet_without_reader

SIDE = 4096
PATTERNS = ("m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy")
SEARCHED = ((576, 64), (1024, 1024), (4096, 4096))


def main() -> None:
    """Print a line for each pattern, and for each size that is searched."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=3)
    calls: int = parser.parse_args().calls
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = torch.randn(SIDE, SIDE)
    for pattern in PATTERNS:
        _print(f"{pattern}, {SIDE}x{SIDE}", partial(create_mask, weight, pattern), calls)
    for rows, channels in SEARCHED:
        matrix = torch.randn(rows, channels)
        _print(f"search, {rows} rows x {channels} channels", partial(best_order, matrix), calls)


def _print(name: str, call: Callable[[], object], calls: int) -> None:
    seconds = min(timed(call) for _ in range(calls))
    print(f"{name:36}{seconds:8.3f} s", flush=True)


if __name__ == "__main__":
    with quiet_without_reader():
        main()
