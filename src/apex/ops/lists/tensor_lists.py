"""Lists of tensors, ``columns`` of a table: those at one position belong together.

What every operation over lists needs: splitting by device and dtype, numbers on the right device,
and vectors with a number for each position taken apart and put together. Nothing here is uploaded
from pageable memory, which would wait, and which CUDA forbids while a graph is captured: vectors
are sliced and joined by lists of the host, and numbers are arguments of a kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch

from apex.ops import _runtime
from apex.ops.lists.metadata import of_metadata

TensorList = Sequence[torch.Tensor]
Scalar = float | torch.Tensor
Shape = Callable[[torch.Tensor], Sequence[int]]

OWN_MEMORY = frozenset((torch.Tensor, torch.nn.Parameter))  # types of tensors that are no wrappers

_DTYPE, _DEVICE, _IS_CPU = map(attrgetter, ("dtype", "device", "is_cpu"))
_SHAPE, _LAYOUT, _IS_NESTED = map(attrgetter, ("shape", "layout", "is_nested"))
_IS_CONTIGUOUS, _IS_NEG, _STRIDE = (
    torch.Tensor.is_contiguous, torch.Tensor.is_neg, torch.Tensor.stride,
)  # fmt: skip


class TensorColumn(list[torch.Tensor]):
    """A column of tensors that are no wrappers, and what a step has found out about it.

    A step asks for sizes and addresses in several places, 70 ns a tensor each time.

    Attributes:
        is_uniform: Whether the tensors are known to be on one device, of one dtype, and no position
            of theirs is odd.
        known_numels: Their sizes, if these are known.
        whole: The column that this one is a piece of, and where it begins and ends there.
    """

    is_uniform = False
    known_numels: tuple[int, ...] | None = None
    whole: tuple[TensorColumn, int, int] | None = None
    _addresses: tuple[int, ...] | None = None

    def numels(self) -> tuple[int, ...]:
        """How many elements each tensor has."""
        if self.known_numels is None:
            if self.whole is None:
                self.known_numels = tuple(map(torch.Tensor.numel, self))
            else:
                column, first, last = self.whole
                self.known_numels = column.numels()[first:last]
        return self.known_numels

    def addresses(self) -> tuple[int, ...]:
        """Where each tensor begins."""
        (found,) = addresses_of([self])
        return found

    def root(self) -> TensorColumn:
        """The column that this one is a piece of."""
        return self if self.whole is None else self.whole[0].root()


def piece(column: Sequence[Any], first: int, last: int) -> list[Any]:
    """Some tensors of a column, in a row."""
    if not isinstance(column, TensorColumn):
        return list(column[first:last])
    if last - first == len(column):
        return column
    found = TensorColumn(column[first:last])
    found.whole, found.is_uniform = (column, first, last), column.is_uniform
    return found


def numels_of(column: TensorList) -> tuple[int, ...]:
    """How many elements each tensor has."""
    if isinstance(column, TensorColumn):
        return column.known_numels or column.numels()
    return tuple(map(torch.Tensor.numel, column))


def addresses_of(columns: Iterable[TensorList]) -> list[tuple[int, ...]]:
    """Where the tensors of columns begin; in one pass over all that are not known."""
    known: list[TensorColumn] = []
    roots: dict[int, TensorColumn] = {}
    for given in columns:
        column = given if isinstance(given, TensorColumn) else TensorColumn(given)
        known.append(column)
        if column._addresses is None:
            root = column if column.whole is None else column.root()
            if root._addresses is None:
                roots[id(root)] = root
    if roots:
        found = tuple(map(torch.Tensor.data_ptr, chain.from_iterable(roots.values())))
        first = 0
        for root in roots.values():
            root._addresses = found[first : first + len(root)]
            first += len(root)
    return [x._addresses if x._addresses is not None else _addresses_in(x) for x in known]


def _addresses_in(column: TensorColumn) -> tuple[int, ...]:
    if column._addresses is None:
        assert column.whole is not None  # a root has them
        whole, first, last = column.whole
        column._addresses = _addresses_in(whole)[first:last]
    return column._addresses


def scratch(like: TensorList) -> TensorColumn:
    """Uninitialized float32 of the sizes of a column, for a kernel: flat pieces of one allocation.

    A tensor of its own for each would be an allocation for each. Pieces begin at multiples of 16
    bytes, so that accesses are 128 bits wide.
    """
    numels = numels_of(like)
    padded = [-(-numel // 4) * 4 for numel in numels]
    whole = torch.empty(sum(padded), dtype=torch.float32, device=like[0].device)
    found = TensorColumn(torch.split(whole, padded))
    found.known_numels = numels  # without what is behind a piece
    return found


def grouped(
    columns: Sequence[TensorList],
) -> Iterable[tuple[Sequence[int], list[list[torch.Tensor]], bool]]:
    """Split into lists of one device and one dtype for each column.

    Yields:
        The positions, in order, the columns at these positions, and whether they are known to be
        uniform, see :func:`are_uniform`.
    """
    if len(columns) == 1 and isinstance(columns[0], TensorColumn) and columns[0].is_uniform:
        yield range(len(columns[0])), [columns[0]], True
        return
    is_uniform = are_uniform(columns)
    if is_uniform or (len({*map(len, columns)}) == 1 and of_one_kind(columns)):
        yield list(range(len(columns[0]))), [list(column) for column in columns], is_uniform
        return
    groups: dict[object, list[int]] = {}
    for number, position in enumerate(zip(*columns, strict=True)):
        key = (position[0].device, *(tensor.dtype for tensor in position))
        groups.setdefault(key, []).append(number)
    for positions in groups.values():
        yield positions, [[column[i] for i in positions] for column in columns], False


def are_uniform(columns: Sequence[TensorList], *shapes: Shape) -> bool:
    """Whether one launch takes all columns as they are; see :func:`uniform_numels`."""
    return uniform_numels(columns, *shapes) is not None


@of_metadata
def uniform_numels(columns: Sequence[TensorList], *shapes: Shape) -> tuple[int, ...] | None:
    """How many elements each position has, if one launch takes all columns as they are.

    They have tensors, real ones, on one device, each column of one dtype; the tensors of a position
    have one shape, and no position is odd. As long as all that stays the same, what is returned is
    the same object.

    Args:
        columns: Lists of tensors.
        shapes: For the last columns what their shapes are instead, by the tensors of the first.
    """
    if not columns[0] or len({*map(len, columns)}) > 1:
        return None
    tensors = [*chain.from_iterable(columns)]
    alike = columns[: len(columns) - len(shapes)]
    expected = [[*map(_SHAPE, columns[0])]] * len(alike)
    expected += [[*map(shape, columns[0])] for shape in shapes]
    is_uniform = (
        {*map(_LAYOUT, tensors)} == {torch.strided}
        and len({*map(_DEVICE, tensors)}) == 1
        and of_one_kind(columns)
        and not any(column[0].dtype.is_complex for column in columns)
        and [[*map(_SHAPE, column)] for column in columns] == expected
        and not odd_positions(alike)
        and are_contiguous(columns[len(alike) :], columns[len(alike) :])
    )
    return tuple(map(torch.Tensor.numel, columns[0])) if is_uniform else None


@of_metadata
def are_real_and_strided(columns: Sequence[TensorList]) -> bool:
    """Whether no tensor is complex or has another layout than that of a dense one."""
    tensors = [*chain.from_iterable(columns)]
    is_complex = any(dtype.is_complex for dtype in {*map(_DTYPE, tensors)})
    return not is_complex and {*map(_LAYOUT, tensors)} <= {torch.strided}


def refuse_nested(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise ``TypeError`` for a nested tensor, in words: torch would end the process.

    It throws where sizes of a strided one are compared with those of an earlier call.
    """
    found = [*map(_IS_NESTED, tensors)]
    if any(found):
        raise TypeError(
            f"{what} {found.index(True)} is a nested tensor; pass dense tensors. These can be its "
            "parts, x.unbind(), or a padded tensor, torch.nested.to_padded_tensor(x, 0.0)."
        )


