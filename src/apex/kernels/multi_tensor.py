"""One launch over lists of tensors, whatever their number and sizes.

A *column* is a list of tensors of one dtype; the columns of a call are equally long, and the
tensors at one position have the same number of elements (gradient, weight, first moment, ...).
The kernel walks all positions in chunks, one program for each chunk. It finds its tensor in a
table of addresses, so that nothing depends on how many tensors there are.

What is computed is a parameter: ``UPDATE(values, scalars, own)``, a jitted function over float32
tiles, returns a tuple of new tiles. Each algorithm is thus ten lines and knows nothing of lists,
masks, dtypes or storage. ``CODEC`` stands between memory and ``UPDATE``: how columns become values
and how new values become columns (rounding, low bits kept apart, compensated or stochastic
rounding).

Full chunks run without a mask: with a mask whose bound is known only at run time the compiler
falls back to 16-bit accesses, without one every access is 128 bits wide.

Multiplications and additions are not contracted to fused multiply-adds (``enable_fp_fusion=False``)
and divisions and roots are rounded correctly, so that a kernel gives the bits of its definition in
plain PyTorch (but for roots on a CPU, where MKL is an ulp off). Both are free where memory is the
limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._cases import Case

# Elements per program and per tile. A program lives for some 50 us at this size on an H200, long
# against the two dependent table reads at its start, and a 10-million-weight model still makes
# more than a thousand programs. Derived, not yet tuned on a GPU.
CHUNK = 8192
BLOCK = 1024
WARPS = 4
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}

DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int16: tl.int16,
}


@triton.jit
def _pointer(table_ptr, tensor, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table_ptr + tensor).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def rounded(raw, values, scalars, new, index):
    """Codec: what is stored is the value rounded to the column's dtype."""
    return new


@triton.jit
def widened(raw, scalars):
    """Codec: every column as float32."""
    values = ()
    for i in tl.static_range(len(raw)):
        values = values + (raw[i].to(tl.float32),)
    return values


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _joined(a, b, LARGEST: tl.constexpr):
    return _larger(a, b) if LARGEST else a + b


@triton.jit
def _total(values, LARGEST: tl.constexpr):
    return tl.reduce(values, 0, _larger) if LARGEST else tl.sum(values)


