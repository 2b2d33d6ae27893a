"""Compile kernels without a GPU and judge them: what can be run, and what is slow.

Memory-bound kernels are as fast as their accesses are wide, and nothing in a kernel's source shows
when the compiler falls back to narrow ones. So every `CompiledCase` is compiled and checked:

* a program can be launched on the target: threads and shared memory;
* no registers are spilled, and nothing else is kept in local memory;
* every pointer is read and written as the case says, and no other way;
* accesses through ``reads`` and ``writes`` are 128 bits wide, or as wide as one thread's share of
  the tile if that is less, and there are enough of them to move the whole tile.

The steps have files of their own: :mod:`.compiler`, :mod:`.machine_code` (reading) and
:mod:`.judge`. Kernels are made for `TARGETS`. For another one only what cannot be launched there is
a problem; what is slow is advice.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import apex.kernels
import tools.kernels.cases
from tools.kernels import derived, instructions, judge
from tools.kernels.case import CompiledCase
from tools.kernels.compiler import TARGETS, UnavailableError
from tools.kernels.instructions import Instruction, disassembled
from tools.kernels.machine_code import Access, MachineCode, compiled

__all__ = [
    "TARGETS",
    "Finding",
    "UnavailableError",
    "cases",
    "cases_of",
    "compiled",
    "files",
    "inspect",
]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        kernel: Name of the operation.
        variant: Which variant of it.
        target: What it was compiled for.
        registers: Of a thread.
        spilled: Bytes of a thread's registers that are written to local memory and read back.
        shared: Bytes of shared memory of a block.
        main_loads: Bits -> number of loads in the main path, tables and scalars left out; ``None``
            where paths cannot be told apart.
        main_stores: The same for stores.
        loads: Bits -> number of loads in all.
        stores: Bits -> number of stores in all.
        bytes_per_element: What the main path moves for each element of the tile.
        instructions: Pipe -> thread instructions of the fast path for each byte that it moves;
            ``None`` for AMD, and for a kernel that moves no tiles.
        limits: GPU with this target -> ``"memory"``, or the pipe that takes longer and how many
            times as long.
        problems: What is wrong, for people.
        advice: What is slow, on a target that the kernels are not made for.
    """

    kernel: str
    variant: str
    target: str
    registers: int
    spilled: int
    shared: int
    main_loads: dict[int, int] | None
    main_stores: dict[int, int] | None
    loads: dict[int, int]
    stores: dict[int, int]
    bytes_per_element: float
    instructions: dict[str, float] | None
    limits: dict[str, str]
    problems: tuple[str, ...]
    advice: tuple[str, ...] = ()


def files() -> list[str]:
    """Names of the kernel files: each is a module, or a package, of one operation."""
    found = [info.name for info in pkgutil.iter_modules(apex.kernels.__path__)]
    return [f"apex.kernels.{name}" for name in found if name[0] != "_"]


def cases_of(file: str) -> list[CompiledCase]:
    """List the cases of a kernel file by its name; that a file has some is for the tests."""
    name = file.rpartition(".")[2]
    if name not in {info.name for info in pkgutil.iter_modules(tools.kernels.cases.__path__)}:
        return list(derived.cases(name))
    return list(importlib.import_module(f"tools.kernels.cases.{name}").cases())


def cases() -> Iterator[CompiledCase]:
    """Yield the cases of all kernel files, each once."""
    seen = set()
    for name in files():
        for case in cases_of(name):
            key = case.name, case.kernel, repr((case.signature, case.constants, case.divisible))
            if key not in seen:
                seen.add(key)
                yield case


def inspect(cases: Sequence[CompiledCase], target: str) -> list[Finding]:
    """Compile cases and judge what comes out.

    Args:
        cases: What to compile.
        target: ``sm_80`` and the like, or ``gfx942`` and the like.

    Raises:
        UnavailableError: The compiler for that target is not here.
    """
    codes = [compiled(case, target) for case in cases]
    programs = disassembled([code.binary for code in codes], target) if codes[0].binary else ()
    return [_judged(*of_case, target) for of_case in itertools.zip_longest(cases, codes, programs)]


def _judged(
    case: CompiledCase, code: MachineCode, program: Sequence[Instruction] | None, target: str
) -> Finding:
    per_byte = None if program is None else judge.instructions(case, code, program)
    loads = [access for access in code.accesses if not access.store]
    stores = [access for access in code.accesses if access.store]
    problems, advice = tuple(judge.refusals(code, target)), tuple(judge.slow(case, code, per_byte))
    if target in TARGETS:
        problems, advice = problems + advice, ()
    label = f"advice, as kernels are not made for {target}: "
    return Finding(
        kernel=case.name,
        variant=case.variant,
        target=target,
        registers=code.registers,
        spilled=code.spilled,
        shared=code.shared,
        main_loads=_widths(case, code, loads, case.reads),
        main_stores=_widths(case, code, stores, case.writes),
        loads=judge.widths(loads),
        stores=judge.widths(stores),
        bytes_per_element=judge.bytes_per_element(case, code),
        instructions=per_byte,
        limits=instructions.limits(target, per_byte) if per_byte else {},
        problems=problems,
        advice=tuple(label + word for word in advice),
    )


def _widths(
    case: CompiledCase, code: MachineCode, accesses: Sequence[Access], names: Sequence[str]
) -> dict[int, int] | None:
    """Of the main path."""
    return judge.widths(judge.main(case, accesses, names)) if code.attributed else None
