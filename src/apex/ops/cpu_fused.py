"""Optimizers' steps by torch's fused CPU kernels, for 16-bit columns and scaled gradients too.

torch's kernels are the fastest there is for float32. Of 16-bit weights, that of Adam wants 16-bit
moments, and that of SGD in torch 2.13 leaves the weights as they are, but for the last few of each
tensor. So what is not float32 is widened into scratch, a piece at a time that stays in the cache,
stepped there, and rounded once on the way back. The 10 million bfloat16 weights of 293 tensors take
FusedAdam 13 ms, and 74 by the definition; FusedSGD 12, and 44 (AMD EPYC, one thread).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from apex.ops import _runtime
from apex.ops.columns import Column, Scalar, have_one_dense_layout
from apex.ops.storage import PARAM, PLAIN, How

# Elements that are widened at once; the scratch of a column is 2 MiB. FusedAdam's 10 million
# bfloat16 weights take 6 % longer with 2**18, 60 % with 2**16.
PIECE = 2**19
DTYPES = {torch.float32, torch.float16, torch.bfloat16}

Lists = list[list[torch.Tensor]]


def torch_steps(columns: Sequence[Column], options: How, *numbers: Scalar) -> bool:
    """Whether :func:`step_` takes the columns: 16 bits and float32 on a CPU, no path forced.

    Args:
        columns: Gradients, weights, states.
        options: Of the step: plain storage, and what the host can read without waiting.
        *numbers: Of the step, which the host has to read as well.
    """
    if _runtime.forced() or not columns[PARAM] or not columns[PARAM][0].is_cpu:
        return False
    if options.storage is not PLAIN or options.meter is not None:
        return False
    tensors = [x for x in (options.factor, options.noop, *numbers) if isinstance(x, torch.Tensor)]
    if any(_runtime.waits(x.device) for x in tensors):
        return False
    every = list(columns) if options.extra is None else [*columns, options.extra]
    return {column[0].dtype for column in every} <= DTYPES and have_one_dense_layout(every)


@torch.no_grad()
def step_(kernel: Callable[[Lists], None], columns: Sequence[Column], options: How) -> None:
    """Take one step, in place.

    Args:
        kernel: Steps columns of float32 tensors.
        columns: Gradients, weights, states.
        options: Of the step, of the kind that :func:`torch_steps` allows.
    """
    if options.noop is not None and options.noop.item():
        return
    factor, copies = float(options.factor), options.extra
    wide = [column[0].dtype == torch.float32 for column in columns]
    if all(wide) and factor == 1.0:
        kernel([list(column) for column in columns])
        if copies is not None:
            torch._foreach_copy_(list(copies), list(columns[PARAM]))
        return
    scales_grads = options.write_grads and factor != 1.0
    wide[0] = wide[0] and (scales_grads or factor == 1.0)
    scratch = torch.empty(len(columns), PIECE)
    for pieces in batches(columns if copies is None else [*columns, copies]):
        values = [
            piece if is_wide else _widened(piece, space)
            for piece, is_wide, space in zip(pieces, wide, scratch, strict=False)
        ]
        if factor != 1.0:
            torch._foreach_mul_(values[0], factor)
        kernel(values)
        if not scales_grads:
            values[0] = pieces[0]
        for piece, new in zip(pieces, [*values, values[PARAM]], strict=False):
            if new is not piece:
                torch._foreach_copy_(piece, new)


def _widened(pieces: list[torch.Tensor], scratch: torch.Tensor) -> list[torch.Tensor]:
    """Copy into float32 scratch."""
    sizes = [*map(torch.Tensor.numel, pieces)]
    wide = list(scratch[: sum(sizes)].split_with_sizes(sizes))
    torch._foreach_copy_(wide, pieces)
    return wide


def batches(columns: Sequence[Column]) -> Iterable[Lists]:
    """Cut columns of dense tensors into flat pieces, together of at most ``PIECE`` elements."""
    flat = (
        [piece for x in column for piece in torch.split(x.as_strided((x.numel(),), (1,)), PIECE)]
        for column in columns
    )
    batch: list[tuple[torch.Tensor, ...]] = []
    left = PIECE
    for position in zip(*flat, strict=True):
        left -= position[0].numel()
        if left < 0:
            yield [list(column) for column in zip(*batch, strict=True)]
            batch, left = [], PIECE - position[0].numel()
        batch.append(position)
    yield [list(column) for column in zip(*batch, strict=True)]
