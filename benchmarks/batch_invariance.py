"""What `apex.ops.batch_invariant` costs on a CPU: each operation with it over the same without.

Forward and backward together, in turns, one thread; a ratio is the median of the ratios of
neighbours, with its quartiles. Above 1 the switch costs time. The operations and their inputs are
those of `tests/rows.py`.

    python -m benchmarks.batch_invariance [--rounds 15] [NAME ...]
"""

import argparse
import contextlib
from collections.abc import Callable
from functools import partial

import torch

import apex.ops
from benchmarks.turns import one_core, ratio, take_turns, timed
from tests.rows import CASES, batch_of
from tools import quiet_without_reader

SIZES = ((8, 64), (64, 1024), (2048, 1024))  # rows and their length
CAUSAL = ((8, 64), (64, 256), (16, 1024))  # matrices and their side
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _timed(name: str, length: int, dtype: torch.dtype, rows: int, on: bool, calls: int) -> float:
    case: Callable[..., object] = CASES[name]  # type: ignore[assignment]
    call = partial(case, length, dtype, partial(batch_of, rows))
    with apex.ops.batch_invariant() if on else contextlib.nullcontext():
        return timed(call, calls)


def main() -> None:
    """Print a row for each operation, dtype and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*CASES])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    one_core()
    print(f"{'operation, dtype, rows x length':<52} with / without [quartiles]")
    for name in args.names:
        for kind, dtype in DTYPES.items():
            for rows, length in CAUSAL if name.endswith("causal") else SIZES:
                count = 1 + 100_000 // (rows * length)
                ways = {
                    how: partial(_timed, name, length, dtype, rows, on, count)
                    for how, on in (("with", True), ("without", False))
                }
                taken = take_turns(ways, args.rounds, warm_up=1)
                found = ratio(taken["with"], taken["without"])
                print(f"{f'{name}, {kind}, {rows} x {length}':<52} {found}", flush=True)


if __name__ == "__main__":
    with quiet_without_reader():
        main()
