"""Optimizers' steps by torch's fused CPU kernels, for 16-bit columns and scaled gradients too.

torch's kernels are the fastest there is for float32. Of 16-bit weights, that of Adam wants 16-bit
moments, and that of SGD in torch 2.13 leaves the weights as they are, but for the last few of each
tensor. So what is not float32 is widened into scratch, a piece at a time that stays in the cache,
stepped there, and rounded once on the way back; what a storage splits is joined there, so that it
takes the same code as float32. The 10 million bfloat16 weights of 293 tensors take
FusedAdam 13 ms, and 74 tensor by tensor as the definition says; FusedSGD 12, and 44 (AMD EPYC, one
thread).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

import torch

from apex.ops import _runtime
from apex.ops.multi_tensor import (
    Column,
    Scalar,
    batches,
    by_length,
    flattened,
    torch_can,
    unflattened,
)
from apex.ops.storage import PARAM, PLAIN, How

# Elements that are widened at once; the scratch of a column is 2 MiB. FusedAdam's 10 million
# bfloat16 weights take 6 % longer with 2**18, 60 % with 2**16.
PIECE = 2**19
SHORT = 1024  # elements of tensors that are taken together with their like
MANY = 16  # from so many tensors on they are joined: calls count and not passes
WIDENED = (torch.float16, torch.bfloat16)

Lists = list[list[torch.Tensor]]
Kernel = Callable[[Lists], None]


def host_can(columns: Sequence[Column], how: How, *numbers: Scalar) -> bool:
    """Whether :func:`on_host` takes the columns.

    Args:
        columns: Gradients, weights, states.
        how: What surrounds the step.
        *numbers: Of the step; torch's kernels take none that is a tensor.
    """
    if not columns[PARAM] or how.meter is not None:
        return False
    if any(isinstance(x, torch.Tensor) for x in numbers) or not all(
        _is_known(x) for x in (how.factor, how.noop)
    ):
        return False
    beside = [] if how.extra is None else [how.extra]
    return torch_can([*columns, *beside], (*WIDENED, torch.int16))


def _is_known(value: Scalar | None) -> bool:
    """Whether the host can read it without waiting."""
    return not isinstance(value, torch.Tensor) or not _runtime.waits(value.device)


@torch.no_grad()
def on_host(kernel: Kernel, columns: Sequence[Column], how: How, *, narrow: bool = False) -> None:
    """Take one step, in place.

    Args:
        kernel: Steps columns of float32 tensors.
        columns: Gradients, weights, states.
        how: What surrounds the step, of the kind that :func:`host_can` allows.
        narrow: Whether ``kernel`` takes columns of one 16-bit dtype too, and rounds once.
    """
    if how.noop is not None and how.noop.item():
        return
    lists = [list(column) for column in columns]
    factor = float(how.factor)
    scaled = factor != 1.0
    dtypes = {column[0].dtype for column in columns}
    stored = how.storage is not PLAIN
    narrow = narrow and len(dtypes) == 1 and how.extra is None
    if not (scaled or stored) and (narrow or dtypes == {torch.float32}):
        kernel(lists)
        if how.extra is not None:
            torch._foreach_copy_(list(how.extra), lists[PARAM])
        return
    if how.extra is not None:
        lists.append(list(how.extra))
    size = min(PIECE, sum(map(torch.Tensor.numel, lists[PARAM])))
    scratch = torch.empty(len(columns), size)
    in_place = how.write_grads and columns[0][0].dtype == torch.float32
    widened = [column[0].dtype in WIDENED for column in columns]
    widened[0] = widened[0] or (scaled and not in_place)
    for alike in by_length(lists, SHORT):
        for _, part in batches(alike, PIECE):
            _step_piece(kernel, part, how, widened, scratch)


def _step_piece(
    kernel: Kernel, part: Lists, how: How, widened: Sequence[bool], scratch: torch.Tensor
) -> None:
    """Widen, step and round a piece of the columns that ``widened`` says."""
    joined = all(widened) and len(part[0]) > MANY
    columns = len(widened)
    values = [*part[:columns]]
    weights = None
    if how.storage is not PLAIN:
        weights = how.storage.widen(*map(flattened, [part[PARAM], *part[columns:]]))
        values[PARAM] = [weights] if joined else unflattened(weights, part[PARAM])
    for number, column in enumerate(part[:columns]):
        if widened[number] and values[number] is column:
            values[number] = _widened(column, scratch[number], joined=joined)
    scaled = bool(how.factor != 1.0)
    if scaled:
        torch._foreach_mul_(values[0], float(how.factor))
    kernel(values)
    if weights is not None:
        own = [PARAM, *range(columns, len(part))]
        values += part[columns:]
        for number, new in zip(own, how.storage.narrow(weights), strict=True):
            values[number] = unflattened(new, part[number])
    _put_back(part, values, write_grads=how.write_grads and scaled)


@contextlib.contextmanager
def as_float32(columns: Sequence[Column], how: How, *, write_grads: bool) -> Iterator[Lists]:
    """Lend the columns as float32, whole; what is made of them is stored when the block ends.

    For what looks at a tensor as a whole, so that 16-bit columns take the code of float32 ones.

    Args:
        columns: Gradients, weights, states, of the kind that :func:`host_can` allows.
        how: What surrounds the step.
        write_grads: Whether 16-bit gradients are written too; float32 ones are lent as they are.
    """
    own = [columns[PARAM]] if how.extra is None else [columns[PARAM], how.extra]
    wide = [[x.float() for x in column] for column in columns]
    if how.storage is not PLAIN:
        wide[PARAM] = [*map(how.storage.widen, *own)]
    yield wide
    for number, column in enumerate(columns):
        if number not in (0, PARAM) or (number == 0 and write_grads):
            _store(column, wide[number])
    weights: Iterable[Column] = repeat(wide[PARAM])
    if how.storage is not PLAIN:
        weights = zip(*map(how.storage.narrow, wide[PARAM]), strict=True)
    for column, new in zip(own, weights, strict=False):
        _store(column, new)


def _store(column: Column, values: Column) -> None:
    if values[0] is not column[0]:
        torch._foreach_copy_(list(column), list(values))


def _widened(column: Column, scratch: torch.Tensor, *, joined: bool) -> list[torch.Tensor]:
    """Copy into scratch; one tensor if ``joined``."""
    if len(column) > MANY:
        flat = flattened(column)
        scratch = scratch[: flat.numel()].copy_(flat)
        return [scratch] if joined else unflattened(scratch, column)
    views = unflattened(scratch, column)
    torch._foreach_copy_(views, list(column))
    return views


def _put_back(part: Lists, values: Lists, *, write_grads: bool) -> None:
    """Round what was stepped in scratch."""
    for number, (column, new) in enumerate(zip(part, values, strict=False)):
        if new is not column and (number or write_grads):
            torch._foreach_copy_(column, _apart(new, column))
    if len(part) > len(values):
        torch._foreach_copy_(part[-1], _apart(values[PARAM], part[-1]))


def _apart(values: list[torch.Tensor], column: Column) -> list[torch.Tensor]:
    """Undo the joining."""
    return values if len(values) == len(column) else unflattened(values[0], column)
