"""Tables of sizes and addresses on the device, kept from one launch to the next.

A launch over lists of tensors reads from tables where its tensors are and how long
(:mod:`apex.kernels._tables`). A warm training step meets the same tensors again and uploads
nothing. The key of a table is what is in it, every number, so that no table is ever out of date:
a tensor elsewhere, or of another size, is another key.

A table serves the stream on which it was uploaded, because another one does not wait for that.

A CUDA graph takes a table only if its upload had ended before the capture: nobody says on which
stream the graph will be replayed, and ``CUDAGraph.capture_begin`` does not synchronize as
``torch.cuda.graph`` does. CUDA refuses to query an event in a capture, so the calls before it do.
Where none has seen the end, the graph uploads a table of its own.

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
from apex.ops.lists.tensor_lists import addresses_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from apex.ops.lists.tensor_lists import TensorList

# Bytes of all tables on devices, with their keys. An address takes some 48 (8 on the device, 40 of
# a Python integer in the key): a million of them, where the optimizer of a model of 300 tensors has
# 1,500.
LIMIT = 2**26
_PER_NUMBER, _PER_TABLE = 40, 2048  # the smallest pieces of memory are 512 bytes each
MOST_CALLS = 256  # whose tables are found without the keys of these


class _Uploaded:
    """A table, and the event behind its upload until the host has seen that pass."""

    def __init__(self, table: Any, device: torch.device) -> None:
        self.table, self.event = table, _event_on(device)

    def look(self) -> None:
        """See whether the upload has ended; not in a capture."""
        if self.event.query():
            self.event = None


class TableCache:
    """Tables by what is in them; the least recently used ones go first.

    Args:
        limit: Bytes that are kept; the table that was found last is kept in any case.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._bytes = 0
        self._tables: OrderedDict[Any, dict[int, _Uploaded]] = OrderedDict()  # by key and stream
        self._captured: dict[int, Any] = {}
        self._again: dict[Any, tuple[Any, tuple[Layout, list[Table]]]] = {}
        self._lock = threading.Lock()

    def of_launch(
        self,
        numels: tuple[int, ...],
        columns: Iterable[TensorList],
        device: torch.device,
    ) -> tuple[Layout, list[Table]]:
        """Find or upload where programs work in tensors of these sizes, and their addresses."""
        addresses = addresses_of(columns)
        capturing = _runtime.capturing()
        # The same call as before has the same tables. Comparing with it takes half as long as the
        # hashes of all keys.
        call = numels, addresses, device, current_stream(device)
        place = addresses[0][0], addresses[-1][0], len(addresses)
        known = self._again.get(place)
        if known is not None and not capturing and known[0] == call:
            return known[1]
        # Where programs work, and a table for each column: one call asks for the lock once.
        wanted = [(Layout, numels), *zip(repeat(Table), addresses, strict=False)]
        layout, *tables = self._find(wanted, device)
        if not capturing and self._have_arrived(wanted, device, call[-1]):
            if len(self._again) >= MOST_CALLS:
                self._again.clear()
            self._again[place] = call, (layout, tables)
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
        if capturing:
            # Any stream's table whose upload has been seen to end is there at each replay. What is
            # uploaded now arrives only when the graph runs, so no other call may use it: it is not
            # put into `_tables`.
            ended = [one.table for one in by_stream.values() if one.event is None]
            table = ended[0] if ended else kind(numbers, device)
            self._captured[id(table)] = table  # the graph reads it as long as it lives
            return table
        found = by_stream.get(stream)
        if found is None:
            found = by_stream[stream] = _Uploaded(kind(numbers, device), device)
            found.table.hosts.clear()  # pinned memory goes back; a graph's stays: it copies again
            self._tables[key] = by_stream
            self._bytes += _size(numbers, found.table)
        elif found.event is not None:
            found.look()  # here, for the captures to come: CUDA refuses a query in one
        self._tables.move_to_end(key)
        if self._bytes > self._limit:
            self._drop_oldest()
        return found.table

    def _have_arrived(
        self, wanted: Iterable[tuple[type, tuple[int, ...]]], device: torch.device, stream: int
    ) -> bool:
        """Whether the host has seen the end of all these uploads, and none was dropped since."""
        found = [self._tables.get((*each, device), {}).get(stream) for each in wanted]
        return all(one is not None and one.event is None for one in found)

    def _drop_oldest(self) -> None:
        """Drop the tables that were not used for longest, of all streams, but not the last one."""
        self._again.clear()
        while self._bytes > self._limit and len(self._tables) > 1:
            (_, numbers, _), by_stream = self._tables.popitem(last=False)
            self._bytes -= sum(_size(numbers, one.table) for one in by_stream.values())


def _size(numbers: tuple[int, ...], table: Layout | Table) -> int:
    uploaded = sum(x.nbytes for x in vars(table).values() if isinstance(x, torch.Tensor))
    return uploaded + _PER_NUMBER * len(numbers) + _PER_TABLE


def _event_on(device: torch.device) -> Any:
    """An event behind what was sent to ``device`` on its current stream; ``None`` on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def current_stream(device: torch.device) -> int:
    """The stream of ``device`` on which is launched now; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


TABLES = TableCache()


def release_captured() -> None:
    """Release the tables of addresses that captured CUDA graphs use.

    If you capture optimizer steps, norms or functions of ``amp_C``, the graph reads small tables at
    each replay: 16 bytes for each tensor of a list. apex does not learn when you delete the graph,
    so it keeps the tables until you call this function. Call it only after you have deleted every
    such graph, because later replays would read memory that is in use for something else.

    Example:
        >>> graph = None  # was a torch.cuda.CUDAGraph
        >>> release_captured()
    """
    TABLES.release_captured()
