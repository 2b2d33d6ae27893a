"""Elementwise updates over lists of tensors: one definition, two ways to run it.

A *column* is a list of tensors; position ``i`` of every column belongs together (gradient, weight,
first moment, ...). An :class:`Update` is a pure function of float32 values at one position and of
named scalars. It runs

* in one Triton launch for each (device, dtypes), see :mod:`apex.kernels.multi_tensor`;
* tensor by tensor in plain PyTorch, where Triton cannot run, for float64 and at those positions
  whose tensors lie in memory with gaps or in different orders, or have the negative bit: this is
  also the oracle of the tests.

Both widen to float32 (float64 stays), compute, and round once on the store.

Nothing here waits for a device or uploads from pageable memory. A call can be told to do nothing
by ``noop``, a one-element tensor that is read where the tensors are.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from apex.kernels._tables import Table
from apex.ops import _runtime
from apex.ops.lists.dither import Dither, dithered
from apex.ops.lists.pointer_tables import TABLES
from apex.ops.lists.quantized import (
    BLOCK,
    Quantized,
    absmax_shape,
    by_rows,
    dequantize,
    quantize,
    row_length,
)
from apex.ops.lists.tensor_lists import (
    Scalar,
    TensorList,
    merged,
    numels_of,
    odd_positions,
    set_flag,
    taken,
)

Values = tuple[torch.Tensor, ...]

FUSABLE = {torch.float32, torch.float16, torch.bfloat16, torch.int16}


@dataclass(frozen=True)
class Update:
    """An algorithm.

    Attributes:
        reference: Its definition: ``(values, scalars) -> new values``.
        kernel: The same for Triton: ``"module:function"`` in ``apex.kernels``.
        scalars: A NamedTuple: the names by which both find their scalars.
    """

    reference: Callable[[Values, Any], Values]
    kernel: str
    scalars: Any


@dataclass(frozen=True)
class Codec:
    """How columns are stored: what stands between memory and an :class:`Update`.

    Attributes:
        decode: ``(raw columns) -> values`` in plain PyTorch.
        encode: ``(raw, values, new) -> what is stored``.
        kernel: The same for Triton: ``"module:decode,encode"`` in ``apex.kernels``.
        quantized: Columns kept in 8 bits. The others see them as float32; ``flags`` and
            ``largest`` are not for calls that have some.
        dither: Columns in bfloat16 that are rounded stochastically; not together with the others.
    """

    decode: Callable[[Values], Values]
    encode: Callable[[Values, Values, Values], Values]
    kernel: str
    quantized: tuple[Quantized, ...] = ()
    dither: Dither | None = None


def widen(raw: Values) -> Values:
    """Every column as float32, or float64 if it is that."""
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in raw)


def store_new(raw: Values, values: Values, new: Values) -> Values:
    """What is stored are the new values, rounded to the columns' dtypes."""
    return new


WIDENED = Codec(widen, store_new, "multi_tensor:widened,rounded")


class _Call(NamedTuple):
    """The arguments of :func:`run`."""

    update: Update
    columns: Sequence[TensorList]
    stores: tuple[tuple[int, int], ...]
    scalars: tuple[Scalar, ...]
    noop: torch.Tensor | None
    sums: tuple[int, ...]
    codec: Codec
    seed: torch.Tensor | None
    flag: torch.Tensor | None
    flags: tuple[int, ...]
    largest: bool
    dense: bool
    also: Sequence[TensorList] | None

    @property
    def device(self) -> torch.device:
        return self.columns[0][0].device


