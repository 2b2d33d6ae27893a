"""Elementwise updates over lists of tensors: one definition, three ways to run it.

A *column* is a list of tensors; position ``i`` of every column belongs together (gradient, weight,
first moment, ...). An :class:`Update` is a pure function of float32 values at one position. It runs

* in one Triton launch for each (device, dtypes), see :mod:`apex.kernels.multi_tensor`;
* tensor by tensor in plain PyTorch, where Triton cannot run, for float64 and for tensors whose
  memory is not one dense piece: this is also the oracle of the tests.

Both widen to float32 (float64 stays), compute, and round once on the store.

Nothing here waits for a device. A call can be told to do nothing by ``noop``, a one-element tensor
that is read where the tensors are.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter, not_
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from apex.ops import _runtime

if TYPE_CHECKING:
    from apex.kernels import multi_tensor as kernels

Column = Sequence[torch.Tensor]
Values = tuple[torch.Tensor, ...]
Scalar = float | torch.Tensor
Reference = Callable[[Values, Sequence[Any], Sequence[Any]], Values]

# Elements that the definition computes at a time on a CPU: 256 KiB of float32. FusedNovoGrad on 1e7
# takes 36 ms with it, 302 whole, 56 with 2**14, 38 with 2**17 (EPYC, one thread).
PIECE = 2**16
_DTYPE, _DEVICE, _IS_CPU = map(attrgetter, ("dtype", "device", "is_cpu"))
FUSABLE = {torch.float32, torch.float16, torch.bfloat16, torch.int16}


@dataclass(frozen=True)
class Update:
    """An algorithm.

    Attributes:
        reference: Its definition: ``(values, scalars, own) -> new values``.
        kernel: Where its jitted twin is: ``"module:function"`` in ``apex.kernels``.
    """

    reference: Reference
    kernel: str


@dataclass(frozen=True)
class Codec:
    """How columns are stored: what stands between memory and an :class:`Update`.

    Attributes:
        decode: ``(raw columns, scalars) -> values`` in plain PyTorch.
        encode: ``(raw, values, scalars, new) -> what is stored``.
        kernel: The jitted twins, ``"module:decode,encode"`` in ``apex.kernels``.
    """

    decode: Callable[[Values, Sequence[Any]], Values]
    encode: Callable[[Values, Values, Sequence[Any], Values], Values]
    kernel: str


def _widen(raw: Values, scalars: Sequence[Any]) -> Values:
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in raw)


def _as_is(raw: Values, values: Values, scalars: Sequence[Any], new: Values) -> Values:
    return new


PLAIN = Codec(_widen, _as_is, "multi_tensor:widened,rounded")


def run(
    update: Update,
    columns: Sequence[Column],
    stores: tuple[tuple[int, int], ...],
    scalars: Sequence[Scalar] = (),
    *,
    own: Sequence[torch.Tensor] = (),
    noop: torch.Tensor | None = None,
    sums: tuple[int, ...] = (),
    codec: Codec = PLAIN,
    flag: torch.Tensor | None = None,
    flags: tuple[int, ...] = (),
    largest: bool = False,
) -> torch.Tensor | None:
    """Run ``update`` over the columns, in place.

    Args:
        update: The algorithm.
        columns: Equally long lists. All tensors are on one device; those of a column have one
            dtype; those of a position have one number of elements.
        stores: Pairs (column, number of the new value that is written to it).
        scalars: Numbers, or one-element tensors on the device.
        own: float32 tensors with one number for each position.
        noop: One-element tensor on the device; nothing is written if it is not 0.
        sums: Numbers of new values to sum over each position.
        codec: How the columns are stored.
        flag: One-element tensor of any dtype on the device. It becomes 1 if a new value is not
            finite, and is left alone otherwise.
        flags: Numbers of the new values that are looked at for it.
        largest: Take the largest instead of the sum, of values that are at least 0; nan wins.

    Returns:
        With ``sums``: float32 ``(len(sums), positions)``, not defined where ``noop`` is set.
    """
    if not columns[0]:
        return torch.zeros(len(sums), 0) if sums else None
    call = _Call(
        update,
        columns,
        stores,
        scalars,
        own,
        noop,
        sums,
        codec,
        flag,
        flags if flag is not None else (),
        largest,
    )
    if _runtime.can_fuse(call.device) and _fits(columns):
        return _fused(call)
    return _reference(call)


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of :func:`run`."""

    update: Update
    columns: Sequence[Column]
    stores: tuple[tuple[int, int], ...]
    scalars: Sequence[Scalar]
    own: Sequence[torch.Tensor]
    noop: torch.Tensor | None
    sums: tuple[int, ...]
    codec: Codec
    flag: torch.Tensor | None
    flags: tuple[int, ...]
    largest: bool

    @property
    def device(self) -> torch.device:
        return self.columns[0][0].device


