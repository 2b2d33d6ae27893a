"""What launchers launch at many sizes: grids, warps, constants. Nothing runs: tensors are `meta`.

Their multiprocessors are an H100's. ``launches.json`` has what was launched before there was a
table of settings. After a change of a formula write it anew, and look at what changed:
    python -m tests.kernels.launches
"""

import json
import pathlib
from unittest import mock

import torch

from apex.kernels import (
    cross_entropy,
    focal_loss,
    group_norm,
    index_mul_2d,
    rotary,
    row_norms,
    scaled_softmax,
    swiglu,
)
from apex.kernels._plans import Family

FILE = pathlib.Path(__file__).with_name("launches.json")
FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
LENGTHS = (1, 64, 1001, 4096, 8192, 8200, 32768, 40001)


def meta(*shape, dtype=FLOAT):
    return torch.empty(shape, dtype=dtype, device="meta")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def norms():
    for columns in LENGTHS:
        for dtype, centered, from_output in (
            (BRAIN, True, False), (BRAIN, False, False), (FLOAT, False, False), (HALF, True, True),
        ):  # fmt: skip
            x, weight = meta(4096, columns, dtype=dtype), meta(columns, dtype=dtype)
            bias = weight if centered else None
            shape = {"shape": (columns,), "eps": 1e-5, "centered": centered}
            saved = {"y" if from_output else "x": x, "rstd": meta(4096)}
            saved["mean"] = meta(4096) if centered and not from_output else None

            def both(x=x, weight=weight, bias=bias, saved=saved, shape=shape):
                row_norms.forward(x, weight, bias, *shape.values(), x.dtype)
                given = {"weight": weight, "bias": bias, **saved, **shape, "x_dtype": x.dtype}
                row_norms.backward(x, [True] * 3, **given)

            kind = "layer" if centered else "rms"
            yield f"{kind} norm{' from output' * from_output} {columns} {name_of(dtype)}", both


def softmaxes():
    for columns in LENGTHS:
        for dtype, causal in ((HALF, True), (BRAIN, False), (FLOAT, False)):
            queries = columns if causal else 16
            x, mask = (
                meta(1, 2, queries, columns, dtype=dtype),
                meta(1, 1, 1, columns, dtype=torch.bool),
            )

            def both(x=x, mask=None if causal else mask, causal=causal):
                scaled_softmax.forward(x, mask, 0.5, causal)
                scaled_softmax.backward(x, [True], y=x, scale=0.5, causal=causal)

            yield f"softmax{' causal' * causal} {columns} {name_of(dtype)}", both


def losses():
    for rows in (1, 100, 4096):
        for classes in (10, 1000, 32000, 128256):
            for dtype, smoothing in ((BRAIN, 0.0), (FLOAT, 0.1)):
                x, labels = meta(rows, classes, dtype=dtype), meta(rows, dtype=torch.int64)

                def both(x=x, labels=labels, smoothing=smoothing):
                    cross_entropy.forward(x, labels, smoothing, -100)
                    saved = {"logits": x, "labels": labels, "lse": meta(len(x))}
                    options = {"smoothing": smoothing, "padding_idx": -100}
                    cross_entropy.backward(meta(len(x)), [True], **saved, **options)

                yield f"cross-entropy {rows} x {classes} {name_of(dtype)}", both
    for columns in (5, 91):
        x, targets = meta(1000, columns, dtype=HALF), meta(1000, dtype=torch.int64)

        def focal(x=x, targets=targets):
            numbers = {"classes": x.shape[1], "alpha": 0.25, "gamma": 2.0, "smoothing": 0.0}
            saved = {"logits": x, "targets": targets, "num_positives": meta(1)}
            focal_loss.backward(meta(1), [True], **saved, **numbers)

        yield f"focal loss {columns}", focal


def images():
    for count, channels, side in (
        (1, 1, 8), (4, 256, 128), (16, 256, 128), (8, 320, 64), (8, 1000, 16),
    ):  # fmt: skip
        for dtype in (BRAIN, FLOAT):
            x = meta(count, channels, side, side, dtype=dtype)
            x = x.to(memory_format=torch.channels_last)
            groups = 32 if channels % 32 == 0 else 1

            def both(x=x, groups=groups):
                weight, count = meta(x.shape[1]), x.shape[0]
                group_norm.forward(x, weight, weight, groups, 1e-5, True)
                saved = {"x": x, "weight": weight, "bias": weight, "eps": 1e-5, "silu": True}
                stats = meta(count, groups, 2)
                group_norm.backward(x, [True] * 3, **saved, stats=stats, groups=groups)

            yield f"group norm {count} x {channels} x {side} {name_of(dtype)}", both


def others():
    for size in (1, 1000, 2**22):
        for dtype in (BRAIN, FLOAT):
            x = meta(size, dtype=dtype)

            def gated(x=x):
                swiglu.forward(x, x)
                swiglu.backward(x, [True, True], gate=x, up=x)

            yield f"swiglu {size} {name_of(dtype)}", gated
    for heads, channels, half in ((1, 8, 4), (32, 128, 64), (16, 64, 32), (64, 128, 16), (3, 6, 3)):
        t, table = meta(64, 2, heads, channels, dtype=BRAIN), meta(64, 2 * half)

        def turned(t=t, table=table):
            rotary.forward(t, table, table, None, 0)
            rotary.backward(t, [True], cos=table, sin=table, positions=None, dim=0)

        yield f"rotary {heads} x {channels} of {half}", turned
    for columns in (1, 64, 1000):
        x, index = meta(100, columns, dtype=HALF), meta(100, dtype=torch.int64)
        yield f"index_mul_2d {columns}", lambda x=x, index=index: index_mul_2d.forward(x, x, index)


def calls():
    """Name of each call, and a function that makes it."""
    for some in (norms, softmaxes, losses, images, others):
        yield from some()


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


if __name__ == "__main__":
    main()