def run(  # noqa: PLR0913 - one launch; all but four have a default
    update: Update,
    columns: Sequence[TensorList],
    stores: tuple[tuple[int, int], ...],
    scalars: tuple[Scalar, ...],
    *,
    noop: torch.Tensor | None = None,
    sums: tuple[int, ...] = (),
    codec: Codec = WIDENED,
    seed: torch.Tensor | None = None,
    flag: torch.Tensor | None = None,
    flags: tuple[int, ...] = (),
    largest: bool = False,
    dense: bool = False,
    also: Sequence[TensorList] | None = (),
) -> torch.Tensor | None:
    """Run ``update`` over the columns, in place.

    Args:
        update: The algorithm.
        columns: Equally long lists. All tensors are on one device; those of a column have one
            dtype; those of a position have one number of elements.
        stores: Pairs (column, number of the new value that is written to it).
        scalars: An ``update.scalars`` of numbers, of one-element tensors on the device, or of
            float32 vectors there with a number for each position.
        noop: One-element tensor on the device; nothing is written if it is not 0.
        sums: Numbers of new values to sum over each position.
        codec: How the columns are stored.
        seed: int32, one element, on the device: for the kernel of a codec that draws numbers.
        flag: One-element tensor of any dtype on the device. It becomes 1 if a new value is not
            finite, and is left alone otherwise.
        flags: Numbers of the new values that are looked at for it.
        largest: Take the largest instead of the sum, of values that are at least 0; nan wins.
        dense: Whether no position is odd, known before, see
            :func:`apex.ops.lists.tensor_lists.odd_positions`.
        also: Columns that the caller's next call writes: autograd is told of them with those that
            this one writes, in one pass over all. ``None`` in that next call.

    Returns:
        With ``sums``: float32 ``(len(sums), positions)``, not defined where ``noop`` is set.
    """
    if not columns[0]:
        return torch.zeros(len(sums), 0, device="cpu", dtype=torch.float32) if sums else None
    flags = flags if flag is not None else ()
    if codec.dither is not None and seed is None:
        seed = codec.dither.seed
    call = _Call(
        update, columns, stores, scalars, noop, sums, codec, seed, flag, flags, largest, dense,
        also,
    )  # fmt: skip
    dtypes = {column[0].dtype for column in columns}
    if codec.quantized:
        dtypes.discard(torch.uint8)
    fuses = _runtime.can_fuse(columns[0][0].device) and dtypes <= FUSABLE
    odd = odd_positions(columns) if fuses and not call.dense else []
    if fuses and not odd:
        return _fused(call)
    if also:  # as `_fused` does
        torch.autograd.graph.increment_version(chain.from_iterable(also))
        call = call._replace(also=())
    if not fuses:
        return _reference(call)
    others = sorted({*range(len(columns[0]))}.difference(odd))
    parts = [(odd, _reference(_part(call, odd)))]
    if others:
        parts.append((others, _fused(_part(call, others))))
    found = [(positions, part.t()) for positions, part in parts if part is not None]
    return merged(found).t().contiguous() if found else None


def _no_sums(call: _Call) -> torch.Tensor:
    shape = len(call.sums), len(call.columns[0])
    return torch.zeros(shape, device=call.device, dtype=torch.float32)


def _part(call: _Call, positions: Sequence[int]) -> _Call:
    """The call at these positions alone."""
    columns = [[column[i] for i in positions] for column in call.columns]
    scalars = _scalars_at(call.scalars, lambda vector: taken(vector, positions))
    quantized = tuple(
        one._replace(absmax=[one.absmax[i] for i in positions]) for one in call.codec.quantized
    )
    codec = replace(call.codec, quantized=quantized)
    return call._replace(columns=columns, scalars=scalars, codec=codec)


# -- the definition ------------------------------------------------------------------------------

# Elements that the definition computes at a time on a CPU: 256 KiB of float32. NovoGrad's on 1e7
# takes 22 ms with it, 110 whole, 33 with 2**14, 21 with 2**17 (EPYC, one thread).
PIECE = 2**16


@torch.no_grad()
def _reference(call: _Call) -> torch.Tensor | None:
    noop, sums = call.noop, call.sums
    if noop is not None and not _runtime.waits(noop.device):
        if noop.item():
            return _no_sums(call) if sums else None
        noop = None
    skip = None if noop is None else noop.reshape(()) != 0
    totals: list[torch.Tensor] = []
    absmaxes = [one.absmax for one in call.codec.quantized]
    for number, position in enumerate(zip(*call.columns, *absmaxes, strict=True)):
        scalars = _scalars_at(call.scalars, itemgetter(number))
        partial = [
            _step(call, raw, scalars, skip) for raw in _pieces(position, bool(call.codec.quantized))
        ]
        totals += [_total(column, call.largest) for column in zip(*partial, strict=True)]
    return torch.stack(totals).view(-1, len(sums)).t() if sums else None


def _scalars_at(
    scalars: tuple[Scalar, ...], pick: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Scalar, ...]:
    """The scalars of what ``pick`` picks from a vector with a number for each position."""
    if not any(isinstance(value, torch.Tensor) for value in scalars):
        return scalars

    def of(value: Scalar) -> Scalar:
        if not isinstance(value, torch.Tensor):
            return value
        return pick(value.reshape(-1)) if value.numel() > 1 else value.reshape(())

    named: Any = type(scalars)
    found: tuple[Scalar, ...] = named(*map(of, scalars))
    return found


def _pieces(position: Values, quantized: bool) -> Iterable[Values]:
    """The tensors of a position; on a CPU in flat pieces, or in rows if some are quantised.

    A definition makes a dozen tensors on the way. Those of a piece stay in the cache; those of a
    large tensor are pages that the system has to find and clear first.
    """
    large = position[0].is_cpu and position[0].numel() > PIECE
    if not large or not all(map(torch.Tensor.is_contiguous, position)):
        return [position]
    if quantized:
        return by_rows(position, 2 * PIECE)  # 10 % faster than PIECE
    return zip(*(torch.split(x.view(-1), PIECE) for x in position), strict=True)


