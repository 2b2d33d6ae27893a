"""What launchers launch at many sizes: grids, warps, constants. Nothing runs: tensors are `meta`.

Their multiprocessors are an H100's. ``launches.json`` has what is launched without a table of
settings; record.py writes it, after a change of a formula and with a new op.
"""

import dataclasses
import json
import pathlib
from unittest import mock

import torch

from apex.catalogue.entry import DTYPES
from apex.catalogue.ops import OPS
from apex.kernels._plans import Family
from tools.kernels.derived import both_ways

FILE = pathlib.Path(__file__).with_name("launches.json")
LENGTHS = (1, 64, 1001, 4096, 8192, 8200, 32768, 40001)
HEADS = ((1, 8), (32, 128), (16, 64), (64, 128), (3, 8))  # and their channels
ROWS = [(4096, length) for length in LENGTHS]
# Shapes at which formulas differ, and dtypes; of other ops the large ones of the catalogue.
SIZES = {
    "layer_norm": (ROWS, ("bf16",)),
    "layer_norm, memory-efficient": (ROWS, ("fp16",)),
    "rms_norm": (ROWS, ("bf16", "fp32")),
    "masked_softmax, no key": ([(1, 2, 16, length) for length in LENGTHS], ("bf16", "fp32")),
    "causal softmax": ([(1, 2, length, length) for length in LENGTHS], ("fp16",)),
    "cross_entropy, smoothed": (
        [(rows, n) for rows in (1, 100, 4096) for n in (10, 1000, 32000, 128256)], ("bf16", "fp32"),
    ),
    "focal_loss, smoothed": ([(1000, 5), (1000, 91)], ("fp16",)),
    "group_norm, SiLU": (
        [(1, 1, 8, 8), (4, 256, 128, 128), (16, 256, 128, 128), (8, 320, 64, 64),
         (8, 1000, 16, 16)], ("bf16", "fp32"),
    ),
    "swiglu": ([(1,), (1000,), (2**22,)], ("bf16", "fp32")),
    "rotary, three quarters": ([(64, 2, *of) for of in HEADS], ("bf16",)),
    "index_mul_2d": ([(100, 1), (100, 64), (100, 1000)], ("fp16",)),
}  # fmt: skip


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def calls():
    """Name of each call, and a function that makes it."""
    ops = {op.name: op for op in OPS if op.operator}
    softmax = ops["masked_softmax, no key"]
    causal = dataclasses.replace(softmax, arguments=lambda x, *_: (x, None, 0.5, True))
    for name, op in (ops | {"causal softmax": causal}).items():
        shapes, dtypes = SIZES.get(name, (op.checked.busy, op.dtypes))
        for shape in shapes:
            for dtype in dtypes:
                size = " x ".join(map(str, shape))
                yield f"{name}: {size}, {dtype}", both_ways(op, shape, DTYPES[dtype])


def launched(call):
    """Each launch of a call as a line: kernel, grid, constants, options."""
    lines = []

    def note(family, grid, tensors, numbers, *varying):
        names = family.kernel.arg_names[len(tensors) + len(numbers) :]
        constants = dict(zip(names, family.constants, strict=True))
        numbers = [number for number in numbers if isinstance(number, int)]
        words = [f"{name}={value}" for name, value in constants.items() if value is not None]
        words += [f"{name}={value}" for name, value in family.options.items()]
        lines.append(f"{family.kernel.__name__} {[*grid]} {numbers} {' '.join(words)}")

    with mock.patch.object(Family, "launch", note):
        call()
    return lines


def main():
    """Write the file."""
    found = {name: launched(call) for name, call in calls()}
    FILE.write_text(json.dumps(found, indent=0) + "\n", "utf-8")
