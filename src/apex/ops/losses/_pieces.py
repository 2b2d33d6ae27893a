"""Rows of a linear layer's outputs, some at a time: how many, and their products."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apex.ops._dtypes import Optional, wide

# Rows of a piece: whole tiles of a GPU's products, and at least FEWEST. Each piece reads and writes
# the weight's gradient in float32: at 1,024 rows those are 256 operations a byte, about what an
# H100 does while it moves one; at 256 rows memory takes over four times as long as the product.
TILE, FEWEST = 128, 1024
# Logits of a piece: at most HUGE for these rows, 512 MiB in 16 bits, 262,144 classes. Above that at
# least one tile: no more than the weight if that has 128 features. More rows while they are LEAST,
# 16 MiB of float32, or an eighth of all and at most MOST, 256 MiB. No more than LEAST in all are
# left to PyTorch's functions, which are faster then. Derived from sizes.
LEAST, MOST, HUGE, SHARE = 2**22, 2**26, 2**28, 8
# Rows of 16-bit logits that are multiplied at a time on a CPU. With AVX-512 but no bfloat16
# instructions oneDNN computes each product in float32 first, twice the bytes of its result. All
# 1,024 rows at once take 1.03 of the time there (8,192 classes), 0.99 with the instructions; by 128
# rows it is 1.05 with them, because the weight is rearranged for each product.
CPU_ROWS = 256


def chunk_rows(rows: int, classes: int) -> int:
    """How many rows' logits are made at a time."""
    wanted = max(FEWEST, LEAST // classes, min(MOST // classes, -(-rows // SHARE)))
    return max(TILE, min(wanted, HUGE // classes) // TILE * TILE)


def compact_rows(rows: int, classes: int) -> int:
    """The same for ``"compact"``: less than an eighth, in whole tiles.

    With 4,096 rows 384. A product that adds to a 16-bit gradient of the weight has 192 operations
    for each byte then: three quarters of what :data:`FEWEST` has in float32 (derived).
    """
    return max(TILE, min(chunk_rows(rows, classes), (rows - 1) // SHARE // TILE * TILE))


def pieces(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional, chunk_size: int, compact: bool
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of rows and their logits, which the next slice's overwrite.

    Functions with ``out`` and in-place ones are left alone by autocast, so none is cast twice.
    """
    rows, classes = len(x), len(weight)
    usual = compact_rows if compact else chunk_rows
    height = min(rows, chunk_size or usual(rows, classes))
    buffer = x.new_empty(height, classes)
    for start in range(0, rows, max(1, height)):
        here = slice(start, min(rows, start + height))
        logits = buffer[: here.stop - start]
        size = CPU_ROWS if x.is_cpu and x.dtype != wide(x) else height
        for some, out in zip(torch.split(x[here], size), torch.split(logits, size), strict=True):
            if bias is None:
                torch.mm(some, weight.t(), out=out)
            else:
                torch.addmm(bias, some, weight.t(), out=out)
        yield here, logits
