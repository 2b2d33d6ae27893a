"""One launch over lists of tensors, whatever their number and sizes.

A *column* is a list of tensors of one dtype; the columns of a call are equally long, and the
tensors at one position have the same number of elements (gradient, weight, first moment, ...).
The kernel walks all positions in chunks, one program for each chunk. It finds its tensor in a
table of addresses, so that nothing depends on how many tensors there are.

What is computed is a parameter: ``UPDATE(values, s)``, a jitted function over float32 tiles and
named scalars (``s.lr``), returns a tuple of new tiles. Each algorithm is thus ten lines and knows
nothing of lists, masks, dtypes or storage. ``DECODE`` and ``ENCODE`` stand between memory and
``UPDATE``: how columns become values and how new values become columns (rounding, low bits kept
apart, compensated or stochastic rounding).

A scalar is a number of the call, one number on the device, or one number for each tensor. The
names are those of the operation's NamedTuple in `apex.ops`.

Full chunks run without a mask: with a mask whose bound is known only at run time the compiler
falls back to 16-bit accesses, without one every access is 128 bits wide.

Multiplications and additions are not contracted to fused multiply-adds (``enable_fp_fusion=False``)
and divisions and roots are rounded correctly, so that a kernel gives the bits of its definition in
plain PyTorch (but for roots on a CPU, where MKL is an ulp off). Both are free where memory is the
limit.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._launching import current_device
from apex.kernels._plans import Argument, Family
from apex.kernels._tables import CHUNK, Layout, Table
from apex.kernels.partial_sums import combined, reduced, summed

# Elements per tile; a program has CHUNK.
BLOCK = 1024


@dataclass(frozen=True)
class Named:
    """Makes a NamedTuple inside of a kernel.

    Not the class itself: Triton 3.7 cannot make a key of one. The names are in the text of this
    object, and so in the key under which Triton keeps compiled code.
    """

    names: tuple[str, ...]

    def __call__(self, *values: Any) -> Any:
        """Name the values."""
        return _namedtuple(self.names)(*values)


@functools.cache
def _namedtuple(names: tuple[str, ...]) -> Any:
    return namedtuple("Scalars", names)


# Kinds of scalars.
NUMBER = tl.constexpr(0)  # an argument of the launch
ON_DEVICE = tl.constexpr(1)  # one number in memory
PER_TENSOR = tl.constexpr(2)  # a number in memory for each tensor

DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,  # codes
}


@triton.jit
def _pointer(table_ptr, tensor, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table_ptr + tensor).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _read(scalar_args, tensor, KINDS: tl.constexpr, SCALARS: tl.constexpr):
    unnamed = ()
    for i in tl.static_range(len(KINDS)):
        if KINDS[i] == PER_TENSOR:
            unnamed = unnamed + (tl.load(scalar_args[i] + tensor),)
        elif KINDS[i] == ON_DEVICE:
            unnamed = unnamed + (tl.load(scalar_args[i]),)
        else:
            unnamed = unnamed + (tl.full((), scalar_args[i], tl.float32),)
    return SCALARS(*unnamed)


@triton.jit
def rounded(raw, values, new, index, seed):
    """Codec: what is stored is the value rounded to the column's dtype."""
    return new


@triton.jit
def widened(raw):
    """Codec: every column as float32."""
    values = ()
    for i in tl.static_range(len(raw)):
        values = values + (raw[i].to(tl.float32),)
    return values


@triton.jit
def _dithered(value, seed):
    """:func:`apex.ops.lists.dither.dithered`, whose bits these are."""
    bits = value.to(tl.uint32, bitcast=True)
    noise = (bits ^ seed.to(tl.uint32, bitcast=True)) * 0x85EBCA6B
    noise = (noise ^ (noise >> 15)) * 0x2545F491
    rounded = (bits + (noise >> 16)) & 0xFFFF0000
    return tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)


