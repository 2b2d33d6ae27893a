"""Adding up what the programs of a launch over lists of tensors leave, tensor by tensor.

Always in the same order, so that a sum is repeated bit for bit.
"""

import functools

import torch
import triton
import triton.language as tl

from apex.kernels._plans import Family

# Partial sums that are added at a time: 33 million elements, so that the largest embedding (2**30
# elements, 131,072 partial sums) takes 32 steps that wait for each other. The same number for every
# tensor, so that its sum does not depend on what else is in the list.
PARTIALS = 4096


@triton.jit
def combined(a, b, LARGEST: tl.constexpr):
    """Add, or take the larger one; nan wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL) if LARGEST else a + b


@triton.jit
def _largest(values):
    nan = tl.sum((values != values).to(tl.int32)) > 0  # `tl.max` passes over them
    return tl.where(nan, float("nan"), tl.max(values))


@triton.jit
def reduced(values, LARGEST: tl.constexpr):
    """Add all values up, or take the largest one; nan wins."""
    return _largest(values) if LARGEST else tl.sum(values)


@triton.jit
def segment_kernel(
    partial_ptr, firsts_ptr, out_ptr, SUMS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add up the partial sums of a tensor, its segment; the arguments are those of `summed`.

    Programs of `list_kernel` are numbered tensor by tensor, so the rows of a tensor follow each
    other: ``firsts`` has where each segment begins, and behind the last one where it ends. Nothing
    has to be searched, and a program adds up its segment in the same order at each call.
    """
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(firsts_ptr + tensor)
    last = tl.load(firsts_ptr + tensor + 1)
    lanes = tl.arange(0, BLOCK)
    for i in tl.static_range(SUMS):
        # Each lane adds every BLOCK-th row; the lanes are added up at the end. A row behind the
        # segment counts as 0, which changes no sum, and no largest magnitude either.
        total = tl.zeros((BLOCK,), tl.float32)
        for at in range(first, last, BLOCK):
            rows = at + lanes
            some = tl.load(partial_ptr + rows * SUMS + i, mask=rows < last, other=0.0)
            total = combined(total, some, LARGEST)
        tl.store(out_ptr + i * tl.num_programs(0) + tensor, reduced(total, LARGEST))


@triton.jit
def norm_kernel(sums_ptr, norm_ptr, each_ptr, flag_ptr, tensors, BLOCK: tl.constexpr):
    """The arguments and results of `norms_of`; ``each_ptr`` may be absent."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, tensors, BLOCK):
        mask = at + lanes < tensors
        some = tl.load(sums_ptr + at + lanes, mask=mask, other=0.0)
        total += some
        if each_ptr is not None:
            tl.store(each_ptr + at + lanes, tl.sqrt_rn(some), mask=mask)
    norm = tl.sqrt_rn(tl.sum(total))
    tl.store(norm_ptr, norm)
    is_finite = tl.abs(norm) < float("inf")
    tl.store(flag_ptr, 1, mask=is_finite == 0)


def summed(partial: torch.Tensor, firsts: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
    """Add up partial sums in one launch, on the device that is current.

    Args:
        partial: float32 ``(programs, sums)``.
        firsts: int64 ``(tensors + 1,)``: each tensor's first program.
        largest: Whether the largest is taken instead of the sum.

    Returns:
        float32 ``(sums, tensors)``.
    """
    sums, tensors = partial.shape[1], len(firsts) - 1
    out = torch.empty((sums, tensors), dtype=torch.float32, device=partial.device)
    _segments(sums, largest).launch((tensors, 1, 1), (partial, firsts, out), ())
    return out


def norms_of(
    sums: torch.Tensor, flag: torch.Tensor, *, each: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take roots of sums of squares in one launch, see :mod:`apex.ops.lists.tensor_norms`."""
    norm = torch.empty(1, dtype=torch.float32, device=sums.device)
    norms = torch.empty_like(sums) if each else None
    device = sums.device if sums.device.type == "cuda" else -1
    with torch.cuda.device(device):
        _roots(flag.dtype, each).launch(
            (1, 1, 1), (sums, norm, norms, flag), (len(sums),), len(sums)
        )  # fmt: skip
    return norm, norm.new_empty(0) if norms is None else norms


@functools.cache
def _roots(flag: torch.dtype, each: bool) -> Family:
    return Family(norm_kernel, (1024,), fuse=False)


@functools.cache
def _segments(sums: int, largest: bool) -> Family:
    return Family(segment_kernel, (sums, largest, PARTIALS), fuse=False)
