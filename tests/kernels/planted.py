"""Kernels with planted defects; run as a program it prints what the inspection says of each.

    python planted.py TARGET,... [NAME ...]

Run by tests in a process of its own, where kernels are compiled and not interpreted.
"""

import dataclasses
import importlib.util
import json
import pathlib
import sys
import tempfile

import triton
import triton.language as tl

from apex.kernels import multi_tensor
from tools.kernels import finding
from tools.kernels import list_case as lists
from tools.kernels.case import CompiledCase

MAIN = "pointers, at + lanes, None, first + at + lanes, scalars, seed,"
MASKED = "pointers, at + lanes, at + lanes < left, first + at + lanes, scalars, seed,"
UNMASKED = " False,\n            )"
LOAD = "raw = raw + (tl.load(pointers[i] + offsets),)"
STORE = "tl.store(pointer, stored)"
STORED = "tl.store(pointer, stored, mask=mask)"


@triton.jit
def add(values, s):
    return (values[0] + s.a * values[1],)


@triton.jit
def row(x_ptr, weight_ptr, y_ptr, sum_ptr, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, columns, BLOCK):
        mask = at + lanes < columns
        x = tl.load(x_ptr + start + at + lanes, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at + lanes, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + at + lanes, x * weight, mask=mask)
        total += x
    tl.store(sum_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def heavy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes)
    total = tl.sum(x)
    for _ in range(8):
        x = x * total + tl.sum(x * x)
    tl.store(y_ptr + lanes, x)


@triton.jit
def turned(x_ptr, y_ptr, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + rows * BLOCK + columns)
    tl.store(y_ptr + rows * BLOCK + columns, tl.trans(x))


@triton.jit
def longer_row(x_ptr, weight_ptr, y_ptr, sum_ptr, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, columns, BLOCK):
        mask = at + lanes < columns
        x = tl.load(x_ptr + start + at + lanes, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at + lanes, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + at + lanes, tl.exp2(tl.maximum(x, 0.5)) * weight, mask=mask)
        total += x
    tl.store(sum_ptr + tl.program_id(0), tl.sum(total))


def row_case(kernel=row, **changes):
    case = CompiledCase(
        kernel,
        "row",
        "fp16",
        signature={
            "x_ptr": "*fp16", "weight_ptr": "*fp32", "y_ptr": "*fp16", "sum_ptr": "*fp32",
            "columns": "i32",
        },
        constants={"BLOCK": 1024},
        tile=1024,
        divisible=("columns",),
        reads=("x_ptr", "weight_ptr"),
        writes=("y_ptr",),
        narrow={"sum_ptr": "one number a row"},
    )  # fmt: skip
    return dataclasses.replace(case, **changes)


def list_case(module, **changes):
    case = lists.case(add, "fp16 fp32 fp32", ((0, 0), (2, 0)), "a", write_only=(2,), **changes)
    return dataclasses.replace(case, kernel=module.list_kernel)


def planted(folder, name, *changes):
    """Import the list kernel with some lines changed."""
    text = pathlib.Path(multi_tensor.__file__).read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    file = pathlib.Path(folder, f"{name}.py")
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(folder):
    sound = list_case(multi_tensor)
    yield "sound list", sound
    both = planted(folder, "both", (MAIN, MASKED), (UNMASKED, UNMASKED.replace("False", "True")))
    yield "main path masked", list_case(both)
    stores = planted(folder, "stores", (MAIN, MASKED), (STORE, STORED))
    yield "stores of the main path masked", list_case(stores)
    twice = planted(
        folder, "twice", (LOAD, f"{LOAD}; tl.load(pointers[i] + offsets, volatile=True)")
    )
    yield "loaded twice", list_case(twice)
    yield (
        "not aligned",
        dataclasses.replace(list_case(multi_tensor, unaligned=(0, 1, 2)), narrow={}),
    )
    yield "too wide a claim", dataclasses.replace(sound, tile=2 * sound.tile)
    yield "undeclared read", dataclasses.replace(sound, reads=sound.reads[:1])
    yield "sound row", row_case()
    yield "row with a fifth more", row_case(longer_row)
    yield "bound that is any number", row_case(divisible=())
    yield "odd row", row_case(divisible=(), single=("x_ptr", "weight_ptr", "y_ptr"))
    yield "odd row's weight", row_case(divisible=(), single=("x_ptr", "y_ptr"))
    yield "odd row in part", row_case(divisible=(), single=("x_ptr", "weight_ptr"), tile=2048)
    yield "no odd row", row_case(single=("x_ptr", "weight_ptr", "y_ptr"))
    yield "undeclared write", row_case(narrow={})
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
    ways = {"reads": ("x_ptr",), "writes": ("y_ptr",), "tile": 32768}
    options = {"num_warps": 4}
    yield (
        "spills",
        CompiledCase(heavy, "heavy", "", signature, {"BLOCK": 32768}, **ways, options=options),
    )
    yield "32 warps", row_case(options={"num_warps": 32})
    yield "16 warps on AMD", row_case(options={"num_warps": 32}, amd={"num_warps": 16})
    ways["tile"] = 256 * 256
    options = {"num_warps": 16}
    yield (
        "256 KiB",
        CompiledCase(turned, "turned", "", signature, {"BLOCK": 256}, **ways, options=options),
    )


if __name__ == "__main__":
    targets, *names = sys.argv[1:]
    said = {}
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: case for name, case in cases(folder) if not names or name in names}
        for target in targets.split(","):
            inspected = finding.inspect([*chosen.values()], target)
            said[target] = {
                name: {
                    "problems": [*found.problems, *found.advice],
                    "instructions": sum((found.instructions or {}).values()),
                }
                for name, found in zip(chosen, inspected, strict=True)
            }
    print(json.dumps(said))