@triton.jit
def _tile(
    pointers,
    offsets,
    mask,
    index,
    scalars,
    own,
    UPDATE: tl.constexpr,
    DECODE: tl.constexpr,
    ENCODE: tl.constexpr,
    STORES: tl.constexpr,
    SUMS: tl.constexpr,
    FLAGS: tl.constexpr,
    MASKED: tl.constexpr,
):
    raw = ()
    for i in tl.static_range(len(pointers)):
        if MASKED:
            raw = raw + (tl.load(pointers[i] + offsets, mask=mask, other=0),)
        else:
            raw = raw + (tl.load(pointers[i] + offsets),)
    values = DECODE(raw, scalars)
    new = ENCODE(raw, values, scalars, UPDATE(values, scalars, own), index)
    for i in tl.static_range(len(STORES)):
        pointer = pointers[STORES[i][0]] + offsets
        if MASKED:
            tl.store(pointer, new[STORES[i][1]], mask=mask)
        else:
            tl.store(pointer, new[STORES[i][1]])
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
    # data
    blocks_ptr,
    numels_ptr,
    tables,
    scalar_args,
    own_ptrs,
    noop_ptr,
    partial_ptr,
    flag_ptr,
    # compile-time
    UPDATE: tl.constexpr,
    DECODE: tl.constexpr,
    ENCODE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STORES: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    SUMS: tl.constexpr,
    LARGEST: tl.constexpr,
    FLAGS: tl.constexpr,
    NOOP: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run ``UPDATE`` over every element of every tensor of the columns.

    Args:
        blocks_ptr: int64, one for each program: tensor number << 32 | chunk number.
        numels_ptr: int64, elements of each tensor.
        tables: For each column the int64 addresses of its tensors.
        scalar_args: Numbers, or pointers to 0-dim tensors where ``ON_DEVICE`` says so.
        own_ptrs: float32 arrays with one number for each tensor.
        noop_ptr: Where ``NOOP``: a number that skips everything when it is not 0.
        partial_ptr: float32 ``(programs, len(SUMS))``: sums over each chunk.
        flag_ptr: Where ``FLAGS``: one element of any dtype.
        UPDATE: ``(values, scalars, own) -> new values``.
        DECODE: ``(raw columns, scalars) -> values``.
        ENCODE: ``(raw, values, scalars, new, index) -> what STORES and SUMS count in``.
        COLUMNS: dtypes of the columns.
        STORES: Pairs (column, number in what ENCODE returned).
        ON_DEVICE: Which scalars are pointers.
        SUMS: Numbers in what ENCODE returned that are to be summed.
        LARGEST: Whether the largest is taken instead of the sum; the values are at least 0.
        FLAGS: Numbers in what ENCODE returned that set the flag to 1 where they are not finite.
        NOOP: Whether there is a ``noop_ptr``.
        ALIGNED: Whether every address is a multiple of 16.
        CHUNK: Elements of a program, a multiple of BLOCK.
        BLOCK: Elements of a tile.
    """
    if NOOP:
        if tl.load(noop_ptr) != 0:
            return
    program = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks_ptr + program)
    tensor = block >> 32
    start = (block & 0xFFFFFFFF) * CHUNK
    left = tl.minimum(tl.load(numels_ptr + tensor) - start, CHUNK).to(tl.int32)
    pointers = ()
    for i in tl.static_range(len(COLUMNS)):
        pointers = pointers + (_pointer(tables[i], tensor, start, COLUMNS[i], ALIGNED),)
    scalars = ()
    for i in tl.static_range(len(ON_DEVICE)):
        if ON_DEVICE[i]:
            scalars = scalars + (tl.load(scalar_args[i]),)
        else:
            scalars = scalars + (tl.full((), scalar_args[i], tl.float32),)
    own = ()
    for i in tl.static_range(len(own_ptrs)):
        own = own + (tl.load(own_ptrs[i] + tensor),)
    lanes = tl.arange(0, BLOCK)
    first = program * CHUNK
    totals = ()
    for _ in tl.static_range(len(SUMS) + (len(FLAGS) > 0)):
        totals = totals + (tl.zeros((BLOCK,), tl.float32),)
    if left == CHUNK:
        for at in range(0, CHUNK, BLOCK):
            sums = _tile(
                pointers, at + lanes, None, first + at + lanes, scalars, own,
                UPDATE, DECODE, ENCODE, STORES, SUMS, FLAGS, False,
            )  # fmt: skip
            new = ()
            for i in tl.static_range(len(totals)):
                new = new + (_joined(totals[i], sums[i], LARGEST),)
            totals = new
    else:
        for at in range(0, left, BLOCK):
            sums = _tile(
                pointers, at + lanes, at + lanes < left, first + at + lanes, scalars, own,
                UPDATE, DECODE, ENCODE, STORES, SUMS, FLAGS, True,
            )  # fmt: skip
            new = ()
            for i in tl.static_range(len(totals)):
                new = new + (_joined(totals[i], sums[i], LARGEST),)
            totals = new
    for i in tl.static_range(len(SUMS)):
        tl.store(partial_ptr + program * len(SUMS) + i, _total(totals[i], LARGEST))
    if len(FLAGS) > 0:
        tl.store(flag_ptr, 1, mask=tl.sum(totals[len(SUMS)]) > 0)


@triton.jit
def segment_kernel(
    # data
    partial_ptr,
    firsts_ptr,
    out_ptr,
    # compile-time
    SUMS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up each tensor's partial sums, always in the same order.

    Args:
        partial_ptr: float32 ``(programs, SUMS)``.
        firsts_ptr: int64 ``(tensors + 1,)``: each tensor's first program.
        out_ptr: float32 ``(SUMS, tensors)``.
        SUMS: Sums for each program.
        LARGEST: Whether the largest is taken instead of the sum.
        BLOCK: Partial sums read at once.
    """
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(firsts_ptr + tensor)
    last = tl.load(firsts_ptr + tensor + 1)
    lanes = tl.arange(0, BLOCK)
    for i in tl.static_range(SUMS):
        total = tl.zeros((BLOCK,), tl.float32)
        for at in range(first, last, BLOCK):
            rows = at + lanes
            some = tl.load(partial_ptr + rows * SUMS + i, mask=rows < last, other=0.0)
            total = _joined(total, some, LARGEST)
        tl.store(out_ptr + i * tl.num_programs(0) + tensor, _total(total, LARGEST))


