"""Lists of tensors for tests: sizes around the borders of chunks, and paths."""

import contextlib

import pytest
import torch

from apex.ops import _runtime
from tests.tolerance import assert_one_rounding

PATHS = (None, "reference", "triton")  # torch's own kernels, the definition, the interpreter
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 8192
# One element, an odd number, none, a chunk less one, a chunk, one more, and many rows.
SIZES = (1, 7, 0, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)
# Where each element in turn is spoilt: the interpreter takes seconds for the full sizes.
PLANTED = [
    (None, SIZES),
    ("reference", SIZES),
    ("triton", (3, 0, 1025)),
    pytest.param("triton", (1, 0, CHUNK, CHUNK + 1), marks=pytest.mark.exhaustive),
]


def on(path):
    return contextlib.nullcontext() if path is None else _runtime.use(path)


def tensors(sizes=SIZES, dtype=torch.float32, seed=0, scale=0.02):
    """Random tensors of the sizes, of one dtype or of one each."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = [dtype] * len(sizes) if isinstance(dtype, torch.dtype) else dtype
    return [
        (scale * torch.randn(size, generator=generator, dtype=torch.float64)).to(kind)
        for size, kind in zip(sizes, dtypes, strict=True)
    ]


def exact(column):
    return [tensor.detach().to(torch.float64, copy=True) for tensor in column]


def no_flag(dtype=torch.int32, device="cpu"):
    return torch.zeros(1, dtype=dtype, device=device)


def joined(column):
    """The elements of all tensors of one dtype."""
    return torch.cat([tensor.reshape(-1) for tensor in column])


def check(found, wanted, path):
    """Compare lists with float64, all tensors of a dtype together."""
    for kind in {tensor.dtype for tensor in found}:
        pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a.dtype == kind]
        actual, oracle = joined([a for a, _ in pairs]), joined([b for _, b in pairs])
        assert_one_rounding(actual, oracle, interpreted=path == "triton")