def of_one_kind(columns: Sequence[TensorList]) -> bool:
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


def taken(vector: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """``vector[positions]`` for increasing positions; without an index that is uploaded."""
    if len(positions) == len(vector):
        return vector
    slices = [vector[first:last] for first, last in _runs(positions)]
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def as_vector(column: TensorList) -> torch.Tensor:
    """0-dim tensors of one device and dtype as a vector.

    It has their memory where they follow each other there, as what ``unbind`` returned does. Else
    it is a copy.
    """
    first, (addresses,) = column[0], addresses_of([column])
    # Dynamo warns of a function that remembers.
    are_adjacent = _are_adjacent if torch.compiler.is_compiling() else _known_adjacent
    if are_adjacent(addresses, first.element_size()):
        return first.as_strided((len(column),), (1,))
    return torch.stack(list(column))


def _are_adjacent(addresses: tuple[int, ...], size: int) -> bool:
    """Whether elements of that size begin at these addresses without gaps."""
    return addresses == (*range(addresses[0], addresses[0] + len(addresses) * size, size),)


_known_adjacent = functools.lru_cache(maxsize=64)(_are_adjacent)  # a pass less at each step


def merged(parts: Iterable[tuple[Sequence[int], torch.Tensor]]) -> torch.Tensor:
    """Undo :func:`taken`: make one vector of those of several groups.

    Args:
        parts: Increasing positions, and the numbers there; every position is in one part.
    """
    parts = [*parts]
    if len(parts) == 1:
        return parts[0][1]
    slices: list[tuple[int, torch.Tensor]] = []
    for positions, vector in parts:
        start = 0
        for first, last in _runs(positions):
            slices.append((first, vector[start : start + last - first]))
            start += last - first
    return torch.cat([vector for _, vector in sorted(slices, key=itemgetter(0))])


def _runs(positions: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Where positions follow each other: the first, and the one behind the last."""
    first = last = positions[0] if positions else 0
    for position in positions:
        if position != last:
            yield first, last
            first = position
        last = position + 1
    yield first, last


def scalar_on(value: Scalar, device: torch.device) -> Scalar:
    """A number for work on ``device``, without waiting for a device.

    Args:
        value: A number, or a one-element tensor. One on the CPU is read here, and is then a number
            of the host: a CUDA graph that is being captured keeps it as it is now.
        device: Where it is used.

    Returns:
        A float, or a 0-dim float32 tensor on ``device``.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not _runtime.waits(value.device):
        return float(value)
    there = value.detach().to(device, torch.float32, non_blocking=device.type != "cpu")
    return there.reshape(())


def flag_on(flag: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A one-element flag to be read on ``device``; one on the CPU is read here, as it is now."""
    if flag.device == device:
        return flag
    if not _runtime.waits(flag.device):
        return torch.full(flag.shape, flag.item(), dtype=flag.dtype, device=device)
    return flag.to(device, non_blocking=device.type != "cpu")


@contextlib.contextmanager
def flag_to_set(flag: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """``flag``, or one on ``device``: what is set there in this block is set in ``flag``."""
    if flag.device == device:
        yield flag
        return
    there = torch.zeros_like(flag, device=device)
    yield there
    set_flag(flag, there)


def set_flag(flag: torch.Tensor, found: torch.Tensor) -> None:
    """Set ``flag`` to 1 where the one-element ``found`` is not 0; waits only for a CPU's flag."""
    here = found.to(flag.device, non_blocking=not flag.is_cpu)  # a copy to the CPU has to arrive
    flag.masked_fill_(here.reshape(()) != 0, 1)


def are_contiguous(columns: Iterable[TensorList], signed: Iterable[TensorList]) -> bool:
    """Whether all columns are contiguous, and ``signed`` ones have their signs in memory.

    Looking for the negative bit takes 0.1 ms for 1,000 tensors.
    """
    return all(all(map(_IS_CONTIGUOUS, column)) for column in columns) and not any(
        any(map(_IS_NEG, column)) for column in signed
    )


@of_metadata
def odd_positions(columns: Sequence[TensorList]) -> list[int]:
    """Positions whose tensors kernels cannot walk by address alone, in order.

    At the others memory holds the elements of all columns in one order, which may be any, without
    gaps, and with their signs: those of a tensor with the negative bit (``z.conj().imag``) are not
    in memory.

    Args:
        columns: The tensors of a position have one shape.
    """
    if are_contiguous(columns, columns):
        return []
    positions = enumerate(zip(*columns, strict=True))
    return [number for number, position in positions if not _have_one_dense_layout(position)]


def _have_one_dense_layout(position: Sequence[torch.Tensor]) -> bool:
    if any(map(_IS_NEG, position)):
        return False
    if all(map(_IS_CONTIGUOUS, position)):
        return True
    if len({*map(_STRIDE, position)}) > 1:  # those of dimensions of one element do not matter
        position = [*map(torch.squeeze, position)]
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(position[0])
    return dense and len({*map(_STRIDE, position)}) == 1


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


def local_parts(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors that hold the memory; see :func:`local`."""
    if isinstance(tensors, TensorColumn) or OWN_MEMORY.issuperset(map(type, tensors)):
        return tensors
    return [*map(local, tensors)]
