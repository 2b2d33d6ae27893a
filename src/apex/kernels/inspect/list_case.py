"""How an update over lists of tensors is described for inspection; see `apex.kernels.inspect.case`.

Scalars are named as in the operation's NamedTuple in ``apex.ops``, which a test compares.
"""

from __future__ import annotations

from typing import Any

from apex.kernels.inspect.case import Case
from apex.kernels.multi_tensor import (
    BLOCK,
    DTYPES,
    NUMBER,
    ON_DEVICE,
    PER_TENSOR,
    compile_time,
    list_kernel,
    rounded,
    widened,
)
from apex.kernels.partial_sums import OPTIONS


def case(
    update: Any,
    columns: str,
    stores: tuple[tuple[int, int], ...] = (),
    scalars: str = "",
    *,
    variant: str = "",
    write_only: tuple[int, ...] = (),
    on_device: str = "",
    per_tensor: str = "",
    noop: bool = True,
    sums: tuple[int, ...] = (),
    largest: bool = False,
    flags: tuple[int, ...] = (),
    codec: tuple[Any, Any] = (widened, rounded),
    seeded: bool = False,
    unaligned: tuple[int, ...] = (),
) -> Case:
    """Describe a launch for inspection; the arguments not listed here are those of `launch`.

    Args:
        update: What runs.
        columns: Triton's names of the columns' dtypes: ``"fp16 fp32 fp32 fp32"``.
        stores: Pairs (column, number of the new value).
        scalars: Their names: ``"factor lr eps"``.
        variant: For people, in addition to ``columns``.
        write_only: Columns that are written and never read.
        on_device: Which scalars are on the device.
        per_tensor: Which scalars are a number for each tensor.
        noop: Whether there is one.
        sums: Numbers of new values to sum.
        largest: Whether the largest is taken instead.
        flags: Numbers of new values that set the flag.
        codec: Jitted functions.
        seeded: Whether the codec draws numbers.
        unaligned: Columns whose addresses are not all multiples of 16.
    """
    dtypes = columns.split()
    by_name = {dtype.name.replace("int", "i"): dtype for dtype in DTYPES.values()}
    names = scalars.split()
    kinds = [
        PER_TENSOR
        if name in per_tensor.split()
        else ON_DEVICE
        if name in on_device.split()
        else NUMBER
        for name in names
    ]
    signature = {
        "blocks_ptr": "*i64",
        "numels_ptr": "*i64",
        "tables": ("*i64",) * len(dtypes),
        "scalar_args": tuple("fp32" if kind is NUMBER else "*fp32" for kind in kinds),
        "seed_ptr": "*i32",
        "noop_ptr": "*fp32",
        "partial_ptr": "*fp32",
        "flag_ptr": "*i32",
    }
    present = {
        "seed_ptr": seeded, "noop_ptr": noop, "partial_ptr": bool(sums), "flag_ptr": bool(flags),
    }  # fmt: skip
    constants = compile_time(
        update,
        [by_name[dtype] for dtype in dtypes],
        stores,
        tuple(names),
        tuple(kind.value for kind in kinds),
        sums,
        largest,
        flags,
        codec,
        tuple(number not in unaligned for number in range(len(dtypes))),
    )
    behind = [f"tables.{number}[]" for number in range(len(dtypes))]
    narrow = {"blocks_ptr": "one number a program", "numels_ptr": "one number a program"}
    narrow |= {f"tables.{number}": "one address a program" for number in range(len(dtypes))}
    narrow |= {
        f"scalar_args.{number}": "a scalar" for number, kind in enumerate(kinds) if kind != NUMBER
    }
    narrow |= {"seed_ptr": "a scalar", "noop_ptr": "a scalar", "flag_ptr": "a scalar"}
    narrow |= {"partial_ptr": "a few numbers a program"}
    narrow |= {behind[number]: "addresses are those of its elements" for number in unaligned}
    return Case(
        list_kernel,
        update.__name__,
        " ".join([columns, *([variant] if variant else [])]),
        signature=signature,
        constants={**constants, **{key: None for key, here in present.items() if not here}},
        reads=tuple(p for number, p in enumerate(behind) if number not in write_only),
        writes=tuple(behind[number] for number in dict(stores)),
        tile=BLOCK,
        narrow=narrow,
        tables={f"tables.{number}": kind for number, kind in enumerate(dtypes)},
        tail=True,
        computes="random bits of each element: ten rounds of Philox" if seeded else "",
        options=OPTIONS,
    )
