"""How an update over lists of tensors is described for inspection; see :mod:`tools.kernels.case`.

Scalars are named as in the operation's NamedTuple in ``apex.ops``, which a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from apex.kernels._tables import CHUNK, Layout, Table
from apex.kernels.multi_tensor import BLOCK, launch
from apex.kernels.quantized import more
from apex.kernels.storage import (
    add_error,
    join_low_bits,
    keep_error,
    rounded_stochastically,
    split_low_bits,
    widened,
)
from tools.kernels.case import DTYPES, CompiledCase, launched, meta


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
    seeded: bool = False,
    unaligned: tuple[int, ...] = (),
    dithered: tuple[bool, ...] = (),
    **options: Any,
) -> CompiledCase:
    """Describe a launch for inspection.

    Args:
        update: What runs.
        columns: Triton's names of the columns' dtypes: ``"fp16 fp32 fp32 fp32"``. ``"u8"`` is one
            that is held in 8 bits.
        stores: Pairs (column, number of the new value).
        scalars: Their names: ``"factor lr eps"``.
        variant: For people, in addition to ``columns``.
        write_only: Columns that are written and never read.
        on_device: Which scalars are on the device.
        per_tensor: Which scalars are a number for each tensor.
        noop: Whether there is one.
        seeded: Whether the codec draws numbers.
        unaligned: Columns whose addresses are not all multiples of 16.
        dithered: For each column whether it is rounded stochastically.
        options: ``sums``, ``largest``, ``flags`` and ``codec`` of `launch`.
    """
    kinds, names, device = columns.split(), tuple(scalars.split()), torch.device("meta")
    one, each = meta("fp32", 1), meta("fp32", 2)
    of_kind = dict.fromkeys(on_device.split(), one) | dict.fromkeys(per_tensor.split(), each)
    numbers = range(len(kinds))
    behind = [f"tables.{number}[]" for number in numbers]
    codes = tuple(number for number in numbers if kinds[number] == "u8")
    if codes:
        table, places = Table([16], device), len(codes)
        held = [table] * places, [meta("fp32", 256)] * places, [meta("i32", 65536)] * places
        options |= more(len(kinds), codes, *held, table)
    if dithered:
        options["constants"] = (dithered,)
    if options.get("flags"):
        options["flag"] = meta("i32", 1)
    case, *_ = launched(  # behind it, sums are added up
        lambda: launch(
            Layout([CHUNK, CHUNK], device),
            [Table([8 if number in unaligned else 16], device) for number in numbers],
            [DTYPES[kind] for kind in kinds],
            update,
            stores,
            names,
            tuple(of_kind.get(name, 1.5) for name in names),
            noop=one if noop else None,
            seed=meta("i32", 1) if seeded or dithered else None,
            **options,
        ),
        update.__name__,
        " ".join([columns, *([variant] if variant else [])]),
        prefix="quantized_kernel" if codes else "list_kernel",
        reads=tuple(p for number, p in enumerate(behind) if number not in write_only),
        writes=tuple(behind[number] for number in dict(stores)),
        tile=BLOCK,
        narrow=dict.fromkeys(("blocks_ptr", "numels_ptr"), "one number a program")
        | {f"tables.{number}": "one address a program" for number in numbers}
        | {f"scalar_args.{number}": "a scalar" for number in range(len(names))}
        | dict.fromkeys(("seed_ptr", "noop_ptr", "flag_ptr"), "a scalar")
        | {"partial_ptr": "a few numbers a program"}
        | {behind[number]: "addresses are those of its elements" for number in unaligned}
        | {f"absmaxes.{place}": "one address a program" for place in range(len(codes))}
        | {f"absmaxes.{place}[]": "one number a block" for place in range(len(codes))}
        | {f"values.{place}": "looked up by each code" for place in range(len(codes))}
        | {f"cells.{place}": "looked up for each code" for place in range(len(codes))}
        | {"lengths_ptr": "one number a program"},
        tables={f"tables.{number}": kind for number, kind in enumerate(kinds)}
        | {f"absmaxes.{place}": "fp32" for place in range(len(codes))},
        tail=True,
        computes="random bits of each element: ten rounds of Philox" if seeded else "",
    )
    return case


def optimizer_cases(
    update: Any,
    states: int,
    scalars: str,
    *,
    per_tensor: str = "",
    narrow_states: bool = False,
) -> Iterator[CompiledCase]:
    """Describe an optimizer's update with each storage, as :mod:`apex.ops.lists.storage` runs it.

    Args:
        update: ``(grad, param, *states) -> (param, *states, grad)``.
        states: How many there are; they are float32.
        scalars: Names of the update's; ``factor`` is on the device.
        per_tensor: Which of them are a number for each tensor.
        narrow_states: Whether states have the weight's dtype where no storage is beside it.
    """
    all_states = " fp32" * states
    stores = tuple((1 + number, number) for number in range(1 + states))
    copy, beside, grad = (2 + states, 0), (2 + states, 2 + states), (0, 1 + states)
    half = "bf16 bf16" + all_states

    def one(variant: str, columns: str, *more: tuple[int, int], **others: Any) -> CompiledCase:
        return case(
            update, columns, (*stores, *more), scalars, variant=variant, on_device="factor",
            per_tensor=per_tensor, **others,
        )  # fmt: skip

    for kind in ("fp32", "fp16", "bf16"):
        yield one("", f"{kind} {kind}{all_states}")
        if narrow_states and kind != "fp32":
            yield one("", " ".join([kind] * (2 + states)))
    yield one("copies", f"fp16 fp32{all_states} fp16", copy, write_only=(2 + states,))
    yield one("writes gradients", "fp16 fp16" + all_states, grad)
    yield one("low bits", f"{half} i16", beside, codec=(join_low_bits, split_low_bits))
    yield one("kahan", f"{half} bf16", beside, codec=(add_error, keep_error))
    yield one("stochastic", half, codec=(widened, rounded_stochastically), seeded=True)
    yield one("gradients not aligned", "fp16 fp16" + all_states, unaligned=(0,))
    codes = " u8" * states
    for kind in ("fp32", "bf16") if states else ():
        yield one("8 bits", f"{kind} {kind}{codes}")
        dithered = (False, False, *[True] * states)
        yield one("bfloat16 moments", f"{kind} {kind}{' bf16' * states}", dithered=dithered)
    if states == 2:  # the most columns, and so the most registers: 94 for Adam, 80 if aligned
        yield one("not aligned", "fp16 fp16" + all_states, unaligned=tuple(range(2 + states)))
        split = {"codec": (join_low_bits, split_low_bits)}
        yield one("8 bits, low bits", f"bf16 bf16{codes} i16", beside, **split)
