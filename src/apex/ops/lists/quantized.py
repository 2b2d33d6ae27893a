"""Columns quantised to 8 bits: a code for each element, and a largest magnitude for each block.

A block has at most 256 elements and lies inside one row, which is all that has one index of
dimension 0. So blocks do not depend on how many ranks share a tensor by ``Shard(0)``, nor on how it
lies in memory: elements are counted in the order of the indices. With ``absmax`` the largest
magnitude of a block, in float32, an element is ``value(code) * absmax``.

The codes are those of dynamic quantisation: leading zeros of a code count powers of ten, and the
bits after the first 1 are a fraction. The magnitude of the ``b`` bits ``m = 2**n + f`` is

    value(m) = 10 ** (n - b + 1) * (0.1 + 0.9 * (f + 1/2) / 2**n)      0 <= f < 2**n

and that of 0 is 0. The largest is made 1, so that the largest element of a block is exact.

* `SIGNED`, for first moments: 7 bits and a sign. So 0 has a sign too.
* `UNSIGNED`, for second moments: 8 bits, one more of the fraction.

A value becomes the nearest code, of two equally near the smaller; ``value / absmax`` is rounded to
float32 first. But in `UNSIGNED` only 0 becomes
0: a second moment that is rounded to 0 would divide the step by ``eps``. An element is off by at
most ``4.5 / 2**n`` of its size: in `UNSIGNED` by 3.5 % between ``absmax / 10`` and ``absmax``, in
`SIGNED` by 7 %, and twice that in each decade below. Quantising what was dequantised gives the same
codes and ``absmax``, if ``absmax`` is above 1e-31.

If an element is not finite, ``absmax`` is nan, and the whole block is nan; its codes mean nothing.
A block with no magnitude of 2**-126 or more, below which float32 has fewer bits, becomes 0.

How a value finds its code: the upper 16 bits of the float32 ``value / absmax`` choose a cell, in
which is one boundary between two codes at most. A table has a number for each cell. Added to the
float32's bits it leaves the code in the upper 16, as there is a carry beyond the boundary. So the
code is exact, any bits find some code, and a kernel that does the same gives the same bits.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, sections
2.1 and 2.2. There blocks are 2,048 elements of the flat tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch

from apex.ops.lists.pointer_tables import TABLES
from apex.ops.lists.tensor_lists import TensorList

BLOCK = 256  # elements of a block, at most
TINY = 2.0**-126  # the smallest normal float32
CELLS = 2**15  # of one sign


@dataclass(frozen=True)
class Code:
    """What 8 bits stand for.

    Attributes:
        signed: Whether the highest bit is a sign.
    """

    signed: bool

    def tables(self, device: torch.device) -> CodeTables:
        """The tables on a device."""
        found: CodeTables = TABLES.find(CodeTables, (int(self.signed),), device)
        return found


SIGNED, UNSIGNED = Code(True), Code(False)
NEGATIVE_ZERO = 0x80  # of `SIGNED`


class Quantized(NamedTuple):
    """A quantised column: its number, what its codes mean, and ``absmax`` of each."""

    column: int
    code: Code
    absmax: TensorList


def magnitudes(code: Code) -> torch.Tensor:
    """The magnitudes that codes stand for, in order: float64, 128 or 256."""
    bits = 7 if code.signed else 8
    found = [0.0]
    for n in range(bits):
        parts = [0.1 + 0.9 * (f + 0.5) / 2**n for f in range(2**n)]
        found += [10.0 ** (n - bits + 1) * part for part in parts]
    found[-1] = 1.0
    return torch.tensor(found, dtype=torch.float64, device="cpu")


@functools.cache
def _made(code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tables, on the CPU."""
    sizes = magnitudes(code)
    between = ((sizes[1:] + sizes[:-1]) / 2).float()
    if not code.signed:
        between[0] = 0.0  # only 0 becomes 0
    # Positive floats have the order of their bits, so all that follows compares bits. A cell is the
    # values whose bits have the same upper half; `below` is the code of the first one. Where a
    # boundary is in the cell, `carried` makes the lower half of all bits above it overflow into the
    # upper one: they get the next code. The boundary itself does not overflow. `below` instead of
    # the cell's own number then makes the upper half the code.
    boundaries = between.view(torch.int32)
    upper = torch.arange(CELLS, dtype=torch.int32, device="cpu") << 16
    below = torch.bucketize(upper, boundaries)
    carried = torch.zeros(CELLS, dtype=torch.int64, device="cpu")
    carried[boundaries.long() >> 16] = 0xFFFF - (boundaries.long() & 0xFFFF)
    carried += (below << 16) - upper
    # Bits of negative values have 2**31 more, which is taken away; of `SIGNED` they get a sign.
    negative = carried + (2**31 + (NEGATIVE_ZERO << 16 if code.signed else 0))
    values = torch.cat([sizes, -sizes]) if code.signed else sizes
    return values.float(), torch.cat([carried, negative]).to(torch.int32)


