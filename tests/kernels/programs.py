"""What each program of a launch reads and writes, in Triton's interpreter and in any order.

A GPU runs the programs of a launch at once, in any order. The interpreter runs them one after the
other and always in the same order, so that a kernel which depends on the order gives the right
numbers. In this block they run in another one, and every address is noted::

    with recorded("reversed") as launches:
        operation()
    assert [race for launch in launches for race in launch.races()] == []

Programs race if one writes an address that another one reads or writes. Two exceptions go by the
kernel's name: those in `ATOMIC` may meet in atomic operations, and those in `SAME_VALUE` may write
the same value to one element that no program reads.
"""

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from triton.runtime import interpreter

ORDERS = ("forward", "reversed")
ATOMIC = {}  # name of a kernel -> why its atomic operations give the same bits in any order
SAME_VALUE = {"list_kernel": "the flag: each program that finds a value not finite writes a 1"}

READ, WRITE, ATOMICALLY = "read", "write", "atomic"
ELEMENT = 8  # bytes of the widest one
SHIFT = 16  # bits of a program's number in a key; addresses have 47


@dataclass
class Launch:
    """One launch.

    Attributes:
        name: Of the kernel.
        functions: The kernel, and the jitted functions among its arguments.
        order: The programs' numbers in the order in which they ran.
        keys: Kind of access -> pieces of ``address << SHIFT | program``, one for each byte.
        written: Pieces of what was written: keys, and the bytes.
    """

    name: str
    functions: list
    order: list = field(default_factory=list)
    keys: dict = field(default_factory=lambda: defaultdict(list))
    written: list = field(default_factory=list)

    def note(self, kind, program, addresses, mask, size, values=None):
        """Note an access of ``size`` bytes at each address that the mask lets through."""
        addresses, mask = np.broadcast_arrays(addresses, np.asarray(mask, dtype=bool))
        offsets = np.arange(size, dtype=np.uint64)
        each = addresses[mask].astype(np.uint64)[:, None] + offsets
        keys = (each.ravel() << np.uint64(SHIFT)) | np.uint64(program)
        self.keys[kind].append(keys)
        if values is not None and self.name in SAME_VALUE:
            values = np.ascontiguousarray(np.broadcast_to(values, mask.shape)[mask])
            self.written.append((keys, values.view(np.uint8).ravel()))

    def races(self):
        """Say where programs meet: one line for each pair of kinds, with the first address."""
        keys = {kind: _unique(self.keys[kind]) for kind in (READ, WRITE, ATOMICALLY)}
        where = {kind: np.unique(found >> np.uint64(SHIFT)) for kind, found in keys.items()}
        every = _unique(list(keys.values())) >> np.uint64(SHIFT)
        addresses, programs = np.unique(every, return_counts=True)
        met = addresses[programs > 1]
        written, changed, read = (
            np.intersect1d(met, where[kind]) for kind in (WRITE, ATOMICALLY, READ)
        )
        alone = {WRITE: np.setdiff1d(written, read), ATOMICALLY: np.setdiff1d(changed, read)}
        if self.name in SAME_VALUE:
            several = np.intersect1d(alone[WRITE], self._of_several_values())
            if len(alone[WRITE]) - len(several) <= ELEMENT:
                alone[WRITE] = several
        if self.name in ATOMIC:
            alone[ATOMICALLY] = np.intersect1d(alone[ATOMICALLY], written)
        found = {
            "read what another program writes": np.intersect1d(written, read),
            "read what another program changes": np.intersect1d(changed, read),
            "write one address": alone[WRITE],
            "change one address": alone[ATOMICALLY],
        }
        return [
            f"{self.name}: programs {self._at(keys, bad[0])} {words} ({len(bad)} bytes)"
            for words, bad in found.items()
            if len(bad)
        ]

    def _of_several_values(self):
        """Addresses of bytes that were written with more than one value."""
        if not self.written:
            return np.empty(0, np.uint64)
        addresses = np.concatenate([keys for keys, _ in self.written]) >> np.uint64(SHIFT)
        values = np.concatenate([values for _, values in self.written])
        pairs = np.unique((addresses << np.uint64(8)) | values)
        found, counts = np.unique(pairs >> np.uint64(8), return_counts=True)
        return found[counts > 1]

    def _at(self, keys, address):
        """Programs that were at an address, for people."""
        all_keys = _unique(list(keys.values()))
        here = all_keys[(all_keys >> np.uint64(SHIFT)) == address]
        programs = [int(key) & ((1 << SHIFT) - 1) for key in here]
        return ", ".join(map(str, programs[:4])) + (", ..." if len(programs) > 4 else "")


def _unique(pieces):
    return np.unique(np.concatenate(pieces)) if pieces else np.empty(0, np.uint64)


class _Memory:
    """Stands for the C++ module that carries out the interpreter's accesses, and notes them."""

    def __init__(self, module, note):
        self._module, self._note = module, note

    def __getattr__(self, name):
        return getattr(self._module, name)  # a function added there would go unseen

    def load(self, addresses, mask, other, dtype):
        self._note(READ, addresses, mask, np.dtype(dtype).itemsize)
        return self._module.load(addresses, mask, other, dtype)

    def store(self, addresses, values, mask):
        self._note(WRITE, addresses, mask, values.itemsize, values)
        return self._module.store(addresses, values, mask)

    def atomic_rmw(self, operation, addresses, values, mask, order):
        self._note(ATOMICALLY, addresses, mask, values.itemsize)
        return self._module.atomic_rmw(operation, addresses, values, mask, order)

    def atomic_cas(self, addresses, expected, values, order):
        self._note(ATOMICALLY, addresses, True, values.itemsize)
        return self._module.atomic_cas(addresses, expected, values, order)


@contextlib.contextmanager
def recorded(order="forward"):
    """Run the programs of each launch in an order, and give the list of launches."""
    launches = []
    builder, function = interpreter.interpreter_builder, interpreter.InterpretedFunction
    run, memory = function.run, interpreter._interpreter
    set_dim, set_idx = type(builder).set_grid_dim, type(builder).set_grid_idx
    here = {}

    def launched(self, *args, grid, **kwargs):
        jitted = [x for x in (*args, *kwargs.values()) if isinstance(x, function)]
        here.update(launch=Launch(self.fn.__name__, [self, *jitted]), left=[])
        launches.append(here["launch"])
        return run(self, *args, grid=grid, **kwargs)

    def begun(*grid):
        numbers = list(range(int(np.prod(grid))))
        assert len(numbers) < 1 << SHIFT
        if order == "reversed":
            numbers.reverse()
        here["left"] = iter(numbers)
        here["launch"].order = numbers
        set_dim(builder, *grid)

    def next_program(*_):
        here["program"] = next(here["left"])
        set_idx(builder, *map(int, np.unravel_index(here["program"], builder.grid_dim)))

    def note(kind, *access):
        here["launch"].note(kind, here["program"], *access)

    function.run = launched
    builder.set_grid_dim, builder.set_grid_idx = begun, next_program
    interpreter._interpreter = _Memory(memory, note)
    try:
        yield launches
    finally:
        function.run, interpreter._interpreter = run, memory
        del builder.set_grid_dim, builder.set_grid_idx


def bits(tensors):
    """The bytes of tensors, to be compared whatever their dtypes and nans."""
    return [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
