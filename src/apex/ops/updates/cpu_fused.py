"""Optimizers' steps by torch's fused CPU kernels, for 16-bit columns and scaled gradients too.

torch's kernels are the fastest there is for float32. Of 16-bit weights, that of Adam wants 16-bit
moments, and that of SGD in torch 2.13 leaves the weights as they are, but for the last few of each
tensor. So what is not float32 is widened, a piece at a time that stays in the cache, stepped there,
and rounded once on the way back; what a storage splits is joined, so that it takes the same code as
float32. The 10 million bfloat16 weights of 293 tensors take FusedAdam 13 ms, and 74 by the
definition; FusedSGD 12, and 44 (AMD EPYC, one thread).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops.lists.multi_tensor import Update
from apex.ops.lists.storage import PARAM, PLAIN, StepOptions, run_stored
from apex.ops.lists.tensor_lists import TensorList, odd_positions

# Elements that are widened at once, 1 MiB of a column. FusedAdam's 10 million bfloat16 weights take
# 6 % less with 2**19 and 50 % more with 2**16 on an EPYC. On a Xeon with an L2 of 2 MiB matrices
# take 1.4 times as long with 2**19, and 1.8 times with low bits.
PIECE = 2**18
DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.int16}

_FIRST, _DTYPE = itemgetter(0), attrgetter("dtype")
_NUMBERS = frozenset((float, int, bool, type(None)))  # types of most; each call takes 0.1 us

Lists = list[list[torch.Tensor]]


def torch_steps(columns: Sequence[TensorList], options: StepOptions, *numbers: object) -> bool:
    """Whether :func:`step_` takes them: on a CPU, with numbers of the host.

    Not states in 8 bits or bfloat16: torch's kernels round the last few elements of a tensor in
    other ways, and which these are depends on how many ranks share it.
    """
    if (
        options.dither is not None
        or _runtime.forced()
        or not columns[PARAM]
        or not columns[PARAM][0].is_cpu
    ):
        return False
    every = list(columns) if options.extra is None else [*columns, options.extra]
    given = options.factor, options.noop, *numbers
    known = _NUMBERS.issuperset(map(type, given)) or all(map(_is_known, given))
    known = known and {*map(_DTYPE, map(_FIRST, every))} <= DTYPES
    return known and (options.dense or not odd_positions(every))


def step_or_run(
    update: Update,
    kernel: Callable[[Any], Callable[..., None]] | None,
    columns: Sequence[TensorList],
    hyper: Any,
    options: StepOptions,
    *,
    scalars: Any = None,
    narrow: bool = False,
) -> None:
    """Step by what ``kernel`` makes of the hyperparameters, if :func:`step_` takes it; else run.

    Args:
        update: The definition.
        kernel: Makes the kernel of a step; ``None`` where torch has none that computes the same.
        columns: Gradients, weights, states.
        hyper: Of the step.
        options: Scaling, skipping and storage.
        scalars: What the update takes, if not ``hyper.scalars(factor)``.
        narrow: See :func:`step_`.
    """
    known = hyper.lr, hyper.weight_decay, getattr(hyper, "step", None)
    if kernel is not None and torch_steps(columns, options, *known):
        step_(kernel(hyper), columns, options, narrow=narrow)
        return
    run_stored(update, columns, scalars or hyper.scalars(options.factor), options)


def _is_known(number: object) -> bool:
    """Whether the host knows a number without waiting for a device."""
    if isinstance(number, torch.Tensor):
        return not _runtime.waits(number.device)
    return number is None or isinstance(number, int | float)


def step_(
    kernel: Callable[..., None],
    columns: Sequence[TensorList],
    options: StepOptions,
    *,
    narrow: bool = False,
) -> None:
    """Take one step, in place.

    Args:
        kernel: Steps columns (gradients, weights, states) of float32 tensors.
        columns: The same, of dtypes that :func:`torch_steps` allows.
        options: Of the step, of the kind that it allows.
        narrow: Whether ``kernel`` takes columns of one 16-bit dtype too, and rounds once.
    """
    if options.noop is not None and options.noop.item():
        return
    factor, extra = float(options.factor), options.extra
    dtypes = {*map(_DTYPE, map(_FIRST, columns))}
    whole = factor == 1.0 and options.storage is PLAIN
    if whole and (dtypes == {torch.float32} or (narrow and len(dtypes) == 1 and extra is None)):
        kernel(*columns)
        if extra is not None:
            private.foreach_copy_(list(extra), list(columns[PARAM]))
        return
    for pieces in batches(columns if extra is None else [*columns, extra]):
        part = pieces[: len(columns)]
        here = options if extra is None else options._replace(extra=pieces[-1])
        values = as_float32(part, here)
        if factor != 1.0:
            values[0] = list(private.foreach_mul(values[0], number(factor)))
        kernel(*values)
        store_(part, values, here, write_grads=options.write_grads and factor != 1.0)


def number(value: float) -> torch.Tensor:
    """A factor for foreach functions on float32: 0.6 us a tensor, where a float takes 2.3."""
    return torch.full((), value, dtype=torch.float32, device="cpu")  # tensor() takes twice as long


def as_float32(columns: Sequence[TensorList], options: StepOptions) -> Lists:
    """The columns as float32: those that are it already are returned themselves."""
    wide = [
        [*column] if column[0].dtype == torch.float32 else [x.float() for x in column]
        for column in columns
    ]
    if options.storage is not PLAIN:
        wide[PARAM] = [*map(options.storage.widen, *_weights(columns, options))]
    return wide


def store_(
    columns: Sequence[TensorList], wide: Lists, options: StepOptions, *, write_grads: bool
) -> None:
    """Round what :func:`as_float32` returned, once it was stepped, into the columns."""
    stored: Iterable[TensorList] = repeat(wide[PARAM])
    weights, write = _weights(columns, options), options.storage.write
    if write is not None:
        for value, *into in zip(wide[PARAM], *weights, strict=True):
            write(value, *into)
        weights = []
    elif options.storage is not PLAIN:
        stored = zip(*map(options.storage.narrow, wide[PARAM]), strict=True)
    pairs = list(zip(weights, stored, strict=False))
    pairs += zip(columns[PARAM + 1 :], wide[PARAM + 1 :], strict=True)
    pairs += [(columns[0], wide[0])] if write_grads else []
    for column, new in pairs:
        if new[0] is not column[0]:
            private.foreach_copy_(list(column), list(new))


def _weights(columns: Sequence[TensorList], options: StepOptions) -> list[TensorList]:
    """The columns in which weights are stored."""
    return [columns[PARAM]] if options.extra is None else [columns[PARAM], options.extra]


def batches(columns: Sequence[TensorList]) -> Iterable[Lists]:
    """Cut columns of dense tensors into lists of together at most ``PIECE`` elements.

    A 0-dim tensor belongs to all pieces of the tensors beside it.
    """
    if sum(map(torch.Tensor.numel, columns[0])) <= PIECE:
        yield [list(column) for column in columns]
        return
    batch: list[tuple[torch.Tensor, ...]] = []
    left = PIECE
    for position in zip(*columns, strict=True):
        positions: Iterable[tuple[torch.Tensor, ...]] = [position]
        if position[0].numel() > PIECE:
            positions = zip(*map(_cut, position), strict=False)
        for piece in positions:
            left -= piece[0].numel()
            if left < 0:
                yield [list(column) for column in zip(*batch, strict=True)]
                batch, left = [], PIECE - piece[0].numel()
            batch.append(piece)
    yield [list(column) for column in zip(*batch, strict=True)]


def _cut(x: torch.Tensor) -> Iterable[torch.Tensor]:
    return torch.split(x.as_strided((x.numel(),), (1,)), PIECE) if x.dim() else repeat(x)