class CodeTables:
    """The tables of a code on a device, kept by :mod:`apex.ops.lists.pointer_tables`.

    Attributes:
        values: float32 ``(256,)``: what each code stands for, relative to the block's largest.
        cells: int32 ``(65536,)``: what is added to the bits in each cell.
    """

    def __init__(self, numbers: tuple[int, ...], device: torch.device) -> None:
        self.hosts = [*_made(Code(bool(numbers[0])))]
        if device.type == "cuda":
            self.hosts = [host.pin_memory() for host in self.hosts]
        self.values, self.cells = (host.to(device, non_blocking=True) for host in self.hosts)


def row_length(shape: Sequence[int]) -> int:
    """Elements of a row."""
    return math.prod(shape[1:])


@functools.lru_cache(maxsize=1024)
def absmax_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows, and blocks of a row."""
    return shape[0], -(-row_length(shape) // BLOCK)


def quantize(value: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor.

    Args:
        value: float32, two or more dimensions, no row empty.
        code: What codes mean.

    Returns:
        Codes, uint8 of the same shape; and ``absmax``, float32 ``(rows, blocks of a row)``. Both
        are contiguous.
    """
    cut = value.float().contiguous().view(value.shape[0], row_length(value.shape))
    size = cut.abs()
    largest = torch.cat([part.amax(-1) for part in _blocks(size)], 1)  # nan if one is
    absmax = largest.masked_fill(largest == math.inf, math.nan).masked_fill_(largest < TINY, 0.0)
    inverse = absmax.reciprocal().masked_fill_(~(absmax > 0), 0.0)
    for part, relative, one in zip(_blocks(cut), _blocks(size), _of(inverse, cut), strict=True):
        torch.mul(part, one, out=relative)
    bits = size.view(torch.int32).view(-1)
    cells = (bits >> 16).bitwise_and_(0xFFFF)
    found = code.tables(value.device).cells.index_select(0, cells).add_(bits)
    return found.bitwise_right_shift_(16).to(torch.uint8).view(value.shape), absmax


def dequantize(codes: torch.Tensor, absmax: torch.Tensor, code: Code) -> torch.Tensor:
    """What :func:`quantize` has kept of a tensor: float32, contiguous, of the codes' shape."""
    value = code.tables(codes.device).values.index_select(0, codes.reshape(-1).int())
    value = value.view(codes.shape[0], row_length(codes.shape))
    for part, one in zip(_blocks(value), _of(absmax, value), strict=True):
        part.mul_(one)
    return value.view(codes.shape)


def _blocks(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Views of full blocks and of the last one of each row: ``(rows, blocks, elements)``."""
    rows, length = matrix.shape
    full = length - length % BLOCK
    parts = matrix[:, :full].view(rows, full // BLOCK, BLOCK), matrix[:, full:].unsqueeze(1)
    return [part for part in parts if part.shape[1] * part.shape[2]]


def _of(absmax: torch.Tensor, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
    """What belongs to each of the blocks: ``(rows, blocks, 1)``."""
    return torch.split(absmax.unsqueeze(-1), [part.shape[1] for part in _blocks(matrix)], 1)


def by_rows(position: Sequence[torch.Tensor], limit: int) -> Iterable[tuple[torch.Tensor, ...]]:
    """Cut contiguous tensors that have the same rows into pieces of about ``limit`` elements.

    Args:
        position: Tensors of a position, the first of which is large; 0-dim ones, which are in every
            piece; and ``absmax``.
        limit: Elements; a piece has one row at least.
    """
    shape = position[0].shape
    rows = max(1, limit // row_length(shape))
    parts = (torch.split(x.view(shape[0], -1), rows) if x.dim() else repeat(x) for x in position)
    return zip(*parts, strict=False)