class Layout:
    """Where programs work: what depends on the sizes of the tensors alone.

    Args:
        numels: Elements of each tensor; none may be 0.
        device: Where the kernel runs.
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        blocks: list[int] = []
        firsts = [0]
        for tensor, numel in enumerate(numels):
            chunks = -(-numel // CHUNK)
            blocks += [tensor << 32 | chunk for chunk in range(chunks)]
            firsts.append(firsts[-1] + chunks)
        self.programs = len(blocks)
        self.tensors = len(firsts) - 1
        self.device = device
        hosts = [pinned(blocks, device), pinned(numels, device), pinned(firsts, device)]
        self.hosts = hosts  # a CUDA graph copies from there at each replay
        self.blocks, self.numels, self.firsts = (x.to(device, non_blocking=True) for x in hosts)


class Table:
    """The addresses of one column, on the device."""

    def __init__(self, addresses: Sequence[int], device: torch.device) -> None:
        self.aligned = all(address % 16 == 0 for address in addresses)
        self.host = pinned(addresses, device)  # a CUDA graph copies from there at each replay
        self.on_device = self.host.to(device, non_blocking=True)


def pinned(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Put the numbers where a copy to the device does not wait for it."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")


def _compile_time(
    update: Any,
    columns: Sequence[Any],
    stores: tuple[tuple[int, int], ...],
    on_device: tuple[bool, ...],
    noop: bool,
    sums: tuple[int, ...],
    largest: bool,
    flags: tuple[int, ...],
    codec: tuple[Any, Any],
    aligned: bool,
) -> dict[str, Any]:
    return {
        "UPDATE": update,
        "DECODE": codec[0],
        "ENCODE": codec[1],
        "COLUMNS": tuple(columns),
        "STORES": stores,
        "ON_DEVICE": on_device,
        "SUMS": sums,
        "LARGEST": largest,
        "FLAGS": flags,
        "NOOP": noop,
        "ALIGNED": aligned,
        "CHUNK": CHUNK,
        "BLOCK": BLOCK,
    }


def launch(
    layout: Layout,
    tables: Sequence[Table],
    dtypes: Sequence[torch.dtype],
    update: Any,
    stores: tuple[tuple[int, int], ...],
    scalars: Sequence[float | torch.Tensor] = (),
    own: Sequence[torch.Tensor] = (),
    noop: torch.Tensor | None = None,
    sums: tuple[int, ...] = (),
    codec: tuple[Any, Any] = (widened, rounded),
    *,
    largest: bool = False,
    flag: torch.Tensor | None = None,
    flags: tuple[int, ...] = (),
) -> torch.Tensor | None:
    """Run ``update`` over the columns in one launch.

    Args:
        layout: Of the columns' sizes.
        tables: One for each column.
        dtypes: Of the columns.
        update: Jitted ``(values, scalars, own) -> new values``.
        stores: Pairs (column, number of the new value).
        scalars: Numbers, or one-element tensors on the device, which are read there.
        own: float32 tensors with one number for each tensor of a column.
        noop: One-element tensor; a value other than 0 leaves everything as it is.
        sums: Numbers of new values to sum over each tensor.
        codec: Jitted functions: columns to values, new values to columns.
        largest: Take the largest of values of at least 0 instead of the sum; nan wins.
        flag: One-element tensor of any dtype that becomes 1 where a new value is not finite.
        flags: Numbers of the new values that are looked at for it.

    Returns:
        With ``sums``: float32 ``(len(sums), tensors)``. With ``noop`` set it is not defined.
    """
    partial = None
    if sums:
        shape = (layout.programs, len(sums))
        partial = torch.empty(shape, dtype=torch.float32, device=layout.device)
    with torch.cuda.device(layout.device if layout.device.type == "cuda" else -1):
        list_kernel[(layout.programs,)](
            layout.blocks,
            layout.numels,
            tuple(table.on_device for table in tables),
            tuple(s if isinstance(s, torch.Tensor) else float(s) for s in scalars),
            tuple(own),
            noop,
            partial,
            flag,
            **_compile_time(
                update,
                [DTYPES[dtype] for dtype in dtypes],
                stores,
                tuple(isinstance(s, torch.Tensor) for s in scalars),
                noop is not None,
                sums,
                largest,
                flags,
                codec,
                all(table.aligned for table in tables),
            ),
            **OPTIONS,
        )
        if partial is None:
            return None
        shape = (len(sums), layout.tensors)
        out = torch.empty(shape, dtype=torch.float32, device=layout.device)
        segment_kernel[(layout.tensors,)](
            partial, layout.firsts, out, SUMS=len(sums), LARGEST=largest, BLOCK=256, **OPTIONS
        )
    return out


# -- what is inspected ---------------------------------------------------------------------------


def case(
    update: Any,
    columns: str,
    stores: tuple[tuple[int, int], ...] = (),
    scalars: int = 0,
    *,
    name: str = "",
    variant: str = "",
    write_only: tuple[int, ...] = (),
    own: int = 0,
    on_device: tuple[int, ...] = (),
    noop: bool = True,
    sums: tuple[int, ...] = (),
    largest: bool = False,
    flags: tuple[int, ...] = (),
    codec: tuple[Any, Any] = (widened, rounded),
    aligned: bool = True,
) -> Case:
    """Describe a launch for inspection; the arguments not listed here are those of `launch`.

    Args:
        update: What runs.
        columns: Triton's names of the columns' dtypes: ``"fp16 fp32 fp32 fp32"``.
        stores: Pairs (column, number of the new value).
        scalars: How many there are.
        name: For people; that of ``update`` by default.
        variant: For people, in addition to ``columns``.
        write_only: Columns that are written and never read.
        own: How many there are.
        on_device: Which scalars are on the device.
        noop: Whether there is one.
        sums: Numbers of new values to sum.
        largest: Whether the largest is taken instead.
        flags: Numbers of new values that set the flag.
        codec: Jitted functions.
        aligned: Whether every address is a multiple of 16.
    """
    kinds = columns.split()
    by_name = {dtype.name.replace("int", "i"): dtype for dtype in DTYPES.values()}
    devices = tuple(number in on_device for number in range(scalars))
    constants = _compile_time(
        update,
        [by_name[kind] for kind in kinds],
        stores,
        devices,
        noop,
        sums,
        largest,
        flags,
        codec,
        aligned,
    )
    signature = {
        "blocks_ptr": "*i64",
        "numels_ptr": "*i64",
        "tables": ("*i64",) * len(kinds),
        "scalar_args": tuple("*fp32" if there else "fp32" for there in devices),
        "own_ptrs": ("*fp32",) * own,
        "noop_ptr": "*fp32",
        "partial_ptr": "*fp32",
        "flag_ptr": "*i32",
    }
    absent = {"noop_ptr": noop, "partial_ptr": bool(sums), "flag_ptr": bool(flags)}
    behind = [f"tables.{number}[]" for number in range(len(kinds))]
    narrow = {"blocks_ptr": "one number a program", "numels_ptr": "one number a program"}
    narrow |= {f"tables.{number}": "one address a program" for number in range(len(kinds))}
    narrow |= {f"scalar_args.{number}": "a scalar" for number in on_device}
    narrow |= {f"own_ptrs.{number}": "one number a program" for number in range(own)}
    narrow |= {"noop_ptr": "a scalar", "partial_ptr": "a few numbers a program"}
    narrow |= {"flag_ptr": "a scalar"}
    if not aligned:
        narrow |= dict.fromkeys(behind, "addresses are those of their elements")
    return Case(
        list_kernel,
        name or update.__name__,
        " ".join([columns, *([variant] if variant else [])]),
        signature=signature,
        constants={**constants, **{key: None for key, here in absent.items() if not here}},
        reads=tuple(p for number, p in enumerate(behind) if number not in write_only),
        writes=tuple(behind[number] for number in dict(stores)),
        tile=BLOCK,
        narrow=narrow,
        tables={f"tables.{number}": kind for number, kind in enumerate(kinds)},
        tail=True,
        options=OPTIONS,
    )


def cases() -> Iterator[Case]:
    """What is inspected here; each update's file lists its own."""
    yield Case(
        segment_kernel,
        "segment_sums",
        "fp32",
        signature={"partial_ptr": "*fp32", "firsts_ptr": "*i64", "out_ptr": "*fp32"},
        constants={"SUMS": 1, "LARGEST": False, "BLOCK": 256},
        reads=(),
        writes=(),
        tile=256,
        narrow={
            "partial_ptr": "one number for 8192 elements of the tensors",
            "firsts_ptr": "two numbers a tensor",
            "out_ptr": "one number a tensor",
        },
        options=OPTIONS,
    )
