"""Run a launch: all threads of many programs at once, an instruction after the other.

Programs that branch differently go on as groups of their own. Threads of one program that do are
scheduled as a GPU may: those at the earliest block run, the others wait; only then do instructions
have masks.
"""

import math

import numpy as np

from tests.gpu.memory import MANY, SEVERAL, Fault, Global, Problem, Space, refuse, thread
from tests.gpu.translation import Registers

THREADS = 1 << 14  # at once: arrays of 64 KiB stay in a cache


class Launch:
    """What all programs of a launch share.

    Args:
        code: The translated kernel.
        grid: Numbers of programs.
        values: Of the parameters: arrays of shape ``(1, 1)``.
        tensors: Words and tensor for each one that may be touched.
        shared: Bytes of shared memory of a program.
        counters: What to count in, if anything.
    """

    def __init__(self, code, grid, values, tensors, shared, counters=None):
        self.code, self.grid, self.counters = code, grid, counters
        self.threads = code.kernel.threads
        self.many = max(1, THREADS // self.threads)  # programs at once
        self.parameters = dict(zip(code.kernel.parameters, values, strict=True))
        self.memory = Global(tensors, self.threads)
        self.shared = -(-shared // 16) * 16

    def run(self):
        """Run all programs."""
        every = np.arange(math.prod(self.grid))
        with np.errstate(all="ignore"):
            for first in range(0, len(every), self.many):
                programs = every[first : first + self.many]
                waiting = [(0, Group(self, programs, self._shared_memory(programs)))]
                while waiting:
                    waiting += self._run(*waiting.pop())

    def _shared_memory(self, programs):
        size, own = self.shared * len(programs), {"shared": self.shared, "first": programs[0]}
        memory, element = np.zeros(size, "u1"), self.code.element
        return Space("shared memory", 0, size, memory, element, self.threads, **own)

    def _run(self, number, group):
        """Run a group from a block on; return the parts into which it falls, if it does."""
        while number < len(self.code.kernel.blocks) and self.code.kernel.blocks[number]:
            leaves = self._block(number, group)
            if leaves is None or leaves is True or leaves.all():
                number = number + 1 if leaves is None else self.code.follows(number)
            elif not leaves.any():
                number += 1
            else:
                return self._parted(group, leaves, self.code.follows(number), number + 1)
        return []

    def _block(self, number, group, mask=None):
        if self.counters:
            self.counters.paths[self.code.kernel.name, number] += len(group.programs)
            many = group.ids.size if mask is None else int(mask.sum())
            self.counters.totals["instructions"] += many * len(self.code.kernel.blocks[number])
        try:
            return self.code.block(number, mask is not None)(group, group.registers, mask)
        except Problem as problem:
            words, who = problem.args
        one, program = thread(who, self.threads)
        place = tuple(map(int, np.unravel_index(program, self.grid[::-1])[::-1]))
        where = f"{one} of program {place}, {self.code.lines[group.site]}"
        raise Fault(f"{self.code.kernel.name}: {words}; {where}")

    def _parted(self, group, leaves, to, following):
        """Groups of the programs that leave and of those that stay; what does both is run."""
        leaves = np.broadcast_to(leaves, (len(group.programs), leaves.shape[1]))
        every, some = leaves.all(1), leaves.any(1)
        for number in np.flatnonzero(some & ~every):
            self._run_apart(
                group.of([number]), np.where(leaves[number : number + 1], to, following)
            )
        found = [(to, every), (following, ~some)]
        return [(number, group.of(np.flatnonzero(which))) for number, which in found if which.any()]

    def _run_apart(self, group, places):
        """Run the threads of one program, which are in several blocks."""
        while (number := int(places.min())) < len(self.code.kernel.blocks):
            mask = places == number
            leaves = self._block(number, group, mask)
            leaves = np.zeros((1, 1), bool) if leaves is None else leaves
            places = np.where(mask, np.where(leaves, self.code.follows(number), number + 1), places)


class Group:
    """Programs that run the same instructions: their registers, and what generated code calls."""

    def __init__(self, launch, programs, shared):
        self.launch, self.programs, self.shared = launch, programs, shared
        self.registers = Registers(launch.code.kernel)
        self.time = 1  # barriers so far
        self.copies, self.batches = [], []
        self.site = 0  # number of the instruction
        lanes = np.arange(launch.threads)[None]
        self.ids = programs[:, None] * launch.threads + lanes
        self.special = {"%tid.x": lanes.astype("u4")}
        places = np.unravel_index(programs, launch.grid[::-1])[::-1]
        for axis, place, number in zip("xyz", places, launch.grid, strict=True):
            self.special[f"%ctaid.{axis}"] = place.astype("u4")[:, None]
            self.special[f"%nctaid.{axis}"] = np.array([[number]], "u4")

    def of(self, which):
        """A group of some programs, at the same place."""
        made = Group(self.launch, self.programs[which], self.shared)
        made.registers, made.time = self.registers.of(which), self.time
        made.copies, *made.batches = (
            [tuple(part[np.isin(copy[-1], made.ids)] for part in copy) for copy in copies]
            for copies in (self.copies, *self.batches)
        )
        return made

    # -- accesses --

    def _active(self, addresses, mask, *others, full=True):
        """Spread arrays over threads; only over those that differ if not ``full``.

        Returns:
            A shape, the mask, and flat arrays: addresses and numbers of threads, then ``others``.
        """
        shapes = [array.shape for array in (addresses, mask, *others) if array is not None]
        shape = np.broadcast_shapes(*shapes, *[self.ids.shape] * full)
        who = self.ids
        if shape != self.ids.shape:
            same = shape[0] == len(self.programs)
            who = self.ids[:, :1] | SEVERAL if same else np.array([[MANY]])
        mask = slice(None) if mask is None else np.broadcast_to(mask, shape).ravel()
        arrays = (np.broadcast_to(x, shape).ravel()[mask] for x in (addresses, who, *others))
        return shape, mask, *arrays

    def _parts(self, of, kind, addresses, size, who):
        """What `split` yields, counted."""
        memory = self.shared if of == "shared" else self.launch.memory
        for space, at, which in memory.split(addresses, size, who):
            if self.launch.counters:
                self.launch.counters.count(space, kind, at, size, who[which])
            yield space, at, which

    def _read(self, of, flat, size, count, who):
        values = np.zeros((len(flat), count), f"u{size}")
        for space, at, which in self._parts(of, "read", flat, size * count, who):
            values[which] = space.read(at, size, count, who[which], self.time)
        return values

    def load(self, of, addresses, size, count, mask):
        """Load ``count`` numbers of ``size`` bytes: an array for each; 0 where ``mask`` is not."""
        full = of == "shared" or self.launch.counters is not None
        shape, mask, flat, who = self._active(addresses, mask, full=full)
        made = np.zeros((count, math.prod(shape)), f"u{size}")
        made[:, mask] = self._read(of, flat, size, count, who).T
        return made.reshape(-1, *shape)

    def store(self, of, addresses, size, values, mask):
        """Store a number of ``size`` bytes of each of ``values``."""
        _, _, flat, who, *columns = self._active(addresses, mask, *values)
        rows = np.stack(columns, axis=1)
        for space, at, which in self._parts(of, "write", flat, size * len(values), who):
            space.write(at, size, rows[which], who[which], self.time)

    # -- warps --

    def _warps(self, array, mask=None):
        """As ``(programs, warps, 32)``; with a mask all threads of a warp have to be active."""
        if mask is not None:
            active = self._warps(mask)
            apart = (active.any(2, keepdims=True) & ~active).ravel()
            refuse(apart, "exchanges values with threads that are elsewhere", self.ids.ravel())
        array = np.broadcast_to(array, (len(array), self.launch.threads))
        return array.reshape(len(array), -1, 32)

    def exchanged(self, array, by, mask):
        """``shfl.sync.bfly``."""
        return [self._warps(array, mask)[:, :, np.arange(32) ^ by].reshape(len(array), -1)]

    def added(self, array, mask):
        """``redux.sync.add``."""
        total = self._warps(array, mask).sum(2, dtype="u4")
        return [np.repeat(total, 32, axis=1)]

    def _matrices(self, addresses, turned):
        """Of each 8x8 matrix of 16 bits: where a thread's two numbers lie, as they are loaded."""
        lane, rows = np.arange(32), self._warps(np.broadcast_to(addresses, self.ids.shape))
        for first in range(0, 32, 8):
            row = rows[:, :, first : first + 8]
            if turned:
                parts = [row[:, :, 2 * (lane % 4) + n] + 2 * (lane // 4) for n in (0, 1)]
            else:
                parts = [row[:, :, lane // 4] + 4 * (lane % 4)]
            yield [part.reshape(self.ids.shape) for part in parts]

    def load_matrices(self, addresses, count, turned):
        """``ldmatrix``."""
        made = []
        for places, _ in zip(self._matrices(addresses, turned), range(count), strict=False):
            parts = [self.load("shared", at, 4 // len(places), 1, None)[0] for at in places]
            parts = [part.astype("u4") << np.uint32(16 * n) for n, part in enumerate(parts)]
            made.append(sum(parts[1:], parts[0]))
        return made

    def store_matrices(self, addresses, values, turned):
        """``stmatrix``."""
        for places, value in zip(self._matrices(addresses, turned), values, strict=False):
            for number, at in enumerate(places):
                part = (value >> np.uint32(16 * number)).astype(f"u{4 // len(places)}")
                self.store("shared", at, 4 // len(places), (part,), None)

    # -- waiting --

    def barrier(self, mask):
        """``bar.sync``: every thread of a program has to be here."""
        if mask is not None:
            refuse(~mask.ravel(), "does not reach a barrier that others wait at", self.ids.ravel())
        self.time += 1
        if self.launch.counters:
            self.launch.counters.totals["barriers"] += len(self.programs)

    def copy(self, to, source, size, part, mask):
        """``cp.async``: of ``part`` bytes, all or none; the rest are zeros."""
        _, _, places, who, sources, part = self._active(to, mask, source, part)
        ((_, places, _),) = self.shared.split(places, size, who)
        values = np.zeros((len(places), size // 4), "u4")
        full = np.flatnonzero(part)
        values[full] = self._read("global", sources[full], 4, size // 4, who[full])
        refuse((part != 0) & (part != size), "copies a part, which is not interpreted", who)
        self.shared.expect(places, size, who, self.time)
        self.copies.append((places, values, who))

    def commit_group(self):
        """``cp.async.commit_group``."""
        self.batches.append(self.copies)
        self.copies = []

    def wait_group(self, pending):
        """``cp.async.wait_group``: all but the last groups are there, for their own threads."""
        while len(self.batches) > pending:
            for places, values, who in self.batches.pop(0):
                self.shared.write(places, 4, values, who, self.time)
