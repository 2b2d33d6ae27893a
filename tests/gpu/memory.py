"""Memory: what may be touched, who touched it when, and what that moves.

A `Space` has a shadow: who wrote each element last, who read it, and when. Time is counted in
barriers. Two accesses of an element conflict if one of them writes, and they are by different
programs, or by different threads of a program with no barrier between. A write of the value that is
there already conflicts with nothing: layouts that replicate values store them several times.

A thread has a number in the whole launch. Where one access stands for several threads, it is that
of one with the bit `SEVERAL`, and `MANY` for threads of several programs.

The bounds of global memory are those of the tensors that a launch has as arguments and in tables of
addresses. An access beyond one of them that hits another is not seen.
"""

import ctypes
from collections import Counter

import numpy as np
from numpy.lib.stride_tricks import as_strided

SHARED = 1 << 10  # address of shared memory
NOBODY, PENDING, MANY, SEVERAL = -1, -2, -3, 1 << 40


class Fault(Exception):
    """What an execution did that it may not do."""


class Problem(Exception):
    """A `Fault` without its place: words, and the number of a thread."""


def refuse(bad, words, who):
    """Raise for the first of the accesses that are bad."""
    if bad.any():
        raise Problem(words, int(who[np.argmax(bad)]))


class Space:
    """Bytes with a shadow.

    Args:
        words: What it is, for people.
        start, stop: Addresses of its first byte and behind its last.
        memory: Its bytes, from the multiple of 16 at or below ``start``.
        element: Bytes of which the shadow knows one writer.
        threads: Of a program, a power of 2.
        valid: Which bytes belong to it, of global memory.
        shared: Bytes of a program's part if it is shared memory, which has a part for each program
            and where reading what nobody wrote is a fault.
        first: The program of the first part.
    """

    def __init__(self, words, start, stop, memory, element, threads, valid=None, shared=0, first=0):
        self.words, self.start, self.stop, self.memory = words, start, stop, memory
        self.element, self.threads, self.valid = element, threads, valid
        self.shared, self.first = shared, first
        self.sectors = {"read": set(), "write": set()}  # that were touched
        self.shift = threads.bit_length() - 1
        self._writer = None
        self._reads = []  # while nobody has written

    def split(self, addresses, size, who):
        """Yield this space of shared memory, the places of accesses in it, and which they are."""
        inside, own = addresses - SHARED, self.shared
        bad = (inside < 0) | (inside + size > own)
        refuse(bad, f"out of bounds of shared memory of {own} bytes", who)
        refuse(inside % size != 0, f"misaligned access of {size} bytes of shared memory", who)
        yield self, inside + (who // self.threads - self.first) * own, slice(None)

    def read(self, addresses, size, count, who, time):
        """Read ``count`` numbers of ``size`` bytes at each address: a row for each."""
        access = self._elements(addresses, size * count), who, time
        if self._writer is None and not self.shared:
            self._reads.append(access)
        else:
            self._check_read(*access)
        return self._cells(size, count)[self._rows(addresses, size * count)]

    def write(self, addresses, size, values, who, time):
        """Write a row of ``values`` at each address."""
        count = values.shape[1]
        cells, rows = self._cells(size, count), self._rows(addresses, size * count)
        elements = self._elements(addresses, size * count)
        self._check_write(elements, self._by_element(cells[rows] != values, size), who, time)
        cells[rows] = values
        self._writer[elements], self._written[elements] = who[:, None], time
        lost = (cells[rows] != values).any(1)
        refuse(lost, f"writes what another thread writes with another value ({self.words})", who)

    def expect(self, addresses, size, who, time):
        """Note that bytes are on their way: until they are written no one may read them."""
        elements = self._elements(addresses, size)
        self._check_write(elements, np.ones(elements.shape, bool), who, time)
        self._writer[elements] = PENDING

    def _check_write(self, elements, changed, who, time):
        if self._writer is None:
            self._begin()
        for by, when, word in (
            (self._writer, self._written, "wrote with another value"),
            (self._reader, self._read, "read"),
        ):
            bad = changed & self._conflict(by[elements], when[elements], who, time)
            self._refuse(bad, f"writes what {{}} {word}", by, elements, who)

    def _check_read(self, elements, who, time):
        if self._writer is None:
            self._begin()
        writer = self._writer[elements]
        if self.shared:
            refuse((writer == NOBODY).any(1), "reads shared memory that nobody wrote", who)
            refuse((writer == PENDING).any(1), "reads what is still being copied", who)
        bad = self._conflict(writer, self._written[elements], who, time)
        self._refuse(bad, "reads what {} wrote", self._writer, elements, who)
        reader, mine = self._reader[elements], who[:, None]
        own = self._program(reader) == self._program(mine)
        fresh = (reader == NOBODY) | (reader == mine) | (own & (self._read[elements] < time))
        several = mine | SEVERAL
        new = np.where(fresh, mine, np.where(own, several, MANY))
        self._reader[elements], self._read[elements] = new, time
        now = self._reader[elements]  # of several in this instruction the last one
        if (lost := now != new).any():
            both = np.where(self._program(now) == self._program(mine), several, MANY)
            self._reader[elements[lost]] = both[lost]

    def _conflict(self, by, when, who, time):
        other = self._program(by) != self._program(who)[:, None]
        return (by != NOBODY) & (by != PENDING) & (by != who[:, None]) & (other | (when >= time))

    def _program(self, who):
        """The program of threads; of nobody and of several programs one that is no program."""
        return (who & (SEVERAL - 1)) >> self.shift

    def _refuse(self, bad, words, by, elements, who):
        if bad.any():
            access, number = np.argwhere(bad)[0]
            one = int(by[elements[access, number]])
            other = "several programs" if one < 0 else f"{thread(one, self.threads)[0]} of program "
            other += str(self._program(one)) * (one >= 0)
            place = int(elements[access, number]) * self.element % (self.shared or 1 << 62)
            words = f"{words.format(other)} without a barrier between ({self.words}, byte {place})"
            raise Problem(words, int(who[access]))

    def _begin(self):
        many = (self.stop - self.start) // self.element + 1
        self._writer, self._reader = np.full((2, many), NOBODY, "i8")
        self._written, self._read = np.zeros((2, many), "i4")
        for access in self._reads:
            self._check_read(*access)

    def _elements(self, addresses, size):
        first = (addresses - self.start) // self.element
        return first[:, None] + np.arange(max(1, size // self.element))

    def _by_element(self, changed, size):
        """Whether each element changed, from whether each number of ``size`` bytes did."""
        if size >= self.element:
            return np.repeat(changed, size // self.element, axis=1)
        each = min(self.element // size, changed.shape[1])
        return changed.reshape(len(changed), -1, each).any(2)

    def _cells(self, size, count):
        whole = len(self.memory) // (size * count) * size * count
        return self.memory[:whole].view(f"u{size}").reshape(-1, count)

    def _rows(self, addresses, size):
        return (addresses - (self.start - self.start % 16)) // size


def thread(who, threads):
    """Words for a thread or several, and the number of the program."""
    words = f"thread {who % threads}" if 0 <= who < SEVERAL else "several threads"
    return words, max(who, 0) % SEVERAL // threads


class Global:
    """The tensors of a launch; ``tensors`` are pairs of words and a tensor."""

    def __init__(self, tensors, threads):
        groups, end = [], 0
        for pair in sorted((p for p in tensors if p[1].numel()), key=lambda p: p[1].data_ptr()):
            start = pair[1].data_ptr()
            if start >= end:
                groups.append([])
            groups[-1].append((start, *pair))
            end = max(end, start + _span(pair[1]))
        self.spaces = [_joined(group, threads) for group in groups]
        self._starts = np.array([space.start for space in self.spaces], "i8")

    def split(self, addresses, size, who):
        """Yield each space that is touched, the addresses of its accesses, and which they are."""
        refuse(addresses % size != 0, f"misaligned access of {size} bytes", who)
        numbers = np.searchsorted(self._starts, addresses, side="right") - 1
        refuse(numbers < 0, f"out of bounds: {size} bytes before every tensor", who)
        for number in numbers[:1] if (numbers == numbers[:1]).all() else np.unique(numbers):
            which, space = np.flatnonzero(numbers == number), self.spaces[number]
            first = addresses[which] - space.start
            bad = first + size > space.stop - space.start
            if not bad.any():
                bad = ~space.valid[first[:, None] + np.arange(size)].all(1)
            place = f"byte {first[np.argmax(bad)]} of {space.words}"
            words = f"out of bounds: {size} bytes at {place}, which has {space.stop - space.start}"
            refuse(bad, words, who[which])
            yield space, addresses[which], which


def _span(tensor):
    """Bytes from the first element to behind the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _joined(group, threads):
    """The space of tensors that overlap, given with their starts."""
    start, stop = group[0][0], max(first + _span(tensor) for first, _, tensor in group)
    valid = np.zeros(stop - start, bool)
    for first, _, tensor in group:
        size = tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        as_strided(valid[first - start :], (*tensor.shape, size), (*strides, 1))[:] = True
    base = start - start % 16
    memory = (ctypes.c_uint8 * (-(-(stop - base) // 16) * 16)).from_address(base)
    words = " and ".join(dict.fromkeys(words for _, words, _ in group))
    element = min(tensor.element_size() for *_, tensor in group)
    return Space(words, start, stop, np.frombuffer(memory, "u1"), element, threads, valid)


class Counters:
    """What an execution moved.

    Attributes:
        asked: (words of a tensor, "read" or "write") -> bytes that threads asked for.
        sectors: The same -> sectors of 32 bytes, counted for each instruction of a warp.
        once: The same -> sectors, each counted once in a launch.
        paths: (kernel, block) -> how many programs ran it.
        totals: Threads' ``"instructions"``, programs' ``"barriers"``, ``"conflicts"``: extra passes
            of shared memory because threads of a warp use different words of one bank.
    """

    def __init__(self):
        self.asked, self.sectors, self.once = Counter(), Counter(), Counter()
        self.paths, self.totals = Counter(), Counter()

    def count(self, space, kind, addresses, size, who):
        """Count an access of active threads."""
        if space.shared:
            self.totals["conflicts"] += _conflicts(addresses, size, who)
            return
        self.asked[space.words, kind] += size * len(addresses)
        sectors = addresses // 32
        requests = np.unique(who // 32 * (1 << 43) + sectors)
        self.sectors[space.words, kind] += len(requests)
        before = len(space.sectors[kind])
        space.sectors[kind].update(np.unique(sectors).tolist())
        self.once[space.words, kind] += len(space.sectors[kind]) - before


def _conflicts(addresses, size, who):
    """The passes beyond the first of each group of threads that moves 128 bytes."""
    each = max(1, size // 4)
    words = (addresses[:, None] // 4 + np.arange(each)).ravel()
    keys = np.unique(np.repeat(who // (32 // each), each) * (1 << 32) + words)
    banks, many = np.unique((keys >> 32) * 32 + keys % 32, return_counts=True)
    starts = np.flatnonzero(np.diff(banks // 32, prepend=-1))
    return int((np.maximum.reduceat(many, starts) - 1).sum()) if len(starts) else 0