@triton.jit
def _tile(
    pointers, offsets, mask, index, scalars, seed,
    UPDATE: tl.constexpr, DECODE: tl.constexpr, ENCODE: tl.constexpr, STORES: tl.constexpr,
    SUMS: tl.constexpr, FLAGS: tl.constexpr, DITHERED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    raw = ()
    for i in tl.static_range(len(pointers)):
        if MASKED:
            raw = raw + (tl.load(pointers[i] + offsets, mask=mask, other=0),)
        else:
            raw = raw + (tl.load(pointers[i] + offsets),)
    values = DECODE(raw)
    new = ENCODE(raw, values, UPDATE(values, scalars), index, seed)
    for i in tl.static_range(len(STORES)):
        pointer = pointers[STORES[i][0]] + offsets
        stored = new[STORES[i][1]]
        if len(DITHERED) > 0:
            if DITHERED[STORES[i][0]]:
                stored = _dithered(stored, seed)
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
    if len(FLAGS) > 0:
        bad = tl.zeros(offsets.shape, tl.float32)
        for i in tl.static_range(len(FLAGS)):
            bad = tl.where(tl.abs(new[FLAGS[i]]) < float("inf"), bad, 1.0)
        if MASKED:
            bad = tl.where(mask, bad, 0.0)
        sums = sums + (bad,)
    return sums


@triton.jit
def list_kernel(
    blocks_ptr, numels_ptr, tables, scalar_args, seed_ptr, noop_ptr, partial_ptr, flag_ptr,
    UPDATE: tl.constexpr, DECODE: tl.constexpr, ENCODE: tl.constexpr, COLUMNS: tl.constexpr,
    STORES: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, SUMS: tl.constexpr,
    LARGEST: tl.constexpr, FLAGS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, DITHERED: tl.constexpr,
):  # fmt: skip
    """Run ``UPDATE`` over every element of every tensor of the columns.

    Args that `launch` does not have:
        blocks_ptr: int64, one for each program: tensor number << 32 | chunk number.
        numels_ptr: int64, elements of each tensor.
        tables: For each column the int64 addresses of its tensors.
        scalar_args: Numbers, or pointers where ``KINDS`` says so.
        partial_ptr: float32 ``(programs, len(SUMS))``: sums over each chunk.
        DECODE: ``(raw columns) -> values``.
        ENCODE: ``(raw, values, new, index, seed) -> what STORES, SUMS and FLAGS count in``.
        SCALARS: The `Named` of what ``UPDATE`` takes.
        KINDS: For each scalar `NUMBER`, `ON_DEVICE` or `PER_TENSOR`.
        ALIGNED: For each column whether every address is a multiple of 16. Each combination is
            compiled when it first occurs. Few do: allocators align, so that only views do not,
            such as gradients in a bucket.
        CHUNK: Elements of a program, a multiple of BLOCK.
        BLOCK: Elements of a tile.
        DITHERED: For each column whether it is rounded stochastically; empty for none.
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
    pointers = ()
    for i in tl.static_range(len(COLUMNS)):
        pointers = pointers + (_pointer(tables[i], tensor, start, COLUMNS[i], ALIGNED[i]),)
    scalars = _read(scalar_args, tensor, KINDS, SCALARS)
    seed = 0
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    lanes = tl.arange(0, BLOCK)
    first = program * CHUNK
    totals = ()
    for _ in tl.static_range(len(SUMS) + (len(FLAGS) > 0)):
        totals = totals + (tl.zeros((BLOCK,), tl.float32),)
    if left == CHUNK:
        for at in range(0, CHUNK, BLOCK):
            sums = _tile(
                pointers, at + lanes, None, first + at + lanes, scalars, seed,
                UPDATE, DECODE, ENCODE, STORES, SUMS, FLAGS, DITHERED, False,
            )  # fmt: skip
            new = ()
            for i in tl.static_range(len(totals)):
                new = new + (combined(totals[i], sums[i], LARGEST),)
            totals = new
    else:
        for at in range(0, left, BLOCK):
            sums = _tile(
                pointers, at + lanes, at + lanes < left, first + at + lanes, scalars, seed,
                UPDATE, DECODE, ENCODE, STORES, SUMS, FLAGS, DITHERED, True,
            )  # fmt: skip
            new = ()
            for i in tl.static_range(len(totals)):
                new = new + (combined(totals[i], sums[i], LARGEST),)
            totals = new
    for i in tl.static_range(len(SUMS)):
        tl.store(partial_ptr + program * len(SUMS) + i, reduced(totals[i], LARGEST))
    if len(FLAGS) > 0:
        tl.store(flag_ptr, 1, mask=tl.sum(totals[len(SUMS)]) > 0)


def launch(
    layout: Layout,
    tables: Sequence[Table],
    dtypes: Sequence[torch.dtype],
    update: Any,
    stores: tuple[tuple[int, int], ...],
    names: tuple[str, ...],
    scalars: tuple[float | torch.Tensor, ...],
    *,
    noop: torch.Tensor | None = None,
    sums: tuple[int, ...] = (),
    codec: tuple[Any, Any] = (widened, rounded),
    seed: torch.Tensor | None = None,
    largest: bool = False,
    flag: torch.Tensor | None = None,
    flags: tuple[int, ...] = (),
    kernel: Any = list_kernel,
    more: tuple[Argument, ...] = (),
    constants: tuple[Any, ...] = ((),),
) -> torch.Tensor | None:
    """Run ``update`` over the columns in one launch.

    Arguments are those of :func:`apex.ops.lists.multi_tensor.run`, but for these: ``layout``, of
    the columns' sizes, has at least one program; there are a table and a dtype for each column;
    ``update`` is jitted ``(values, scalars) -> new values``; ``names`` are those of the scalars;
    ``codec`` are two jitted functions, columns to values and new values to columns; ``kernel``
    takes the arguments of `list_kernel` up to ``BLOCK``, ``more`` in front of its constants and
    ``constants`` behind them.

    Returns:
        With ``sums``: float32 ``(len(sums), tensors)``; 0 where ``noop`` is set.
    """
    partial = None
    if sums:
        shape = (layout.programs, len(sums))
        partial = torch.empty(shape, dtype=torch.float32, device=layout.device)
    numbers: list[Any] = []
    kinds: list[Any] = []
    for scalar in scalars:  # ten of them: a function of Python for each would take half of it all
        if type(scalar) is float:
            numbers.append(scalar)
            kinds.append(0)
        elif isinstance(scalar, torch.Tensor):
            numbers.append(scalar)
            kinds.append((1 if scalar.numel() == 1 else 2, scalar.dtype))
        else:
            numbers.append(float(scalar))
            kinds.append(0)
    arguments = (
        layout.blocks, layout.numels, tuple([table.on_device for table in tables]),
        tuple(numbers), seed, noop, partial, flag, *more,
    )  # fmt: skip
    aligned = tuple([table.aligned for table in tables])
    key = (
        id(kernel), id(update), *map(id, codec), *dtypes, stores, names, *kinds, sums, largest,
        flags, aligned, seed is None, noop is not None and noop.dtype,
        flag is not None and flag.dtype, constants,
    )  # fmt: skip
    family = _FAMILIES.get(key)
    if family is None:
        chosen = (
            update, *codec, tuple([DTYPES[dtype] for dtype in dtypes]), stores, Named(names),
            tuple([kind and kind[0] for kind in kinds]), sums, largest, flags, aligned, CHUNK,
            BLOCK, *constants,
        )  # fmt: skip
        family = _FAMILIES[key] = Family(kernel, chosen, fuse=False)
    if layout.device.type == "cuda" and layout.device.index != current_device():
        with torch.cuda.device(layout.device):  # Triton launches there
            return _run(family, layout, arguments, largest)
    return _run(family, layout, arguments, largest)


# By whatever the JIT compiles another kernel for, but for addresses. The functions in a key live as
# long as their family, which holds them.
_FAMILIES: dict[Any, Family] = {}


def _run(
    family: Family, layout: Layout, arguments: Sequence[Argument], largest: bool
) -> torch.Tensor | None:
    """Launch on the device that is current, and add up what programs leave."""
    family.launch_lists((layout.programs, 1, 1), arguments)
    partial = arguments[6]
    if partial is None:
        return None
    assert isinstance(partial, torch.Tensor)
    return summed(partial, layout.firsts, largest=largest)