def _step(
    call: _Call, raw: Values, scalars: tuple[Scalar, ...], skip: torch.Tensor | None
) -> list[torch.Tensor]:
    """Update one position, or a piece of it; returns the sums."""
    columns = raw[: len(call.columns)]
    absmaxes = zip(call.codec.quantized, raw[len(columns) :], strict=True)
    quantized = {one.column: (absmax, one.code) for one, absmax in absmaxes}
    in_bfloat16 = call.codec.dither.columns if call.codec.dither else ()
    raw = tuple(
        dequantize(x, *quantized[number]) if number in quantized else x
        for number, x in enumerate(columns)
    )
    values = call.codec.decode(raw)
    new = call.codec.encode(raw, values, call.update.reference(values, scalars))
    if call.flag is not None:
        raise_flag(call.flag, [new[result] for result in call.flags], skip)
    reduced = [_reduced(new[result], call.largest) for result in call.sums]
    for column, result in call.stores:
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = [(columns[column], new[result])]
        if column in quantized:
            absmax, code = quantized[column]
            pairs = zip((columns[column], absmax), quantize(new[result], code), strict=True)
        elif column in in_bfloat16 and call.seed is not None:
            pairs = [(columns[column], dithered(new[result], call.seed))]
        for stored, value in pairs:
            value = value.to(stored.dtype)
            stored.copy_(value if skip is None else torch.where(skip, stored, value))
    return reduced


def _reduced(values: torch.Tensor, largest: bool) -> torch.Tensor:
    if not largest:
        return values.sum(dtype=torch.float32)
    return values.amax() if values.numel() else values.new_zeros(())


def _total(partial: Sequence[torch.Tensor], largest: bool) -> torch.Tensor:
    if len(partial) == 1:
        return partial[0].float()
    stacked = torch.stack(list(partial))
    return (stacked.amax() if largest else stacked.sum()).float()


def raise_flag(
    flag: torch.Tensor, values: Iterable[torch.Tensor], skip: torch.Tensor | None = None
) -> None:
    """Set ``flag`` to 1 if one of ``values`` is not finite, unless ``skip``; without waiting."""
    for value in values:
        if value.numel():
            extremes = torch.stack(value.aminmax())  # one pass; isfinite() takes five on a CPU
            bad = extremes.isfinite().all().logical_not()
            set_flag(flag, bad if skip is None else bad & ~skip)


# -- the kernel ----------------------------------------------------------------------------------


@functools.cache
def _place(name: str) -> tuple[str, Callable[[Any], Any]]:
    """The module of jitted functions, and what gets them from it."""
    module, functions = f"apex.kernels.{name}".split(":")
    return module, attrgetter(*functions.split(","))


def _jitted(name: str) -> Any:
    module, functions = _place(name)
    found = sys.modules.get(module) or importlib.import_module(module)  # which takes 4 us
    return functions(found)


def _of_codes(
    call: _Call, shapes: Sequence[torch.Size], absmaxes: Sequence[Table]
) -> dict[str, Any]:
    """What a launch takes in addition for quantised columns."""
    from apex.kernels import quantized

    tables = [one.code.tables(call.device) for one in call.codec.quantized]
    return quantized.more(
        len(call.columns),
        [one.column for one in call.codec.quantized],
        absmaxes,
        [table.values for table in tables],
        [table.cells for table in tables],
        TABLES.numbers(map(row_length, shapes), call.device),
    )


def _fused(call: _Call) -> torch.Tensor | None:
    import apex.kernels.multi_tensor as kernels  # late: importing us must not import triton

    device, quantized = call.device, call.codec.quantized
    sizes, more = numels_of(call.columns[0]), {}
    if quantized:
        shapes = [x.shape for x in call.columns[quantized[0].column]]
        sizes = tuple(BLOCK * math.prod(absmax_shape(shape)) for shape in shapes)
    if not any(sizes):
        return _no_sums(call) if call.sums else None
    written = [call.columns[column] for column, _ in call.stores]
    columns = call.columns
    if quantized:
        absmax = [one.absmax for one in quantized]
        columns, written = [*columns, *absmax], written + absmax
    layout, tables = TABLES.of_launch(sizes, columns, device)
    if call.codec.dither is not None:
        more["constants"] = (tuple(n in call.codec.dither.columns for n in range(len(columns))),)
    if quantized:
        more = _of_codes(call, shapes, tables[len(call.columns) :])
    # Autograd does not see what kernels write; a tensor saved for backward needs a new version.
    if call.also is not None:
        torch.autograd.graph.increment_version(chain.from_iterable([*written, *call.also]))
    return kernels.launch(
        layout,
        tables[: len(call.columns)],
        [column[0].dtype for column in call.columns],
        _jitted(call.update.kernel), call.stores, call.update.scalars._fields, call.scalars,
        noop=call.noop, sums=call.sums, codec=_jitted(call.codec.kernel), seed=call.seed,
        largest=call.largest, flag=call.flag, flags=call.flags,
        **more,
    )  # fmt: skip
