"""Bytes in sectors of 32 that warps ask for, for each number, where rows begin at odd places.

Triton compiles for sm_90, and the interpreter of PTX runs forward and backward of 48 rows in
bfloat16 and counts: a sector counts once for every instruction of a warp, and, in the last column,
once for a launch. 1,024, 1,000 and 1,001 columns; no GPU is needed.

    python -m benchmarks.sectors [NAME ...]
"""

import argparse
import importlib

from tools import quiet_without_reader

OPS = (
    "layer_norm", "rms_norm", "cross_entropy, smoothed", "masked_softmax, no key", "index_mul_2d",
)  # fmt: skip
ROWS = 48
COLUMNS = (1024, 1000, 1001)
SECTOR = 32


def main() -> None:
    """Print a row for each operation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*OPS, []], metavar="NAME")
    names = parser.parse_args().names or OPS
    tasks = importlib.import_module("tests.gpu.tasks")  # tests have no types
    print(f"{'columns':28}{''.join(f'{columns:>8}' for columns in COLUMNS)}{'each once':>12}")
    for name in names:
        counted = {columns: tasks.counted(name, (ROWS, columns)) for columns in COLUMNS}
        asked = [
            SECTOR * sum(found.sectors.values()) / (ROWS * columns)
            for columns, found in counted.items()
        ]
        once = SECTOR * sum(counted[1024].once.values()) / (ROWS * 1024)
        print(f"{name:28}{''.join(f'{bytes_:8.1f}' for bytes_ in asked)}{once:12.1f}", flush=True)


if __name__ == "__main__":
    with quiet_without_reader():
        main()
