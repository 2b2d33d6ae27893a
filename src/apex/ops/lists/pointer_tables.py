"""Tables of sizes and addresses on the device, kept from one launch to the next.

A launch over lists of tensors reads from tables where its tensors are and how long
(:mod:`apex.kernels._tables`). A warm training step meets the same tensors again and uploads
nothing. The key of a table is what is in it, every number, so that no table is ever out of date:
a tensor elsewhere, or of another size, is another key.

A table serves the stream on which it was uploaded, because another one does not wait for that.

CUDA graphs read their tables at each replay, so these are held until :func:`release_captured`, and
with them the pinned memory of those that a graph uploads. Any other upload gives its pinned memory
back at once: torch's allocator keeps it until the copy has ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from apex.kernels._tables import Layout, Table
from apex.ops import _runtime

if TYPE_CHECKING:
    from collections.abc import Iterable

# Bytes of all tables on devices, with their keys. An address takes some 48 (8 on the device, 40 of
# a Python integer in the key): a million of them, where the optimizer of a model of 300 tensors has
# 1,500.
LIMIT = 2**26
_PER_NUMBER, _PER_TABLE = 40, 2048  # the smallest pieces of memory are 512 bytes each


class TableCache:
    """Tables by what is in them; the least recently used ones go first.

    Args:
        limit: Bytes that are kept; the table that was found last is kept in any case.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._bytes = 0
        self._tables: OrderedDict[Any, dict[int, Any]] = OrderedDict()
        self._captured: dict[int, Any] = {}
        self._lock = threading.Lock()

    def of_launch(
        self,
        numels: tuple[int, ...],
        columns: Iterable[Iterable[torch.Tensor]],
        device: torch.device,
    ) -> tuple[Layout, list[Table]]:
        """Find or upload where programs work in tensors of these sizes, and their addresses."""
        addresses = [tuple(map(torch.Tensor.data_ptr, column)) for column in columns]
        layout, *tables = self._find([(Layout, numels), *zip(repeat(Table), addresses)], device)
        return layout, tables

    def table(self, column: Iterable[torch.Tensor], device: torch.device) -> Table:
        """Find or upload the addresses of a column."""
        return self.numbers(map(torch.Tensor.data_ptr, column), device)

    def numbers(self, numbers: Iterable[int], device: torch.device) -> Table:
        """Find or upload a number for each tensor of a column."""
        found: Table = self.find(Table, tuple(numbers), device)
        return found

    def release_captured(self) -> None:
        """Give up what graphs hold."""
        with self._lock:
            self._captured.clear()

    def find(self, kind: type, numbers: tuple[int, ...], device: torch.device) -> Any:
        """Find or upload ``kind(numbers, device)``: its tensors, from those in its ``hosts``."""
        (found,) = self._find([(kind, numbers)], device)
        return found

    def _find(
        self, wanted: Iterable[tuple[type, tuple[int, ...]]], device: torch.device
    ) -> list[Any]:
        stream, capturing = current_stream(device), _runtime.capturing()
        with self._lock:
            return [self._one(*each, device, stream, capturing) for each in wanted]

    def _one(
        self,
        kind: type,
        numbers: tuple[int, ...],
        device: torch.device,
        stream: int,
        capturing: bool,
    ) -> Any:
        key = kind, numbers, device
        by_stream = self._tables.get(key, {})
        found = by_stream.get(stream)
        if capturing:
            # `torch.cuda.graph` synchronizes first: what any stream has uploaded is there. What
            # is uploaded now arrives only when the graph runs, so no other call may use it.
            found = found or next(iter(by_stream.values()), None) or kind(numbers, device)
            self._captured[id(found)] = found
            return found
        if found is None:
            found = by_stream[stream] = kind(numbers, device)
            found.hosts.clear()
            self._tables[key] = by_stream
            self._bytes += _size(numbers, found)
        self._tables.move_to_end(key)
        while self._bytes > self._limit and len(self._tables) > 1:
            (_, old, _), tables = self._tables.popitem(last=False)
            self._bytes -= sum(_size(old, table) for table in tables.values())
        return found


def _size(numbers: tuple[int, ...], table: Layout | Table) -> int:
    uploaded = sum(x.nbytes for x in vars(table).values() if isinstance(x, torch.Tensor))
    return uploaded + _PER_NUMBER * len(numbers) + _PER_TABLE


def current_stream(device: torch.device) -> int:
    """The stream of ``device`` on which is launched now; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


TABLES = TableCache()


def release_captured() -> None:
    """Release the tables of addresses that captured CUDA graphs hold.

    A graph that was captured around optimizer steps, norms or functions of ``amp_C`` reads small
    tables (16 bytes for each tensor of a list) at each replay. Nothing says when the graph is
    deleted, so the tables stay until this is called. Call it when every such graph is gone: a graph
    that is replayed afterwards reads memory that may hold something else.

    Example:
        >>> graph = None  # was a torch.cuda.CUDAGraph
        >>> release_captured()
    """
    TABLES.release_captured()