def _fits(columns: Sequence[Column]) -> bool:
    """Whether the columns are what a kernel can walk: fusable dtypes in dense, equal layouts."""
    if any(column[0].dtype not in FUSABLE for column in columns):
        return False
    for column in columns:
        if not all(map(torch.Tensor.is_contiguous, column)):
            return all(map(_same_dense_layout, zip(*columns, strict=True)))
    return True


def _same_dense_layout(position: Sequence[torch.Tensor]) -> bool:
    first = position[0]
    if all(tensor.is_contiguous() for tensor in position):
        return True
    dense = any(
        first.dim() == dims and first.is_contiguous(memory_format=layout)
        for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    return dense and all(tensor.stride() == first.stride() for tensor in position)


# -- the definition ------------------------------------------------------------------------------


@torch.no_grad()
def _reference(call: _Call) -> torch.Tensor | None:
    noop, sums = call.noop, call.sums
    if noop is not None and not _runtime.waits(noop.device):
        if noop.item():
            return torch.zeros(len(sums), len(call.columns[0])) if sums else None
        noop = None
    keep = None if noop is None else noop.reshape(()) != 0
    totals: list[torch.Tensor] = []
    for number, raw in _positions(call):
        values = call.codec.decode(raw, call.scalars)
        mine = [numbers[number] for numbers in call.own]
        updated = call.update.reference(values, call.scalars, mine)
        new = call.codec.encode(raw, values, call.scalars, updated)
        if call.flag is not None:
            raise_flag(call.flag, [new[result] for result in call.flags], keep)
        totals += [_reduced(new[result], call.largest) for result in sums]
        for column, result in call.stores:
            value = new[result].to(raw[column].dtype)
            raw[column].copy_(value if keep is None else torch.where(keep, raw[column], value))
    if not sums:
        return None
    return torch.stack(totals).view(len(call.columns[0]), len(sums)).t()


def _positions(call: _Call) -> Iterable[tuple[int, Values]]:
    """The positions with their numbers; on a CPU in pieces, unless there is something to sum.

    A definition makes a dozen tensors on the way. Those of a piece stay in the cache; those of a
    large tensor are pages that the system has to find and clear first.
    """
    for number, raw in enumerate(zip(*call.columns, strict=True)):
        whole = call.sums or call.device.type != "cpu" or raw[0].numel() <= PIECE
        if whole or not all(map(torch.Tensor.is_contiguous, raw)):
            yield number, raw
        else:
            pieces = zip(*(tensor.view(-1).split(PIECE) for tensor in raw), strict=True)
            yield from ((number, piece) for piece in pieces)


def _reduced(values: torch.Tensor, largest: bool) -> torch.Tensor:
    if not largest:
        return values.sum(dtype=torch.float32)
    return values.amax().float() if values.numel() else values.new_zeros((), dtype=torch.float32)


def raise_flag(
    flag: torch.Tensor, values: Iterable[torch.Tensor], keep: torch.Tensor | None = None
) -> None:
    """Set ``flag`` to 1 if one of ``values`` is not finite, unless ``keep``; without waiting."""
    for value in values:
        bad = value.isfinite().all().logical_not()
        if keep is not None:
            bad = bad & ~keep
        flag.masked_fill_(bad.to(flag.device, non_blocking=True), 1)


# -- the kernel ----------------------------------------------------------------------------------

_T = TypeVar("_T")


class _Recent(OrderedDict[Any, Any]):
    """What was built last, by key; an entry serves as long as its addresses do."""

    limit = 256

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def find(self, key: Any, build: Callable[[], _T]) -> _T:
        with self._lock:
            if key in self:
                self.move_to_end(key)
                found: _T = self[key]
                return found
            made = self[key] = build()
            while len(self) > self.limit:
                self.popitem(last=False)
            return made


_layouts, _tables = _Recent(), _Recent()
_captured: list[Any] = []  # a CUDA graph keeps reading these


def _jitted(name: str) -> list[Any]:
    module, functions = name.split(":")
    found = importlib.import_module(f"apex.kernels.{module}")
    return [getattr(found, function) for function in functions.split(",")]


def _fused(call: _Call) -> torch.Tensor | None:
    from apex.kernels import multi_tensor as kernels  # late: importing us must not import triton

    device = call.device
    numels = [*map(torch.Tensor.numel, call.columns[0])]
    if 0 in numels:
        return _without_empty(call, numels)
    layout = _layout(kernels, tuple(numels), device)
    tables = [_table(kernels, column, device) for column in call.columns]
    dtypes = [column[0].dtype for column in call.columns]
    (function,) = _jitted(call.update.kernel)
    decode, encode = _jitted(call.codec.kernel)
    # Kernels write behind autograd's back; a tensor saved for backward must be seen to change.
    written = [tensor for column, _ in call.stores for tensor in call.columns[column]]
    torch.autograd.graph.increment_version(written)
    return kernels.launch(
        layout,
        tables,
        dtypes,
        function,
        call.stores,
        call.scalars,
        call.own,
        call.noop,
        call.sums,
        (decode, encode),
        largest=call.largest,
        flag=call.flag,
        flags=call.flags,
    )


def _layout(module: Any, numels: tuple[int, ...], device: torch.device) -> kernels.Layout:
    made: kernels.Layout = _made(_layouts, (numels, device), lambda: module.Layout(numels, device))
    return made


def _table(module: Any, column: Column, device: torch.device) -> kernels.Table:
    addresses = tuple(map(torch.Tensor.data_ptr, column))
    key = addresses, device
    made: kernels.Table = _made(_tables, key, lambda: module.Table(addresses, device))
    return made


def _made(cache: _Recent, key: tuple[Any, torch.device], build: Callable[[], _T]) -> _T:
    """What was built on the current stream: another one does not wait for the upload."""
    by_stream: dict[int, _T] = cache.find(key, dict)
    stream = _stream(key[1])
    if not _runtime.capturing():
        if stream not in by_stream:
            by_stream[stream] = build()
        return by_stream[stream]
    # A graph finds what any stream uploaded before; what it uploads itself is there as it runs.
    found = next(iter(by_stream.values()), None) or build()
    _captured.append(found)
    return found


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _without_empty(call: _Call, numels: Sequence[int]) -> torch.Tensor | None:
    full = [number for number, numel in enumerate(numels) if numel]
    sums, device = call.sums, call.device
    out = torch.zeros(len(sums), len(numels), device=device) if sums else None
    if not full:
        return out
    index = torch.tensor(full).to(device, non_blocking=True)  # at once, the host would wait
    columns = [[column[i] for i in full] for column in call.columns]
    some = _fused(replace(call, columns=columns, own=[numbers[index] for numbers in call.own]))
    if out is not None and some is not None:
        out[:, index] = some
    return out


def torch_can(columns: Sequence[Column], more: Container[torch.dtype] = ()) -> bool:
    """Whether torch's own fused CPU kernels take the columns: float32 on a CPU, nothing forced.

    They are the fastest there is on a CPU, but compute 16-bit weights with 16-bit moments.

    Args:
        columns: Of any kind.
        more: dtypes that are as good as float32, because the caller widens them.
    """
    if _runtime.forced() or columns[0][0].device.type != "cpu":
        return False
    dtypes = [column[0].dtype for column in columns]
    return all(dtype == torch.float32 or dtype in more for dtype in dtypes) and _fits(columns)


# -- splitting -----------------------------------------------------------------------------------


def grouped(columns: Sequence[Column]) -> Iterable[tuple[list[int], list[list[torch.Tensor]]]]:
    """Split into lists of one device and one dtype for each column.

    Yields:
        The positions, and the columns at these positions.
    """
    if len({*map(len, columns)}) == 1 and alike(columns):
        yield list(range(len(columns[0]))), [list(column) for column in columns]
        return
    groups: dict[Any, list[int]] = {}
    for number, position in enumerate(zip(*columns, strict=True)):
        key = (position[0].device, *(tensor.dtype for tensor in position))
        groups.setdefault(key, []).append(number)
    for numbers in groups.values():
        yield numbers, [[column[i] for i in numbers] for column in columns]


def alike(columns: Sequence[Column]) -> bool:
    """Whether the columns have tensors, on one device, and each is of one dtype.

    By functions in C: 1,000 tensors in 0.1 ms.
    """
    first = columns[0]
    if first and first[0].is_cpu:
        if not all(map(_IS_CPU, first)):  # half the time of comparing devices
            return False
    elif len({*map(_DEVICE, first)}) != 1:
        return False
    return all(len({*map(_DTYPE, column)}) == 1 for column in columns)


def batches(
    columns: Sequence[Column], size: int
) -> Iterable[tuple[range, list[list[torch.Tensor]]]]:
    """Cut columns of dense tensors into lots that stay in a cache.

    Args:
        columns: Equally long lists; the tensors of a position have the same dense layout.
        size: The largest number of elements of a lot.

    Yields:
        Positions, and the columns there: either whole tensors, flat if one is not contiguous, or
        flat pieces of a larger one.
    """
    if not all(all(map(torch.Tensor.is_contiguous, column)) for column in columns):
        columns = [[x.as_strided((x.numel(),), (1,)) for x in column] for column in columns]
    first = total = 0
    for number, numel in enumerate(map(torch.Tensor.numel, columns[0])):
        if number > first and total + numel > size:
            yield range(first, number), [[*column[first:number]] for column in columns]
            first, total = number, 0
        total += numel
        if numel > size:
            flat = (torch.split(column[number].view(-1), size) for column in columns)
            for pieces in zip(*flat, strict=True):
                yield range(number, number + 1), [[piece] for piece in pieces]
            first, total = number + 1, 0
    if first < len(columns[0]):
        yield range(first, len(columns[0])), [[*column[first:]] for column in columns]


def by_length(columns: Sequence[Column], short: int) -> Iterable[list[list[torch.Tensor]]]:
    """Split columns into the tensors of at most ``short`` elements and the others.

    A lot of :func:`batches` then has either many tensors or few.
    """
    is_short = [numel <= short for numel in map(torch.Tensor.numel, columns[0])]
    if len({*is_short}) == 1:
        yield [list(column) for column in columns]
        return
    yield [[*compress(column, is_short)] for column in columns]
    yield [[*compress(column, map(not_, is_short))] for column in columns]


def flattened(column: Column) -> torch.Tensor:
    """The elements of all tensors of one dtype in one; a view if there is only one tensor."""
    kind = column[0].device.type if column else "cpu"
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    # autocast refuses to join tensors of the other 16-bit type
    with torch.autocast(kind, enabled=False) if casts else contextlib.nullcontext():
        if len(column) > 1 and _are_vectors(column):  # 1,000 short ones: 0.1 ms for 0.4
            return torch.cat(list(column))
        flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(list(column))
    return flat


def unflattened(flat: torch.Tensor, column: Column) -> list[torch.Tensor]:
    """Views of ``flat``, one after the other, in the shapes of ``column``."""
    sizes = [*map(torch.Tensor.numel, column)]
    views: Sequence[torch.Tensor]
    if _are_vectors(column):  # 1,000 short ones: 0.5 ms for 1.1
        views = flat[: sum(sizes)].split_with_sizes(sizes)
    else:
        views = torch._C._nn.unflatten_dense_tensors(flat, list(column))
    return list(views)


def _are_vectors(column: Column) -> bool:
    return {*map(torch.Tensor.dim, column)} == {1}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the memory: the local part of a DTensor, else ``tensor`` itself.

    An address taken from a wrapper is that of nothing. The local part may be a wrapper itself, of
    what a collective has not sent yet.
    """
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    part = to_local()
    whole: torch.Tensor = part.wait() if hasattr(part, "wait") else part
    return whole
