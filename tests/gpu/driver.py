"""A Triton driver that runs kernels here: Triton specialises, compiles and launches as for a GPU.

    with gpu() as running:
        operation()

runs every Triton kernel of the block on CPU tensors, compiled for sm_90, in the interpreter of
PTX. ``TRITON_INTERPRET`` must not be set. Tensors are those of the CPU, so what asks for
``is_cuda`` takes the other branch: pinned copies, streams and captures are not executed.
"""

from __future__ import annotations

import contextlib
import pathlib
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from triton import knobs
from triton.runtime import driver

from apex.ops import _runtime
from apex.ops.lists.pointer_tables import TableCache
from tests.gpu import arithmetic
from tests.gpu.machine import Launch
from tests.gpu.memory import Counters, Fault
from tests.gpu.translation import Code
from tests.kernels import driver as driver_of_nothing
from tests.kernels.driver import Hopper, without_machine_code, without_plans

LISTS = ("list_kernel", "quantized_kernel", "segment_kernel")  # have the bits of their definition
FLOATS = {"fp32": "f4", "fp64": "f8"}


@dataclass
class Running:
    """What happens in a `gpu` block.

    Attributes:
        launched: Names of the kernels, in the order of their launches.
        counters: What to count in, if anything.
        tables: Address of a table -> words and tensor for each one in it, which are kept alive.
    """

    launched: list = field(default_factory=list)
    counters: Counters | None = None
    tables: dict = field(default_factory=dict)


_running = [Running()]  # the last one counts: Triton keeps launchers for as long as the process
_made = []  # the launcher whose kernel is being loaded


class Launcher(driver_of_nothing.Launcher):
    """Runs a kernel. Triton makes one for each, then loads the kernel."""

    def __init__(self, source, metadata):
        super().__init__(source, metadata)
        self.signature, self.metadata, self.code = source.signature, metadata, None
        _made.append(self)

    def __call__(self, x, y, z, stream, function, packed, launch, enter, leave, *arguments):
        super().__call__(x, y, z)
        name, running = self.name, _running[-1]
        if name in LISTS and self.code.loose:
            raise Fault(f"{name}: bits that are open: {', '.join(sorted(self.code.loose))}")
        running.launched.append(name)
        values, tensors = [], []
        for argument, kind, value in _flat(self.signature, arguments):
            values.append(_value(kind, value))
            if isinstance(value, torch.Tensor):
                tensors.append((argument, value))
                tensors += running.tables.get(value.data_ptr(), [])
        scratch = len(self.code.kernel.parameters) - len(values)
        values += [np.zeros((1, 1), "u8")] * scratch
        shared = self.metadata.shared
        Launch(self.code, (x, y, z), values, tensors, shared, running.counters).run()


def _loading(module, function, name, files, key):
    """Triton's hook: the files of the kernel that is being loaded."""
    (file,) = (path for word, path in files.items() if word.endswith(".ptx"))
    _made.pop().code = Code(pathlib.Path(file).read_text())


class Driver(Hopper):
    """Of an H200, whose kernels run in NumPy."""

    launcher_cls = Launcher


def _flat(signature, arguments):
    """Name, type and value of each run-time argument."""
    for (name, kind), value in zip(signature.items(), arguments, strict=True):
        if isinstance(kind, tuple):
            numbered = {f"{name}.{number}": inner for number, inner in enumerate(kind)}
            yield from _flat(numbered, value)
        elif kind != "constexpr":
            yield name, kind, value


def _value(kind, value):
    """A parameter as the array of a register."""
    if kind[0] == "*":
        return np.array([[value.data_ptr()]], "u8")
    if kind in FLOATS:
        made = np.array([[value]], FLOATS[kind])
        return made.view(f"u{made.itemsize}")
    bits = max(8, int(kind[1:]))
    return np.array([[int(value) % (1 << bits)]], f"u{bits // 8}")


@contextlib.contextmanager
def gpu(*, count=False, seed=0):
    """Run kernels here.

    Args:
        count: Whether to count what memory moves.
        seed: Moves the results of approximate instructions.
    """
    running = Running(counters=Counters() if count else None)
    of_class = TableCache.of_launch

    def of_launch(self, numels, columns, device):
        columns = [*map(list, columns)]
        layout, tables = of_class(self, numels, columns, device)
        for column, table in zip(columns, tables, strict=True):
            named = [(f"tensor {n} of a column", tensor) for n, tensor in enumerate(column)]
            running.tables[table.on_device.data_ptr()] = named
        return layout, tables

    before = arithmetic.Seed.value
    arithmetic.Seed.value = seed
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills `torch.empty` with NaN
    _running.append(running)
    driver.set_active(Driver())
    knobs.runtime.kernel_load_start_hook.add(_loading)
    try:
        with (
            mock.patch.object(
                knobs.runtime, "add_stages_inspection_hook", without_machine_code, create=True
            ),
            mock.patch.object(TableCache, "of_launch", of_launch),
            without_plans(),
            _runtime.use("triton"),
        ):
            yield running
    finally:
        knobs.runtime.kernel_load_start_hook.remove(_loading)
        torch.use_deterministic_algorithms(False)
        _running.pop()
        arithmetic.Seed.value = before
