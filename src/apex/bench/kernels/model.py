"""What can be computed for a GPU that is not here: a model, and never a time.

An operation runs through Triton's own JIT, with the kernels compiled for the GPU asked for and a
driver that computes nothing instead of the GPU's: it counts the launches, and from registers
and shared memory of the compiled code follows how many programs fit on a multiprocessor at once.
The tensors are on the CPU; what torch's own functions would launch beside our kernels is not
counted.

It is a process of its own: Triton's driver and its interpreter are chosen for a whole process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from apex.bench.kernels.cases import DTYPES, OF_LISTS
from apex.bench.kernels.layers import OF_LAYERS
from apex.ops import _runtime

__all__ = ["NOTE", "Asked", "Model", "models"]

NOTE = (
    "computed for {target} and never a time: bytes that have to be moved, our kernels' launches "
    "(torch's own are not counted), and how many programs of each kernel fit on a multiprocessor "
    "(SM) by the registers and shared memory of the compiled code"
)
Asked = tuple[str, str, str, bool]  # operation, set of shapes, dtype, whether at full size


@dataclasses.dataclass(frozen=True)
class Model:
    """What is computed for an operation of ours.

    Attributes:
        target: Of the compiler.
        bytes: That have to be moved; ``None`` where the memory does not decide.
        launches: Of our kernels in one call.
        programs: How many programs of each launched kernel fit on a multiprocessor, by its name.
        problem: Why there is no model.
    """

    target: str
    bytes: float | None
    launches: int
    programs: dict[str, int]
    problem: str | None = None


def models(target: str, asked: Sequence[Asked]) -> list[Model]:
    """Compute the models of some operations, in a process of its own.

    Raises:
        RuntimeError: It cannot be done here: no Triton, no compiler for ``target``.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from apex.bench.kernels import model as m; "
    words = [sys.executable, "-c", f"{code}m._main({target!r}, {list(asked)!r})"]
    without = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(words, env=without, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
    return [Model(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def _main(target: str, asked: Sequence[Asked]) -> None:
    from triton.runtime import driver

    from apex.kernels.inspect import compiler, occupancy

    compiler.gpu(target)  # raises if it cannot be compiled for
    limits = occupancy.LIMITS.get(target)
    if limits is None or not target.startswith("sm_"):
        known = ", ".join(name for name in occupancy.LIMITS if name.startswith("sm_"))
        raise SystemExit(f"{target}: no model of it; there are {known}")
    torch.set_num_threads(1)
    stand_in = _driver(target, limits)
    driver.set_active(stand_in)
    found = [_model(target, one, stand_in.launched) for one in asked]
    print(json.dumps([dataclasses.asdict(one) for one in found]))


def _model(target: str, asked: Asked, launched: list[tuple[str, int]]) -> Model:
    name, shapes, dtype, full = asked
    case = next(case for case in (*OF_LISTS, *OF_LAYERS) if case.name == name)
    ours, sizes = case.providers[0], case.shapes[shapes](full)
    moved = ours.bytes_per_element
    elements = sum(torch.Size(size).numel() for size in sizes)
    bytes_ = None if moved is None else moved(DTYPES[dtype]) * elements
    try:
        with _runtime.use("triton"):
            call = ours.prepare(case.make(sizes, DTYPES[dtype], torch.device("cpu")))
            call()  # the first makes an optimizer's state
            launched.clear()
            call()
    except Exception as error:  # noqa: BLE001  one operation without a model is a result
        return Model(target, bytes_, 0, {}, f"{type(error).__name__}: {error}")
    fewest = {name: min(fit for one, fit in launched if one == name) for name, _ in launched}
    return Model(target, bytes_, len(launched), fewest)


def _driver(target: str, limits: Any) -> Any:
    """Make what stands for the driver: it compiles and notes, and computes nothing."""
    from apex.kernels.inspect import compiler
    from apex.kernels.inspect.occupancy import programs_per_multiprocessor

    binaries: list[tuple[int, int]] = []  # registers and shared memory
    noted: list[tuple[str, int]] = []

    class Launcher:
        """The C function that Triton builds for each kernel."""

        def __init__(self, source: Any, metadata: Any) -> None:
            self._name, self._threads = metadata.name, metadata.num_warps * limits.lanes

        def __call__(self, *args: Any) -> None:
            registers, shared = binaries[args[4]]  # after the grid and the stream
            fit = programs_per_multiprocessor(limits, self._threads, registers, shared)
            noted.append((self._name, fit))

    class Driver:
        """The driver."""

        launcher_cls = Launcher
        launched = noted

        class utils:
            """Loads code, and tells what a GPU has."""

            @staticmethod
            def load_binary(name: str, binary: bytes, shared: int, device: int) -> Any:
                with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                    file.write(binary)
                    file.flush()
                    said = compiler.run("cuobjdump", "--dump-resource-usage", file.name)
                registers = int(said.partition("REG:")[2].split()[0])
                binaries.append((registers, shared))
                return 1, len(binaries) - 1, registers, 0, limits.threads_per_program

            @staticmethod
            def get_device_properties(device: int) -> dict[str, int]:
                return {
                    "max_shared_mem": limits.shared_per_program,
                    "multiprocessor_count": 132,
                    "warpSize": limits.lanes,
                }

        def get_current_target(self) -> Any:
            return compiler.gpu(target)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    return Driver()
