"""One launch over lists of tensors of which some are quantised to 8 bits, for any update.

As :mod:`apex.kernels.multi_tensor`, with its updates and codecs. Between memory and a codec, a
column of codes becomes float32 on the way in, and codes and ``absmax`` on the way out. So each
element is read once and written once. :mod:`apex.ops.lists.quantized` has the definition, whose
bits these are.

A program has `CHUNK` lanes and walks whole blocks, `WIDTH` lanes each. Where the length of a row is
a multiple of it, lanes are elements, and full chunks run without a mask. Otherwise the last block
of a row leaves lanes idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._tables import Table
from apex.kernels.multi_tensor import (
    _pointer,
    _read,
)  # fmt: skip
from apex.kernels.partial_sums import reduced

WIDTH = 256  # elements of a block of codes, at most
TINY = tl.constexpr(2.0**-126)


@triton.jit
def _spread(of_blocks, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """A number for each block as one for each lane."""
    wide = tl.broadcast_to(of_blocks[:, None], (BLOCK // WIDTH, WIDTH))
    return tl.reshape(wide, (BLOCK,))


@triton.jit
def _quantized(
    value, mask, cells_ptr, MASKED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    size = tl.abs(value)
    size = tl.where(size < float("inf"), size, float("inf"))  # nan too
    if MASKED:
        size = tl.where(mask, size, 0.0)
    largest = tl.max(tl.reshape(size, (BLOCK // WIDTH, WIDTH)), axis=1)
    absmax = tl.where(largest < float("inf"), largest, float("nan"))
    absmax = tl.where(largest < TINY, 0.0, absmax)
    # A division for each block: one for each element would be a fifth of Adam's instructions.
    inverse = tl.where(absmax > 0, tl.div_rn(1.0, tl.where(absmax > 0, absmax, 1.0)), 0.0)
    # Added to the bits, the number of their cell leaves the code in the upper half: `CodeTables`.
    bits = (value * _spread(inverse, BLOCK, WIDTH)).to(tl.uint32, bitcast=True)
    found = tl.load(cells_ptr + (bits >> 16)).to(tl.uint32, bitcast=True) + bits
    return (found >> 16).to(tl.uint8), absmax


@triton.jit
def _quantized_tile(
    pointers, absmax, first, blocks, offsets, mask, index, scalars, seed, meanings, cells,
    UPDATE: tl.constexpr, DECODE: tl.constexpr, ENCODE: tl.constexpr, STORES: tl.constexpr,
    SUMS: tl.constexpr, QUANTIZED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Update the blocks from ``first`` on, of ``blocks``."""
    number = first + tl.arange(0, BLOCK // WIDTH)
    raw = ()
    for i in tl.static_range(len(pointers)):
        if MASKED:
            read = tl.load(pointers[i] + offsets, mask=mask, other=0)
        else:
            read = tl.load(pointers[i] + offsets)
        if QUANTIZED[i] >= 0:
            largest = tl.load(absmax[QUANTIZED[i]] + number, mask=number < blocks, other=0.0)
            value = tl.load(meanings[QUANTIZED[i]] + read.to(tl.int32))
            raw = raw + (value * _spread(largest, BLOCK, WIDTH),)
        else:
            raw = raw + (read,)
    values = DECODE(raw)
    new = ENCODE(raw, values, UPDATE(values, scalars), index, seed)
    for i in tl.static_range(len(STORES)):
        stored = new[STORES[i][1]]
        if QUANTIZED[STORES[i][0]] >= 0:
            stored, largest = _quantized(
                stored, mask, cells[QUANTIZED[STORES[i][0]]], MASKED, BLOCK, WIDTH
            )
            tl.store(absmax[QUANTIZED[STORES[i][0]]] + number, largest, mask=number < blocks)
        pointer = pointers[STORES[i][0]] + offsets
        if MASKED:
            tl.store(pointer, stored, mask=mask)
        else:
            tl.store(pointer, stored)
    sums = ()
    for i in tl.static_range(len(SUMS)):
        if MASKED:
            sums = sums + (tl.where(mask, new[SUMS[i]], 0.0),)
        else:
            sums = sums + (new[SUMS[i]],)
    return sums


@triton.jit
def quantized_kernel(
    blocks_ptr, numels_ptr, tables, scalar_args, seed_ptr, noop_ptr, partial_ptr, flag_ptr,
    lengths_ptr, absmaxes, values, cells,
    UPDATE: tl.constexpr, DECODE: tl.constexpr, ENCODE: tl.constexpr, COLUMNS: tl.constexpr,
    STORES: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, SUMS: tl.constexpr,
    LARGEST: tl.constexpr, FLAGS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, QUANTIZED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Run ``UPDATE`` over every element of every tensor of the columns; ``FLAGS`` are not set.

    Args that `multi_tensor.list_kernel` does not have:
        numels_ptr: int64, lanes of each tensor: `WIDTH` for each block.
        lengths_ptr: int64, elements of a row of each tensor.
        absmaxes: For each quantised column the addresses of its ``absmax``.
        values: For each quantised column what codes stand for.
        cells: For each quantised column the cells by which codes are found.
        QUANTIZED: For each column which of the quantised ones it is, or -1.
    """
    program = tl.program_id(0).to(tl.int64)
    if noop_ptr is not None:
        if tl.load(noop_ptr) != 0:
            for i in tl.static_range(len(SUMS)):
                tl.store(partial_ptr + program * len(SUMS) + i, 0.0)
            return
    block = tl.load(blocks_ptr + program)
    tensor = block >> 32
    start = (block & 0xFFFFFFFF) * CHUNK
    left = tl.minimum(tl.load(numels_ptr + tensor) - start, CHUNK).to(tl.int32)
    length = tl.load(lengths_ptr + tensor)
    pointers = ()
    for i in tl.static_range(len(COLUMNS)):
        pointers = pointers + (_pointer(tables[i], tensor, 0, COLUMNS[i], ALIGNED[i]),)
    absmax = ()
    for i in tl.static_range(len(absmaxes)):
        begin = _pointer(absmaxes[i], tensor, start // WIDTH, tl.float32, False)
        absmax = absmax + (begin,)
    scalars = _read(scalar_args, tensor, KINDS, SCALARS)
    seed = 0
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    lanes = tl.arange(0, BLOCK)
    first = program * CHUNK
    totals = ()
    for _ in tl.static_range(len(SUMS)):
        totals = totals + (tl.zeros((BLOCK,), tl.float32),)
    if (left == CHUNK) & (length % WIDTH == 0):
        whole = ()
        for i in tl.static_range(len(COLUMNS)):
            whole = whole + (pointers[i] + start,)
        for at in range(0, CHUNK, BLOCK):
            sums = _quantized_tile(
                whole, absmax, at // WIDTH, CHUNK // WIDTH, at + lanes, None, first + at + lanes,
                scalars, seed, values, cells, UPDATE, DECODE, ENCODE, STORES, SUMS, QUANTIZED,
                False, BLOCK, WIDTH,
            )  # fmt: skip
            new = ()
            for i in tl.static_range(len(totals)):
                new = new + (totals[i] + sums[i],)
            totals = new
    else:
        in_row = ((length + WIDTH - 1) // WIDTH).to(tl.int32)
        for at in range(0, left, BLOCK):
            number = ((start + at) // WIDTH).to(tl.int32) + tl.arange(0, BLOCK // WIDTH)
            row = number // in_row
            begins = (number - row * in_row) * WIDTH  # in its row
            column = _spread(begins, BLOCK, WIDTH) + lanes % WIDTH
            offsets = _spread(row.to(tl.int64) * length, BLOCK, WIDTH) + column
            sums = _quantized_tile(
                pointers, absmax, at // WIDTH, left // WIDTH, offsets,
                (column < length) & (at + lanes < left), first + at + lanes,
                scalars, seed, values, cells, UPDATE, DECODE, ENCODE, STORES, SUMS, QUANTIZED,
                True, BLOCK, WIDTH,
            )  # fmt: skip
            new = ()
            for i in tl.static_range(len(totals)):
                new = new + (totals[i] + sums[i],)
            totals = new
    for i in tl.static_range(len(SUMS)):
        tl.store(partial_ptr + program * len(SUMS) + i, reduced(totals[i], False))


def more(
    columns: int,
    quantized: Sequence[int],
    absmax: Sequence[Table],
    values: Sequence[torch.Tensor],
    cells: Sequence[torch.Tensor],
    lengths: Table,
) -> dict[str, Any]:
    """What `multi_tensor.launch` takes in addition; its ``layout`` has `WIDTH` for each block.

    Args:
        columns: How many there are.
        quantized: Numbers of those that are quantised.
        absmax: Of each of these, the addresses of the largest magnitudes.
        values: Of each, what codes stand for.
        cells: Of each, the cells by which codes are found.
        lengths: Elements of a row of each tensor.
    """
    places = {column: place for place, column in enumerate(quantized)}
    arguments = (
        lengths.on_device,
        tuple(table.on_device for table in absmax),
        tuple(values),
        tuple(cells),
    )
    chosen = tuple(places.get(number, -1) for number in range(columns)), WIDTH
    return {"kernel": quantized_kernel, "more": arguments, "constants": chosen}
